"""What the front knows of the time to come: the engine's slots and queue as of its last word, put before `runner.engine.waits`."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from runner.api.call import Choice
from runner.config import DEFAULT_ITL_TARGET_S
from runner.engine.order import Tier
from runner.engine.pace import Pace, Work
from runner.engine.waits import Waiter, Waits
from runner.serving.client import EngineClient
from runner.serving.protocol import Counters, SlotState

# As often as the engine tells of its queue, for who asks; else only to learn how it comes out.
LOOK_EVERY_S: Final = 0.25
LEARN_EVERY_S: Final = 1.0
# As many as the engine tells the order of. Beyond, what leaves the queue is reckoned by the first that came.
MAX_WAITING: Final = 1024


@dataclass(frozen=True, slots=True)
class _Live:
    """One sequence that has not ended, with what its request asked for; `number` in the order in which they came."""

    choice: Choice
    client: str
    tier: Tier
    max_tokens: int | None
    number: int


class Outlook:
    """Of one server. Belongs to the event loop's thread. None is said where the engine has not shown yet how fast it is."""

    def __init__(self, engine: EngineClient, clock: Callable[[], float]) -> None:
        self._engine, self._clock = engine, clock
        self._pace = Pace(target_gap_s=DEFAULT_ITL_TARGET_S)
        self._waits = Waits(self._pace)
        self._live: dict[str, _Live] = {}
        self._numbers = itertools.count()
        self._parked: set[str] = set()
        self._counters = Counters()
        self._looked_at = -LEARN_EVERY_S

    def began(self, choice: Choice, *, client: str, tier: Tier, max_tokens: int | None) -> None:
        """A sequence is with the engine."""
        self._live[choice.request_id] = _Live(choice, client, tier, max_tokens, next(self._numbers))

    def changed(self, choice: Choice) -> None:
        """It has a slot, or is over."""
        now, request_id = self._clock(), choice.request_id
        if choice.is_placed:
            self._waits.started(request_id, now)
        if choice.is_over and (live := self._live.pop(request_id, None)) is not None:
            self._waits.gone(request_id)
            if choice.is_placed and (finished := choice.finished) is not None:
                self._pace.learn_end(
                    n_prompt=max(1, finished.n_prompt),
                    n_cached=finished.n_cached,
                    n_generated=finished.n_completion,
                    max_tokens=self._max_tokens(live),
                )
        self._look(LEARN_EVERY_S)

    def wait_s(self, choice: Choice) -> float | None:
        """Until it gets a slot."""
        return self._looked.wait_s(choice.request_id, self._clock())

    def mean_wait_s(self) -> float | None:
        """Of those that wait."""
        return self._looked.mean_s()

    def room_s(self, n: int) -> float | None:
        """Until so many have left the queue."""
        return self._looked.room_s(n, self._clock())

    def tokens_s(self, n_tokens: int) -> float | None:
        """Until prompts of so many tokens have left the queue."""
        return self._looked.tokens_s(n_tokens, self._clock())

    def client_s(self, client: str, n: int) -> float | None:
        """Until so many of a client's have left the queue."""
        return self._looked.client_s(client, n, self._clock())

    @property
    def _looked(self) -> Waits:
        self._look(LOOK_EVERY_S)
        return self._waits

    def _look(self, every_s: float) -> None:
        now, snapshot, info = self._clock(), self._engine.snapshot, self._engine.info
        if snapshot is None or info is None:
            self._counters = Counters()  # the next engine's begin again
            return
        if now - self._looked_at < every_s:
            return
        self._looked_at = now
        self._pace.target_gap_s, self._pace.chunk_rows = info.itl_target_s, info.prompt_chunk
        self._learn(snapshot.counters)
        slots = {slot.request_id: slot for slot in snapshot.slots if slot.request_id in self._live}
        known = self._engine.queue or list(islice(self._live, MAX_WAITING))
        waiting = [live for request_id in known if request_id not in slots and (live := self._live.get(request_id)) is not None]
        parked = {live.choice.request_id for live in waiting if live.choice.is_placed}
        for request_id in self._parked - parked:
            self._waits.started(request_id, now)
        self._parked = parked
        running = sorted(slots.values(), key=lambda slot: self._live[slot.request_id].number)
        self._waits.look(now, map(self._running, running), list(map(self._waiter, waiting)), info.n_slots)

    def _learn(self, new: Counters) -> None:
        """What the engine has done since the last look; nothing where it is another engine."""
        old, self._counters = self._counters, new
        self._pace.learn_steps(new.n_steps - old.n_steps, max(0, new.n_prompt_rows - old.n_prompt_rows), _busy_s(new) - _busy_s(old))

    def _running(self, slot: SlotState) -> Work:
        max_tokens = self._max_tokens(self._live[slot.request_id])
        return self._pace.begun(n_prompt=slot.n_prompt, max_tokens=max_tokens, n_cells=slot.n_cells, n_generated=slot.n_decoded)

    def _waiter(self, live: _Live) -> Waiter:
        choice, max_tokens = live.choice, self._max_tokens(live)
        if choice.n_completion:
            work = self._pace.begun(n_prompt=choice.n_prompt, max_tokens=max_tokens, n_cells=0, n_generated=choice.n_completion)
        else:
            work = self._pace.new(n_prompt=choice.n_prompt, max_tokens=max_tokens)
        return Waiter(choice.request_id, live.client, live.tier, choice.n_prompt, work)

    def _max_tokens(self, live: _Live) -> int:
        """What its slot has room for, or the limit of one that goes on by a context shift."""
        info = self._engine.info
        room = max(1, info.n_ctx_slot - live.choice.n_prompt) if info is not None else 1
        if live.max_tokens is None:
            return room
        return live.max_tokens if info is not None and info.context_shift else min(live.max_tokens, room)


def _busy_s(counters: Counters) -> float:
    return counters.decode_s + counters.sample_s + counters.move_s + counters.python_s
