"""One HTTP request's sequences with the engine, from the first submit to the last end, or to a deadline."""

import asyncio
from collections.abc import Callable

from runner.api.deadlines import NO_DEADLINES, Deadlines
from runner.errors import RequestCancelled, RunnerError
from runner.serving.client import EngineClient
from runner.serving.protocol import Finished, Submit


class Choice:
    """The sink of one sequence: keeps its text until a stream takes it, or to the end where the answer is sent whole."""

    __slots__ = (
        "_send",
        "call",
        "error",
        "finished",
        "has_sent",
        "index",
        "is_accepted",
        "is_placed",
        "n_completion",
        "n_dropped",
        "n_prompt",
        "placed_at",
        "request_id",
        "texts",
    )

    def __init__(self, call: "Call", index: int, request_id: str) -> None:
        self.call = call
        self.index = index
        self.request_id = request_id
        self.texts: list[str] = []
        self._send: Callable[[str], None] | None = None
        self.has_sent = False
        self.is_accepted = False
        self.is_placed = False
        self.placed_at = 0  # how many snapshots there had been: those do not know of its slot
        self.n_prompt = 0
        self.n_dropped = 0
        self.n_completion = 0
        self.finished: Finished | None = None
        self.error: RunnerError | None = None

    @property
    def is_over(self) -> bool:
        """Whether the engine has said its last word."""
        return self.finished is not None or self.error is not None

    def stream_to(self, send: Callable[[str], None]) -> None:
        """Send what has come so far, and from now on every text as it comes."""
        self._send = send
        if self.texts:
            self.has_sent = True
            send("".join(self.texts))

    def on_accepted(self, n_prompt: int, n_dropped: int = 0) -> None:
        """See `Sink`."""
        self.n_prompt, self.n_dropped = n_prompt, n_dropped
        self.is_accepted = True
        self.call.choice_accepted(self)

    def on_placed(self) -> None:
        """See `Sink`."""
        self.is_placed = True
        self.placed_at = self.call.n_snapshots
        self.call.choice_placed(self)

    def on_text(self, text: str, n_tokens: int) -> None:
        """See `Sink`."""
        self.n_completion += n_tokens
        if not text:
            return
        if self._send is None:
            self.texts.append(text)
        else:
            self.has_sent = True
            self._send(text)

    def on_finished(self, finished: Finished) -> None:
        """See `Sink`."""
        self.finished = finished
        self.call.choice_over(self)

    def on_failed(self, error: RunnerError) -> None:
        """See `Sink`."""
        self.error = error
        self.call.choice_over(self)

    def restart(self) -> bool:
        """See `Sink`. What was only kept is dropped; a stream's headers are out, but say nothing of the answer."""
        if self.has_sent:
            return False
        self.texts.clear()
        self.n_completion = 0
        self.is_placed = False
        self.call.choice_waits(self)
        return True


