"""The chat: read a message, show the answer as it comes, remember both. One failed answer never ends the session."""

import itertools
from typing import TYPE_CHECKING, Final

from runner.config import AnswerOptions
from runner.errors import ContextLengthExceeded, RunnerError
from runner.serving.client import EngineClient
from runner.serving.protocol import ChatPrompt, Finished, ModelInfo, Snapshot, Submit
from runner.terminal.answer import Answer, Ending, sampling_params
from runner.terminal.commands import is_command, run_command
from runner.terminal.conversation import Conversation
from runner.terminal.render import Screen

if TYPE_CHECKING:
    from runner.terminal.reading import Reader  # brings prompt_toolkit

ROOM_DIVISOR: Final = 8  # an eighth of the slot stays free for the answer, as long as there are old turns to drop


class Chat:
    """One conversation of one person with one engine."""

    def __init__(self, engine: EngineClient, info: ModelInfo, screen: Screen, reader: "Reader", options: AnswerOptions) -> None:
        self.conversation = Conversation(system=options.system)
        self.is_over = False
        self._engine = engine
        self._info = info
        self._screen = screen
        self._reader = reader
        self._options = options
        self._answer: Answer | None = None
        self._ids = (f"terminal:{n}" for n in itertools.count(1))  # those of the server hold a #
        self._has_asked = False
        self._has_told_of_dropping = False
        screen.answers.on_broken = self._stop_answer

    @property
    def snapshot(self) -> Snapshot | None:
        """The engine as of its last step."""
        return self._engine.snapshot

    async def run(self) -> None:
        """Read and answer until the person leaves or the input ends. Raises BrokenPipeError and ConfigError where nobody reads."""
        while not self.is_over and (message := await self._reader.read()) is not None:
            await self.take(message)

    async def take(self, message: str) -> None:
        """Answer one message, or do what a command says."""
        self._has_asked = True
        try:
            if is_command(message):
                run_command(self, message)
            elif message:
                await self._reply(message)
        except RunnerError as error:
            self._screen.complain(error)
        await self._screen.flush()

    def interrupt(self) -> bool:
        """Ctrl-C as a signal: True where it was meant for the answer (or came as one ended), False where it means the program."""
        self._stop_answer()
        return self._has_asked and self._screen.surface.is_terminal and not self._reader.is_reading

    def say(self, text: str) -> None:
        """Show lines to the person."""
        self._screen.say(text)

    async def _reply(self, question: str) -> None:
        text = ""
        self.conversation.ask(question)
        try:
            text = await self._answer_that_fits()
        finally:
            is_kept = self.conversation.close(text)  # without an answer the question goes too
        if not is_kept:
            self._screen.note("(no answer)")

    async def _answer_that_fits(self) -> str:
        while True:
            try:
                return await self._generate()
            except ContextLengthExceeded:
                if not self.conversation.drop_oldest():
                    raise
            self._tell_of_dropping()

    async def _generate(self) -> str:
        request_id = next(self._ids)
        self._answer = answer = Answer(self._screen.write, max_prompt=self._max_prompt)
        try:
            self._engine.submit(self._request(request_id), answer)
            ending = await answer.wait()
        finally:
            self._answer = None
            self._engine.cancel(request_id)  # does nothing to one that has ended
            self._screen.end_answer(answer.text)
        self._remark(ending, answer.finished)
        return answer.text

    def _request(self, request_id: str) -> Submit:
        return Submit(
            request_id=request_id,
            prompt=ChatPrompt(list(self.conversation.messages)),
            sampling=sampling_params(self._info.sampling),
            max_tokens=self._options.max_tokens,
        )

    @property
    def _max_prompt(self) -> int | None:
        """The longest prompt that leaves room to answer. A first question may fill the slot: there is nothing to drop."""
        n_ctx = self._info.n_ctx_slot
        return n_ctx - n_ctx // ROOM_DIVISOR if self.conversation.turns else None

    def _stop_answer(self) -> None:
        if self._answer is not None:
            self._answer.stop()

    def _remark(self, ending: Ending, finished: Finished | None) -> None:
        if ending is Ending.STOPPED and self._screen.surface.is_terminal:
            self._screen.note("(stopped)")
        elif ending is Ending.LENGTH:
            self._screen.note("(cut short: the answer may not be longer)" if self._options.max_tokens else "(cut short: the slot is full)")
        if finished is not None:
            self._screen.speed(finished)

    def _tell_of_dropping(self) -> None:
        if not self._has_told_of_dropping:
            self._screen.note(
                f"The conversation has outgrown a slot of {self._info.n_ctx_slot:,} tokens: the oldest turns are forgotten from now on."
            )
        self._has_told_of_dropping = True
