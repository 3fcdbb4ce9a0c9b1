"""A machine that is watched: after every step cells equal tokens, slots and queue hold what they should, and every end is the first."""

from collections import Counter
from collections.abc import Iterable

from runner.engine.batch import BatchPlan
from runner.engine.kv import Copy, Fork, KvOp, Load, Save, Swap, Trim
from runner.engine.lifecycle import State
from runner.engine.scheduler import Scheduler, StepResult
from runner.engine.sequence import Sequence
from runner.simulate.costs import Costs, StepCost
from runner.simulate.limits import Bound
from tests.engine.cells import FakeBackend

COST = StepCost(Costs())


class Cells(FakeBackend):
    """Cells with what is in them. Where `is_quick`, the sampled tokens are a count: another sequence's would be seen just as well."""

    def __init__(self, n_slots: int, *, n_batch: int, n_ctx: int, is_quick: bool) -> None:
        super().__init__(n_slots, n_batch=n_batch, n_ctx=n_ctx)
        self._is_quick = is_quick
        self._n_sampled = 0

    def sample(self, plan: BatchPlan) -> list[int]:
        """One token for each chunk with logits."""
        self.plans.clear()
        self.ops.clear()
        if not self._is_quick:
            return super().sample(plan)
        first, self._n_sampled = self._n_sampled, self._n_sampled + plan.n_outputs
        return list(range(first, self._n_sampled))

    def n_moved(self, ops: Iterable[KvOp]) -> int:
        """One each."""
        return sum(isinstance(op, Swap | Fork | Copy | Save | Load) for op in ops)


class Watch:
    """Checks the invariants of a scheduler as it runs."""

    def __init__(self, scheduler: Scheduler, cells: Cells, *, n_batch: int) -> None:
        self.scheduler, self.cells, self.n_batch = scheduler, cells, n_batch
        self.submitted: list[Sequence] = []
        self.refusals: list[tuple[str, Bound]] = []
        self.n_ends: Counter[str] = Counter()
        self.tokens: dict[str, list[int]] = {}

    def arrived(self, sequence: Sequence, now: float) -> None:
        """Remember it."""
        self.submitted.append(sequence)

    def stepped(self, plan: BatchPlan, seconds: float, result: StepResult, now: float) -> None:
        """Everything that must hold between two steps."""
        assert plan.n_rows <= self.n_batch
        assert seconds >= 0
        for sequence, _ in result.texts:
            assert sequence.pending is not None
            self.tokens.setdefault(sequence.request_id, []).append(sequence.pending)
        scheduler = self.scheduler
        for slot in scheduler.pool.slots:
            expected = self.cells.cells[slot.slot_id]
            cuts = [op.keep for op in scheduler.memory.orders if isinstance(op, Trim) and op.slot_id == slot.slot_id]
            assert slot.tokens == expected[: min(cuts, default=len(expected))], f"slot {slot.slot_id} has other cells than tokens"
            assert slot.sequence is None or slot.sequence.slot_id == slot.slot_id
        held = [slot.sequence for slot in scheduler.pool.slots if slot.sequence is not None]
        assert set(map(id, held)) == set(map(id, scheduler.running))
        assert all(sequence.state in (State.PREFILL, State.DECODE) for sequence in held)

    def ended(self, sequence: Sequence, now: float) -> None:
        """Once, in the final state, without a slot, and in order."""
        times = sequence.times
        self.n_ends[sequence.request_id] += 1
        assert sequence.state is State.FINISHED
        assert sequence.reason is not None
        assert sequence.slot_id is None
        instants = [at for at in (times.arrived_at, times.admitted_at, times.first_token_at, times.last_token_at) if at]
        assert sorted(instants) == instants
        assert times.finished_at == now >= max(instants, default=0)

    def refused(self, client: str, bound: Bound, now: float) -> None:
        """Remember whose."""
        self.refusals.append((client, bound))

    def finish(self) -> None:
        """Every request has ended once, and nothing is left behind."""
        assert self.n_ends == Counter(sequence.request_id for sequence in self.submitted)
        assert set(self.n_ends.values()) <= {1}
        scheduler = self.scheduler
        assert not scheduler.has_work
        assert not scheduler.running
        assert len(scheduler.waiting) == 0
        assert all(slot.is_free for slot in scheduler.pool.slots)
        assert scheduler.parked_bytes == 0
        assert self.cells.chains == {}
        assert len(self.cells.states) == len(scheduler.memory.host)
