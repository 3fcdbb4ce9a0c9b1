"""What a stream may be told before its first text: `event: queue` while it waits, `event: prefill` while its prompt is computed.

Only for clients that ask with a header: those of OpenAI take every event for a chunk. A request of several answers waits while none of
them holds a slot; its place is the best of theirs, its prompt that of the first which is being computed.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from runner.api.call import Call, Choice
from runner.api.errors import shown
from runner.api.sse import EventStream, named_event
from runner.api.standing import Standing, Standings
from runner.errors import InvalidRequest
from runner.serving.client import EngineClient

NOTICES_HEADER: Final = "X-Queue-Events"
# A place that stays is said again after this time and a look more: 2 seconds at most. The engine may be silent meanwhile.
QUEUE_EVERY_S: float = 1.5
LOOK_EVERY_S: float = 0.5
PREFILL_EVERY_S: float = 0.25
_CHOICES: Final = {"1": True, "true": True, "0": False, "false": False}
_UNSAID: Final = 0

WaitOf = Callable[[Choice, int], float | None]


class QueueNotice(msgspec.Struct, frozen=True):
    """`place` counts from 1; it is null where too many wait to tell, the wait where nothing is known of the pace."""

    place: int | None
    n_waiting: int
    estimated_wait_s: float | None


class PrefillNotice(msgspec.Struct, frozen=True):
    """Tokens: of `n_prompt`, `n_cached` were there already and `n_computed` have been computed."""

    n_prompt: int
    n_cached: int
    n_computed: int


def wants_notices(header: str | None) -> bool:
    """Whether a request asks for them. Raises InvalidRequest for a header that is neither yes nor no."""
    if header is None:
        return False
    if (choice := _CHOICES.get(header.strip().lower())) is None:
        text = f"The header {NOTICES_HEADER} is {shown(ascii(header))}; it takes {', '.join(_CHOICES)}"
        raise InvalidRequest(text, param=NOTICES_HEADER)
    return choice


class Notices:
    """The streams of one server that listen. Costs nothing while there are none. Belongs to the event loop's thread."""

    def __init__(self, client: EngineClient, wait_s: WaitOf) -> None:
        """`wait_s` says when a choice at this place will get its slot."""
        self._client = client
        self._wait_s = wait_s
        self._listeners: set[_Listener] = set()
        self._timer: asyncio.TimerHandle | None = None
        client.on_snapshot = self._tell

    @contextmanager
    def told_to(self, stream: EventStream, call: Call) -> Iterator[None]:
        """Tell `stream` how its call stands, until the end of this context."""
        listener = _Listener(stream, call, self._wait_s)
        self._listeners.add(listener)
        if self._timer is None:
            self._look_later()
        try:
            yield
        finally:
            self._listeners.discard(listener)

    def _tell(self) -> None:
        if not self._listeners:
            return
        standings, now = Standings(self._client), asyncio.get_running_loop().time()
        for listener in self._listeners:
            listener.update(standings, now)

    def _look(self) -> None:
        self._timer = None
        if self._listeners:
            self._tell()
            self._look_later()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)


class _Listener:
    """One stream, and what it was told last."""

    def __init__(self, stream: EventStream, call: Call, wait_s: WaitOf) -> None:
        self._stream, self._call, self._wait_s = stream, call, wait_s
        self._place: int | None = _UNSAID
        self._queue_at = asyncio.get_running_loop().time()
        self._prefill: PrefillNotice | None = None
        self._prefill_at = -PREFILL_EVERY_S

    def update(self, standings: Standings, now: float) -> None:
        """Tell what is new."""
        found = [(choice, standings.of(choice)) for choice in self._call.choices if not choice.is_over]
        if not found:
            return
        if all(standing.is_waiting for _, standing in found):
            self._tell_place(found, standings, now)
        else:
            self._place = _UNSAID
            self._tell_prefill([standing for _, standing in found], now)

    def _tell_place(self, found: list[tuple[Choice, Standing]], standings: Standings, now: float) -> None:
        places = [(standing.place, choice.index, choice) for choice, standing in found if standing.place is not None]
        place, _, first = min(places) if places else (None, 0, None)
        # A place that is not known is no news: mostly the engine's queue as we know it is older than the request.
        if place in (None, self._place) and now - self._queue_at < QUEUE_EVERY_S:
            return
        self._place, self._queue_at = place, now
        wait_s = self._wait_s(first, place) if first is not None and place is not None else None
        notice = QueueNotice(place, max(standings.n_waiting, place or 1), round(wait_s, 1) if wait_s is not None else None)
        self._stream.offer(named_event(b"queue", msgspec.json.encode(notice)))

    def _tell_prefill(self, found: list[Standing], now: float) -> None:
        slot = next((standing.slot for standing in found if standing.state == "prefill" and standing.slot is not None), None)
        if slot is None or now - self._prefill_at < PREFILL_EVERY_S or any(choice.has_sent for choice in self._call.choices):
            return
        notice = PrefillNotice(slot.n_prompt, slot.n_cached, max(0, min(slot.n_cells, slot.n_prompt) - slot.n_cached))
        if notice != self._prefill:
            self._prefill, self._prefill_at = notice, now
            self._stream.offer(named_event(b"prefill", msgspec.json.encode(notice)))