class Call:
    """Several sequences that succeed or fail together. The first error ends the others.

    Two instants can be waited for: `accepted` (every prompt fits, from here on a failure cannot change the status) and
    `done`. Both raise the call's error. `on_choice_over` and `when_over` serve metrics and log: they run after the engine's last
    word, which may come later than the end of the HTTP request. `on_change` is told of a choice that was accepted, was placed,
    waits again or is over, before anybody who waits for the call is.
    """

    def __init__(
        self,
        client: EngineClient,
        on_choice_over: Callable[[Choice], None],
        on_change: Callable[[Choice], None] = lambda choice: None,
        deadlines: Deadlines = NO_DEADLINES,
    ) -> None:
        self._client = client
        self._on_choice_over = on_choice_over
        self._on_change = on_change
        self._deadlines = deadlines
        self._queue_timer: asyncio.TimerHandle | None = None
        self._total_timer: asyncio.TimerHandle | None = None
        self._after: list[Callable[[], None]] = []
        self._accepted = asyncio.Event()
        self._done = asyncio.Event()
        self.choices: list[Choice] = []
        self.on_choice_end: Callable[[Choice], None] | None = None
        self.error: RunnerError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing of this call is with the engine any more."""
        return all(choice.is_over for choice in self.choices)

    @property
    def is_accepted(self) -> bool:
        """Whether something may have been sent: every prompt fits, or the call has failed."""
        return self._accepted.is_set()

    @property
    def n_snapshots(self) -> int:
        """Snapshots that the engine has sent so far."""
        return self._client.n_snapshots

    def start(self, submits: list[Submit]) -> None:
        """Hand all sequences to the engine. Raises what `EngineClient.submit` raises, with nothing left running."""
        self.choices = [Choice(self, index, submit.request_id) for index, submit in enumerate(submits)]
        for choice, submit in zip(self.choices, submits, strict=True):
            try:
                self._client.submit(submit, choice)
            except RunnerError as error:
                choice.on_failed(error)
                for later in self.choices[choice.index + 1 :]:
                    later.on_failed(error)
                return
        self._start_timers()

    async def accepted(self) -> None:
        """Wait until every prompt is known to fit. Raises the call's error."""
        await self._accepted.wait()
        self._raise()

    async def done(self) -> None:
        """Wait for the last choice's end. Raises the call's error."""
        await self._done.wait()
        self._raise()

    def fail(self, error: RunnerError) -> None:
        """End the call with an error; its sequences are taken back from the engine."""
        if self.error is None and not self._done.is_set():
            self.error = error
        self._accepted.set()
        self._done.set()
        self.cancel()

    def cancel(self) -> None:
        """Take back what the engine still has; no deadline matters any more."""
        self._stop_timers()
        for choice in self.choices:
            if not choice.is_over:
                self._client.cancel(choice.request_id)

    def when_over(self, action: Callable[[], None]) -> None:
        """Run `action` after the engine's last word: now, if that was said."""
        if self.is_over:
            action()
        else:
            self._after.append(action)

    def choice_accepted(self, choice: Choice) -> None:
        """One more prompt fits (the choices call this)."""
        self._on_change(choice)
        self._set_accepted()

    def choice_placed(self, choice: Choice) -> None:
        """One more sequence is computed (the choices call this): the call as a whole waits no more."""
        if self._queue_timer is not None:
            self._queue_timer.cancel()
            self._queue_timer = None
        self._on_change(choice)

    def choice_waits(self, choice: Choice) -> None:
        """A sequence is answered anew by another engine (the choices call this)."""
        self._on_change(choice)

    def choice_over(self, choice: Choice) -> None:
        """One more sequence has ended (the choices call this)."""
        self._on_choice_over(choice)
        self._on_change(choice)
        if choice.error is not None:
            self.fail(choice.error)
        elif choice.finished is not None and choice.finished.reason == "cancelled":
            self.fail(RequestCancelled("The request was cancelled"))
        elif self.on_choice_end is not None and self.error is None:
            self.on_choice_end(choice)
        self._set_accepted()
        if self.is_over:
            self._done.set()
            self._stop_timers()
            for action in self._after:
                action()
            self._after.clear()

    def _set_accepted(self) -> None:
        if all(choice.is_accepted or choice.is_over for choice in self.choices):
            self._accepted.set()

    def _start_timers(self) -> None:
        if self.is_over:
            return
        loop, deadlines = asyncio.get_running_loop(), self._deadlines
        if deadlines.queue_s > 0:
            self._queue_timer = loop.call_later(deadlines.queue_s, lambda: self.fail(deadlines.waited_too_long()))
        if deadlines.ends_at > 0:
            self._total_timer = loop.call_at(deadlines.ends_at, lambda: self.fail(deadlines.took_too_long()))

    def _stop_timers(self) -> None:
        for timer in (self._queue_timer, self._total_timer):
            if timer is not None:
                timer.cancel()
        self._queue_timer = self._total_timer = None

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
