"""One machine that never was: the real scheduler, cells that are counted, and a clock that moves by what each step costs."""

import heapq
from collections.abc import Iterable
from typing import Final, Protocol

from runner.engine.backend import Backend
from runner.engine.batch import BatchPlan, Outcome
from runner.engine.kv import KvOp
from runner.engine.order import Owner
from runner.engine.sampling import SamplingParams
from runner.engine.scheduler import Scheduler, StepResult
from runner.engine.sequence import Sequence
from runner.simulate.costs import StepCost
from runner.simulate.traces import NEVER, Arrival, Trace

GREEDY: Final = SamplingParams(temperature=0.0, seed=0)
# Work that is never planned, with nobody to come and nothing to wait for: the scheduler is stuck.
MAX_EMPTY_STEPS: Final = 100


class Cells(Backend, Protocol):
    """A back end that knows what its operations copy."""

    def n_moved(self, ops: Iterable[KvOp]) -> int:
        """Cells that `ops` copy; asked before they are carried out."""


class Witness(Protocol):
    """Whoever writes down what happens."""

    def arrived(self, sequence: Sequence, now: float) -> None:
        """A request was given to the scheduler."""

    def stepped(self, plan: BatchPlan, seconds: float, result: StepResult, now: float) -> None:
        """A step is over. `seconds` is what it took."""

    def ended(self, sequence: Sequence, now: float) -> None:
        """A request is in its final state."""


class Machine:
    """Drives a scheduler over a trace, as `serving/loop.py` does over clients."""

    def __init__(self, scheduler: Scheduler, cells: Cells, cost: StepCost, trace: Trace, witness: Witness) -> None:
        self.now = 0.0
        self.scheduler, self.cells = scheduler, cells
        self._cost, self._trace, self._witness = cost, trace, witness
        self._next = next(trace.arrivals, None)
        # (when, number, the request that is given up or the one that arrives): replies and cancels, whose time comes later.
        self._due: list[tuple[float, int, str | Arrival]] = []
        self._owners: dict[int, Owner] = {}
        self._n = 0
        self._n_empty = 0

    def run(self) -> None:
        """Step until all have arrived and nothing is left to do."""
        while self.step():
            pass

    def step(self) -> bool:
        """Take what has come, then compute a batch, or let the time pass until there is one. False: all is done."""
        self._receive()
        if not self.scheduler.has_work:
            return self._pass_time(self._next_at)
        plan = self.scheduler.plan(self.now)
        if not plan.chunks and not plan.kv_ops:
            self._n_empty += 1
            assert self._n_empty < MAX_EMPTY_STEPS, "work that is never planned"
            wake_at = NEVER if plan.wake_at is None else plan.wake_at
            self._pass_time(min(wake_at, self._next_at))
        else:
            self._n_empty = 0
        self._carry_out(plan)
        return True

    def _carry_out(self, plan: BatchPlan) -> None:
        scheduler, cells = self.scheduler, self.cells
        n_moved = 0
        if plan.kv_ops:
            n_moved = cells.n_moved(plan.kv_ops)
            refused = cells.apply(plan.kv_ops)
            if refused:
                plan = scheduler.without(plan, refused)
        for sequence in scheduler.take_placed():
            if sequence.slot_id is not None and sequence.n_parks == 0:
                cells.open_sampler(sequence.slot_id, sequence.sampling, (), ignore_eos=True)
        outcome = cells.decode(plan) if plan.chunks else Outcome.DONE
        sampled = cells.sample(plan) if outcome is Outcome.DONE and plan.chunks else []
        there = {chunk.slot_id: cells.n_cells(chunk.slot_id) for chunk in plan.chunks} if outcome is Outcome.BROKEN else None
        seconds = self._cost.seconds(plan, n_moved)
        self.now += seconds
        result = scheduler.commit(plan, outcome, sampled, self.now, there)
        self._witness.stepped(plan, seconds, result, self.now)
        for sequence in result.ended:
            self._end(sequence)
        for sequence, _ in result.failed:
            self._end(sequence)

    def _pass_time(self, until: float) -> bool:
        if until == NEVER:
            return False
        self.now = max(self.now, until)
        return True

    @property
    def _next_at(self) -> float:
        """When something happens by itself."""
        next_at = NEVER if self._next is None else self._next.at
        return min(next_at, self._due[0][0]) if self._due else next_at

    def _receive(self) -> None:
        now = self.now
        while self._next is not None and self._next.at <= now:
            self._submit(self._next)
            self._next = next(self._trace.arrivals, None)
        while self._due and self._due[0][0] <= now:
            what = heapq.heappop(self._due)[2]
            if isinstance(what, Arrival):
                self._submit(what)
            elif (left := self.scheduler.cancel(what, now)) is not None:
                self._end(left)

    def _submit(self, arrival: Arrival) -> None:
        self._n += 1
        request_id = f"{arrival.client}/{self._n}"
        # A prompt is one number all over, its own or, as far as it is its client's, the client's: none begins like another's.
        prompt = [-1 - arrival.client] * arrival.n_common + [1 + self._n] * (arrival.n_prompt - arrival.n_common)
        sequence = Sequence(
            request_id, prompt, GREEDY, arrival.n_generate, ignore_eos=True, tier=arrival.tier, owner=self._owner(arrival.client)
        )
        sequence.times.arrived_at = sequence.times.prepared_at = arrival.at
        self.scheduler.add(sequence)
        self._witness.arrived(sequence, self.now)
        if arrival.leaves_at < NEVER:
            heapq.heappush(self._due, (arrival.leaves_at, self._n, request_id))

    def _owner(self, client: int) -> Owner:
        owner = self._owners.get(client)
        if owner is None:
            owner = self._owners[client] = Owner(str(client))
        return owner

    def _end(self, sequence: Sequence) -> None:
        self._witness.ended(sequence, self.now)
        answer = self._trace.reply(int(sequence.owner.client), self.now)
        if answer is not None:
            self._n += 1
            heapq.heappush(self._due, (answer.at, self._n, answer))
