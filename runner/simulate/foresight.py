"""What those that wait and those that are refused are told of the time to come, beside what came.

A front looks at slots and queue four times a second. Each that waits is told its wait at the first look that finds it and every two
seconds from then on; that is compared with the time until it has a slot. Each that is refused is told when to ask again; that is
compared with the time until it would have been admitted, and it is tried whether it is admitted when it does as it was told.
"""

import heapq
import math
from typing import Final

import msgspec

from runner.engine.batch import BatchPlan
from runner.engine.lifecycle import State
from runner.engine.pace import Pace, Work
from runner.engine.places import aged_place
from runner.engine.scheduler import Scheduler, StepResult
from runner.engine.sequence import Sequence
from runner.engine.waits import Waiter, Waits
from runner.simulate.limits import Bound, Limits
from runner.simulate.spread import Spread

LOOK_EVERY_S: Final = 0.25
TELL_EVERY_S: Final = 2.0
# Waits are told to a tenth of a second: no error is counted of one that is shorter.
LEAST_WAIT_S: Final = 0.1
# Nobody is told to ask again sooner; where that is what is said and would do, it counts for no figure.
LEAST_RETRY_S: Final = 1.0
_SAME: Final = 1e-9


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Times that were said by those that came: the median of |said - came| / came, quantiles of said / came, the share within 2x."""

    n: int
    error_p50: float
    ratio_p10: float
    ratio_p50: float
    ratio_p90: float
    within_2: float


class Ratios:
    """Pairs of what was said and what came, in bounded memory."""

    def __init__(self) -> None:
        self._ratios, self._errors = Spread(), Spread()
        self._n_within = 0

    def add(self, said_s: float, came_s: float) -> None:
        """Take one pair. `came_s` is above zero."""
        ratio = said_s / came_s
        self._ratios.add(ratio)
        self._errors.add(abs(ratio - 1.0))
        self._n_within += 0.5 - _SAME <= ratio <= 2.0 + _SAME

    def told(self) -> Told | None:
        """The figures; None where there was no pair."""
        n, ratios = self._ratios.n, self._ratios
        if not n:
            return None
        return Told(
            n=n,
            error_p50=self._errors.percentile(0.5),
            ratio_p10=ratios.percentile(0.1),
            ratio_p50=ratios.percentile(0.5),
            ratio_p90=ratios.percentile(0.9),
            within_2=self._n_within / n,
        )


class Foresight:
    """Looks on as a front would. Its memory grows with those that wait and not with the requests."""

    def __init__(self, scheduler: Scheduler, *, n_slots: int, target_gap_s: float, limits: Limits) -> None:
        self._scheduler, self._n_slots, self._limits = scheduler, n_slots, limits
        self._pace = Pace(target_gap_s=target_gap_s)
        self._waits = Waits(self._pace)
        self._looked_at = -LOOK_EVERY_S
        self._n_steps = self._n_prompt_rows = 0
        self._busy_s = 0.0
        self._told: dict[str, list[tuple[float, float]]] = {}
        # (refused at, told to wait), by client; those that were refused by the queue's bound under None.
        self._refused: dict[str | None, list[tuple[float, float]]] = {}
        self._retries: list[tuple[float, str]] = []
        self.waits, self.retries = Ratios(), Ratios()
        self.n_refused = self.n_retried = self.n_admitted = 0

    def arrived(self, sequence: Sequence, now: float) -> None:
        """See `machine.Witness`; so for the others."""

    def refused(self, client: str, bound: Bound, now: float) -> None:
        """It is told when to ask again."""
        self.n_refused += 1
        self._look_if_due(now)
        said_s = self._waits.room_s(1, now) if bound is Bound.QUEUE else self._waits.client_s(client, 1, now)
        if said_s is None:
            return
        said_s = max(LEAST_RETRY_S, said_s)
        self._refused.setdefault(client if bound is Bound.CLIENT else None, []).append((now, said_s))
        heapq.heappush(self._retries, (now + math.ceil(said_s), client))

    def stepped(self, plan: BatchPlan, seconds: float, result: StepResult, now: float) -> None:
        """Book who got a slot and what there is room for, and look again where it is time."""
        if plan.chunks:
            self._n_steps += 1
            self._n_prompt_rows += plan.n_prompt_rows
            self._busy_s += seconds
        for sequence in self._scheduler.running:
            if sequence.request_id in self._told:
                self._started(sequence.request_id, now)
        if self._refused:
            self._book_room(now)
        while self._retries and self._retries[0][0] <= now:
            self.n_retried += 1
            client = heapq.heappop(self._retries)[1]
            self.n_admitted += self._limits.refuses(client, self._scheduler, self._n_slots) is None
        if self._scheduler.waiting:
            self._look_if_due(now)

    def ended(self, sequence: Sequence, now: float) -> None:
        """Learn how long its answer was."""
        self._told.pop(sequence.request_id, None)
        self._waits.gone(sequence.request_id)
        if sequence.times.admitted_at:
            n_prompt, n_generated = len(sequence.prompt), sequence.n_generated
            self._pace.learn_end(n_prompt=n_prompt, n_cached=sequence.n_cached, n_generated=n_generated, max_tokens=sequence.max_tokens)

    def _started(self, request_id: str, now: float) -> None:
        self._waits.started(request_id, now)
        for said_at, said_s in self._told.pop(request_id):
            if now - said_at >= LEAST_WAIT_S:
                self.waits.add(said_s, now - said_at)

    def _book_room(self, now: float) -> None:
        for client in list(self._refused):
            if self._limits.refuses(client or "", self._scheduler, self._n_slots) is None:
                for refused_at, said_s in self._refused.pop(client):
                    came_s = max(LEAST_RETRY_S, now - refused_at)
                    if max(said_s, came_s) > LEAST_RETRY_S:
                        self.retries.add(said_s, came_s)

    def _look_if_due(self, now: float) -> None:
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        self._pace.learn_steps(self._n_steps, self._n_prompt_rows, self._busy_s)
        self._n_steps = self._n_prompt_rows = 0
        self._busy_s = 0.0
        waiting = {sequence.request_id: sequence for sequence in self._scheduler.waiting}
        order = [waiting[request_id] for request_id in self._scheduler.waiting.preview()]
        running = sorted(self._scheduler.running, key=aged_place)
        self._waits.look(now, map(self._work, running), list(map(self._waiter, order)), self._n_slots)
        for sequence in order:
            told = self._told.setdefault(sequence.request_id, [])
            said_s = self._waits.wait_s(sequence.request_id, now)
            if said_s is not None and (not told or now - told[-1][0] >= TELL_EVERY_S):
                told.append((now, said_s))

    def _waiter(self, sequence: Sequence) -> Waiter:
        return Waiter(sequence.request_id, sequence.owner.client, sequence.tier, len(sequence.prompt), self._work(sequence))

    def _work(self, sequence: Sequence) -> Work:
        n_prompt, max_tokens = len(sequence.prompt), sequence.max_tokens
        if sequence.state is State.QUEUED:
            return self._pace.new(n_prompt=n_prompt, max_tokens=max_tokens)
        n_cells = sequence.n_kept if sequence.slot_id is None else len(self._scheduler.pool[sequence.slot_id].tokens)
        return self._pace.begun(n_prompt=n_prompt, max_tokens=max_tokens, n_cells=n_cells, n_generated=sequence.n_generated)
