"""The requests that have not ended, and the sinks that hear of them: whatever a sink raises costs its own request only."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, Protocol

from runner.errors import RunnerError
from runner.serving.protocol import Finished, Stamps, Submit

P = ParamSpec("P")
log = logging.getLogger("slotfile.engine")


class Sink(Protocol):
    """Who receives one request's events, on the event loop, straight from the pipe. No method may block or raise."""

    def on_accepted(self, n_prompt: int, n_dropped: int = 0) -> None:
        """The prompt fits, without `n_dropped` of its messages; may come again after `restart`."""

    def on_placed(self) -> None:
        """It holds a slot and is computed: it waits no more. May come before `on_accepted`, and again after `restart`."""

    def on_text(self, text: str, n_tokens: int) -> None:
        """Text became complete; `text` may be empty while it is held back."""

    def on_finished(self, finished: Finished) -> None:
        """The end. Called once, or `on_failed` is."""

    def on_failed(self, error: RunnerError) -> None:
        """The end by a refusal (InvalidRequest and its kind, before `on_accepted`) or a fault."""

    def restart(self) -> bool:
        """The engine has ended. True: no text has reached the client, and what was gathered is dropped: the next engine answers anew."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request that has not ended. `is_with_engine` and what follows it speak of the present engine."""

    submit: Submit
    sink: Sink
    is_cancelled: bool = False
    is_broken: bool = False
    n_deaths: int = 0
    is_with_engine: bool = False
    is_accepted: bool = False
    is_placed: bool = False
    handed_at: float = 0.0

    @property
    def request_id(self) -> str:
        """The id it was submitted with."""
        return self.submit.request_id

    def leave_engine(self) -> None:
        """Its engine has ended."""
        self.is_with_engine = self.is_accepted = self.is_placed = False


class LiveRequests:
    """All live requests in order of arrival, which is the order in which each engine gets them."""

    def __init__(self, on_broken: Callable[[str], None]) -> None:
        """`on_broken` is told the id of a request whose sink raised before its end."""
        self._by_id: dict[str, LiveRequest] = {}
        self._on_broken = on_broken

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Those of this moment: sinks may end and add requests meanwhile."""
        return iter(list(self._by_id.values()))

    @property
    def with_engine(self) -> list[LiveRequest]:
        """Those that the present engine has."""
        return [live for live in self if live.is_with_engine]

    def add(self, submit: Submit, sink: Sink) -> LiveRequest:
        """Raises ValueError for an id that is live."""
        if submit.request_id in self._by_id:
            raise ValueError(f"request id {submit.request_id!r} is live already")
        live = self._by_id[submit.request_id] = LiveRequest(submit, sink)
        return live

    def get(self, request_id: str) -> LiveRequest | None:
        """None where it has ended."""
        return self._by_id.get(request_id)

    def accept(self, request_id: str, n_prompt: int, n_dropped: int) -> None:
        """The engine has prepared it."""
        if (live := self.get(request_id)) is not None:
            live.is_accepted = True
            self._tell(live, live.sink.on_accepted, n_prompt, n_dropped)

    def place(self, request_id: str) -> None:
        """The engine computes it."""
        if (live := self.get(request_id)) is not None and not live.is_placed:
            live.is_placed = True
            self._tell(live, live.sink.on_placed)

    def give_text(self, request_id: str, text: str, n_tokens: int) -> None:
        """Pass on a piece of its answer."""
        if (live := self._by_id.get(request_id)) is not None:
            self._tell(live, live.sink.on_text, text, n_tokens)

    def finish(self, finished: Finished) -> None:
        """Its last word; nothing happens where it has ended."""
        if (live := self._by_id.pop(finished.request_id, None)) is not None:
            self._tell_end(live, live.sink.on_finished, finished)

    def finish_cancelled(self, request_id: str) -> None:
        """The end of one that no engine has anything to say of."""
        self.finish(Finished(request_id, "cancelled", 0, 0, 0, Stamps(0.0, 0.0, 0.0, 0.0, 0.0)))

    def fail(self, request_id: str, error: RunnerError) -> None:
        """Its last word, an error."""
        if (live := self._by_id.pop(request_id, None)) is not None:
            self._tell_end(live, live.sink.on_failed, error)

    def fail_all(self, error: RunnerError) -> None:
        """The last word for everybody."""
        for live in self:
            self.fail(live.request_id, error)

    def may_restart(self, live: LiveRequest) -> bool:
        """Ask its sink whether the next engine may answer it from the start."""
        try:
            return live.sink.restart()
        except Exception:
            log.exception("id=%s its sink failed at a restart", live.request_id)
            return False

    def _tell(self, live: LiveRequest, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if live.is_broken:
            return
        try:
            call(*args, **kwargs)
        except Exception:
            log.exception("id=%s its sink failed: the request is cancelled", live.request_id)
            live.is_broken = True
            self._on_broken(live.request_id)

    def _tell_end(self, live: LiveRequest, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception:
            log.exception("id=%s its sink failed at the end", live.request_id)
