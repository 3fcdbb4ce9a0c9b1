"""An engine that says what a test told it to say, and a person who types what a test wrote down."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from runner.errors import ContextLengthExceeded, RunnerError
from runner.serving.client import EngineClient, EngineState, Sink
from runner.serving.protocol import ChatPrompt, Finished, ModelInfo, Stamps, Submit
from tests.fakes import model_info

STAMPS = Stamps(arrived_at=10.0, prepared_at=10.0, admitted_at=10.0, first_token_at=10.5, finished_at=11.5)


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted answer. `error` ends it; `is_endless` leaves it open after its pieces."""

    pieces: tuple[str, ...]
    reason: str = "stop"
    error: RunnerError | None = None
    is_endless: bool = False


class ScriptedEngine(EngineClient):
    """Counts a prompt's words as its tokens and refuses what is longer than a slot; otherwise gives the replies in order."""

    def __init__(self, info: ModelInfo | None = None) -> None:
        self.state = EngineState.READY
        self.info = self.model = info or model_info()
        self.snapshot = None
        self.submitted: list[Submit] = []
        self.cancelled: list[str] = []
        self._replies: list[Reply] = []

    def enqueue(self, *pieces: str, reason: str = "stop", error: RunnerError | None = None, is_endless: bool = False) -> None:
        """The next answer."""
        self._replies.append(Reply(pieces, reason, error, is_endless))

    @property
    def conversations(self) -> list[list[tuple[str, str]]]:
        """What was submitted, as (role, content) pairs."""
        return [[(message["role"], message["content"]) for message in _messages(submit)] for submit in self.submitted]

    def submit(self, submit: Submit, sink: Sink) -> None:
        """Answer as scripted, in the loop's next turns."""
        self.submitted.append(submit)
        n_prompt = sum(len(message["content"].split()) for message in _messages(submit))
        loop = asyncio.get_running_loop()
        if n_prompt > self.model.n_ctx_slot:
            error = ContextLengthExceeded(f"The prompt has {n_prompt} tokens; a slot holds {self.model.n_ctx_slot}")
            loop.call_soon(sink.on_failed, error)
            return
        loop.call_soon(sink.on_accepted, n_prompt)
        self._play(self._replies.pop(0) if self._replies else Reply(("ok",)), submit, sink, n_prompt)

    def cancel(self, request_id: str) -> None:
        """Remember it."""
        self.cancelled.append(request_id)

    def _play(self, reply: Reply, submit: Submit, sink: Sink, n_prompt: int) -> None:
        loop = asyncio.get_running_loop()
        for piece in reply.pieces:
            loop.call_soon(sink.on_text, piece, 1)
        if reply.error is not None:
            loop.call_soon(sink.on_failed, reply.error)
        elif not reply.is_endless:
            finished = Finished(submit.request_id, reply.reason, n_prompt, 0, len(reply.pieces), STAMPS)
            loop.call_soon(sink.on_finished, finished)


class ScriptedPerson:
    """A reader that types these messages and leaves."""

    def __init__(self, messages: Sequence[str]) -> None:
        self.is_reading = False
        self._messages = list(messages)

    async def read(self) -> str | None:
        """The next message."""
        return self._messages.pop(0) if self._messages else None


def _messages(submit: Submit) -> list[dict[str, str]]:
    assert isinstance(submit.prompt, ChatPrompt)
    return submit.prompt.messages
