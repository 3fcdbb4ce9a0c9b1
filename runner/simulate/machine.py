"""One machine that never was: the real scheduler, cells that are counted, and a clock that moves by what each step costs."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from runner.engine.backend import Backend
from runner.engine.batch import BatchPlan, Outcome
from runner.engine.kv import KvOp
from runner.engine.lifecycle import State
from runner.engine.order import Owner
from runner.engine.sampling import SamplingParams
from runner.engine.scheduler import Scheduler, StepResult
from runner.engine.sequence import Sequence
from runner.simulate.costs import StepCost
from runner.simulate.limits import NO_LIMITS, Bound, Limits
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

    def refused(self, client: str, bound: Bound, now: float) -> None:
        """A request was not taken."""


class Witnesses:
    """Several, told one after the other."""

    def __init__(self, *witnesses: Witness) -> None:
        self._witnesses = witnesses

    def arrived(self, sequence: Sequence, now: float) -> None:
        """See `Witness`; so for the others."""
        for witness in self._witnesses:
            witness.arrived(sequence, now)

    def stepped(self, plan: BatchPlan, seconds: float, result: StepResult, now: float) -> None:
        """All are told."""
        for witness in self._witnesses:
            witness.stepped(plan, seconds, result, now)

    def ended(self, sequence: Sequence, now: float) -> None:
        """All are told."""
        for witness in self._witnesses:
            witness.ended(sequence, now)

    def refused(self, client: str, bound: Bound, now: float) -> None:
        """All are told."""
        for witness in self._witnesses:
            witness.refused(client, bound, now)


@dataclass(frozen=True, slots=True)
class _Leaves:
    """A request whose client gives up, or whose time is over: all of it, or that to wait for its first slot."""

    sequence: Sequence
    is_timeout: bool = False
    while_waiting: bool = False


class Machine:
    """Drives a scheduler over a trace, as `serving/loop.py` does over clients."""

    def __init__(
        self, scheduler: Scheduler, cells: Cells, cost: StepCost, trace: Trace, witness: Witness, limits: Limits = NO_LIMITS
    ) -> None:
        self.now = 0.0
        self.limits = limits
        self.scheduler, self.cells = scheduler, cells
        self._cost, self._trace, self._witness = cost, trace, witness
        self._next = next(trace.arrivals, None)
        # (when, number, what): replies and ends, whose time comes later.
        self._due: list[tuple[float, int, _Leaves | Arrival]] = []
        self._owners: dict[tuple[int, str], Owner] = {}
        self.n_timed_out = 0
        self._n = self._n_due = self._n_empty = 0

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
            self._pass_time(self._next_at)
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
        moved_s = self._cost.moved_s(n_moved)
        seconds = moved_s + self._cost.seconds(plan)
        self.now += seconds
        result = scheduler.commit(plan, outcome, sampled, self.now, there, moved_s=moved_s)
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
            else:
                self._leave(what)

    def _leave(self, leaves: _Leaves) -> None:
        sequence = leaves.sequence
        if leaves.while_waiting and sequence.state is not State.QUEUED:
            return
        if self.scheduler.cancel(sequence.request_id, self.now) is not None:
            self.n_timed_out += leaves.is_timeout
            self._end(sequence)

    def _submit(self, arrival: Arrival) -> None:
        self._n += 1
        bound = self.limits.refuses(str(arrival.client), self.scheduler, len(self.scheduler.pool.slots))
        if bound is not None:
            self._witness.refused(str(arrival.client), bound, self.now)
            self._reply(arrival.client)
            return
        request_id = f"{arrival.client}/{self._n}"
        # A prompt is one number all over, its own or, as far as it is its client's, the client's: none begins like another's.
        prompt = [-1 - arrival.client] * arrival.n_common + [1 + self._n] * (arrival.n_prompt - arrival.n_common)
        sequence = Sequence(request_id, prompt, GREEDY, arrival.n_generate, ignore_eos=True, tier=arrival.tier, owner=self._owner(arrival))
        sequence.times.arrived_at = sequence.times.prepared_at = arrival.at
        self.scheduler.add(sequence)
        self._witness.arrived(sequence, self.now)
        self._leaves_at(arrival.leaves_at, _Leaves(sequence))
        limits = self.limits
        if limits.timeout_s:
            self._leaves_at(arrival.at + limits.timeout_s, _Leaves(sequence, is_timeout=True))
        if limits.queue_timeout_s:
            self._leaves_at(arrival.at + limits.queue_timeout_s, _Leaves(sequence, is_timeout=True, while_waiting=True))

    def _leaves_at(self, at: float, leaves: _Leaves) -> None:
        if at < NEVER:
            self._later(at, leaves)

    def _later(self, at: float, what: _Leaves | Arrival) -> None:
        self._n_due += 1
        heapq.heappush(self._due, (at, self._n_due, what))

    def _owner(self, arrival: Arrival) -> Owner:
        key = arrival.client, arrival.part
        owner = self._owners.get(key)
        if owner is None:
            owner = self._owners[key] = Owner(str(arrival.client), arrival.part, arrival.weight)
        return owner

    def _end(self, sequence: Sequence) -> None:
        self._witness.ended(sequence, self.now)
        self._reply(int(sequence.owner.client))

    def _reply(self, client: int) -> None:
        answer = self._trace.reply(client, self.now)
        if answer is not None:
            self._later(answer.at, answer)
