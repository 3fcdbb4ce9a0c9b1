"""20,000 requests of 10,000 clients through the real scheduler: what must hold at every step, at every end, and when all is over."""

import pytest

from runner.config import PolicyName
from runner.engine.batch import BatchPlan
from runner.engine.capacity import padded
from runner.engine.lifecycle import Reason
from runner.engine.preempt import MAX_PARKS
from runner.engine.scheduler import Scheduler, StepResult
from runner.engine.sequence import Sequence
from runner.simulate.machine import Machine
from runner.simulate.simulation import Setup, make_scheduler, seconds_between
from runner.simulate.traces import TRACES, Scene
from tests.simulate.cells import COST, Cells, Watch

N_SLOTS = 8
LONGEST = 256  # tokens: what a slot holds
TARGET_GAP_S = 0.25


class Waits(Watch):
    """Checks each wait against the work that may go before it.

    While a request waits every slot is taken, so every step computes rows of requests that go before it: of those that are there when
    it comes, and of those that come later and may overtake it. No row costs more than `row_s`, so

        wait <= (rows of those open at its arrival + rows of those that came meanwhile and may overtake) x row_s + the step it came in

    Under fcfs nobody may overtake.
    """

    def __init__(self, scheduler: Scheduler, cells: Cells, *, n_batch: int, may_overtake: bool) -> None:
        super().__init__(scheduler, cells, n_batch=n_batch)
        self._may_overtake = may_overtake
        self._row_s = COST.worst_row_s + COST.costs.decode_cell_s * padded(LONGEST) + COST.moved_s(4)
        self._open_rows = self._come_rows = 0
        self._before: dict[str, tuple[int, int]] = {}
        self.longest_step_s = self.longest_gap_s = 0.0

    def arrived(self, sequence: Sequence, now: float) -> None:
        """What is open goes before it."""
        super().arrived(sequence, now)
        self._before[sequence.request_id] = (self._open_rows, self._come_rows)
        self._open_rows += self._rows(sequence)
        self._come_rows += self._rows(sequence)

    def stepped(self, plan: BatchPlan, seconds: float, result: StepResult, now: float) -> None:
        """No row costs more than the worst."""
        super().stepped(plan, seconds, result, now)
        assert seconds <= max(1, plan.n_rows) * self._row_s
        self.longest_step_s = max(self.longest_step_s, seconds)
        self.longest_gap_s = max([self.longest_gap_s, *result.gaps_s])

    def ended(self, sequence: Sequence, now: float) -> None:
        """It waited no longer than it may."""
        super().ended(sequence, now)
        open_rows, come_rows = self._before.pop(sequence.request_id)
        overtaking = self._come_rows - come_rows if self._may_overtake else 0
        wait_s = (sequence.times.admitted_at or now) - sequence.times.arrived_at
        assert wait_s <= (open_rows + overtaking) * self._row_s + self.longest_step_s
        self._open_rows -= self._rows(sequence)

    def _rows(self, sequence: Sequence) -> int:
        """All that can be computed for it: where it may be parked, so often again."""
        return (len(sequence.prompt) + sequence.max_tokens) * (1 + MAX_PARKS * self._may_overtake)


@pytest.mark.parametrize(("trace", "policy"), [("poisson", "fcfs"), ("tiers", "fair")])
def test_twenty_thousand_requests_of_ten_thousand_clients(trace: str, policy: PolicyName) -> None:
    setup = Setup(trace=trace, n_requests=20_000, n_clients=10_000, target_gap_s=TARGET_GAP_S)
    scheduler = make_scheduler(setup, N_SLOTS, policy)
    cells = Cells(N_SLOTS, n_batch=setup.n_batch, n_ctx=LONGEST, is_quick=True)
    watch = Waits(scheduler, cells, n_batch=setup.n_batch, may_overtake=policy != "fcfs")
    scene = Scene(setup.n_requests, setup.n_clients, seconds_between(setup, N_SLOTS), seed=1, n_ctx=LONGEST)
    Machine(scheduler, cells, COST, TRACES[trace](scene), watch).run()
    watch.finish()
    assert len(watch.submitted) == setup.n_requests
    assert {sequence.reason for sequence in watch.submitted} == {Reason.LENGTH}
    assert all(sequence.n_generated == sequence.max_tokens for sequence in watch.submitted)
    if policy == "fcfs":
        # Nobody is parked: a stream waits for one prompt chunk at most, and a chunk takes about the time that the budget aims at.
        assert watch.longest_gap_s < 2 * TARGET_GAP_S
        admitted = [sequence.times.admitted_at for sequence in watch.submitted]
        assert admitted == sorted(admitted)
