"""Nobody starves: under overload every tier is served, and nobody is overtaken more often than the key of its arrival allows."""

import pytest

from runner.config import PolicyName
from runner.engine.batch import BatchPlan
from runner.engine.order import Tier
from runner.engine.places import aged_place
from runner.engine.policies import TURNS_BEFORE_AGED
from runner.engine.scheduler import Scheduler, StepResult
from runner.engine.sequence import Sequence
from runner.simulate.cells import CountedCells
from runner.simulate.costs import Costs, StepCost
from runner.simulate.limits import Bound
from runner.simulate.machine import Machine
from runner.simulate.simulation import Setup, compare, make_scheduler, seconds_between
from runner.simulate.traces import TRACES, Scene

N_SLOTS = 4
# So slow that the slack of every tier runs out while all tiers keep coming.
SLOW = Costs(pass_s=tuple((n_rows, 8 * seconds) for n_rows, seconds in Costs().pass_s))
SETUP = Setup(trace="tiers", n_requests=1_500, n_clients=40, load=1.5, costs=SLOW)


class Turns:
    """Counts, for whoever of all that wait came first by the aged key, the slots that others were given since it did.

    `is_fair`: only while somebody of a better tier waits too; within the best tier it is the shares that order.
    """

    def __init__(self, scheduler: Scheduler, *, is_fair: bool) -> None:
        self._scheduler, self._is_fair = scheduler, is_fair
        self._running: set[str] = set()
        self._head: Sequence | None = None
        self._n_others = 0
        self.most = dict.fromkeys(Tier, 0)
        self.n_served = dict.fromkeys(Tier, 0)

    def arrived(self, sequence: Sequence, now: float) -> None:
        """A newcomer is not the head while an earlier one waits."""

    def refused(self, client: str, bound: Bound, now: float) -> None:
        """There are no bounds here."""

    def stepped(self, plan: BatchPlan, seconds: float, result: StepResult, now: float) -> None:
        """Count the slots that were given in this step, and see who is the head now."""
        running = {sequence.request_id for sequence in self._scheduler.running}
        n_placed = len(running - self._running)
        self._running = running
        head = min(self._scheduler.waiting, key=aged_place, default=None)
        is_best = head is not None and head.tier == min(sequence.tier for sequence in self._scheduler.waiting)
        if head is None or head is not self._head or (self._is_fair and is_best):
            self._head, self._n_others = head, 0
            return
        self._n_others += n_placed
        self.most[head.tier] = max(self.most[head.tier], self._n_others)

    def ended(self, sequence: Sequence, now: float) -> None:
        """Every tier is served."""
        self.n_served[sequence.tier] += sequence.n_generated == sequence.max_tokens


def watched(policy: PolicyName) -> Turns:
    scheduler = make_scheduler(SETUP, N_SLOTS, policy)
    cells = CountedCells(N_SLOTS, n_ctx=SETUP.n_ctx, n_batch=SETUP.n_batch)
    scene = Scene(SETUP.n_requests, SETUP.n_clients, seconds_between(SETUP, N_SLOTS), seed=1, n_ctx=SETUP.n_ctx)
    turns = Turns(scheduler, is_fair=policy == "fair")
    Machine(scheduler, cells, StepCost(SLOW), TRACES["tiers"](scene), turns).run()
    return turns


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_whoever_came_first_by_the_policys_key_is_next(policy: PolicyName) -> None:
    turns = watched(policy)
    assert sum(turns.n_served.values()) == SETUP.n_requests
    # A step may give several slots; under fcfs the key is the arrival alone, so a better tier's may be the head for long.
    assert policy == "fcfs" or max(turns.most.values()) <= N_SLOTS


def test_under_fair_shares_an_aged_request_of_a_lower_tier_gets_every_fourth_turn() -> None:
    turns = watched("fair")
    assert sum(turns.n_served.values()) == SETUP.n_requests
    assert min(turns.n_served.values()) > 0
    for tier in (Tier.LOW, Tier.BATCH):
        assert 0 < turns.most[tier] <= TURNS_BEFORE_AGED + N_SLOTS


def test_a_parked_stream_does_not_stand_still_for_minutes() -> None:
    """Its client may be charged more than all who come, for as long as they come: parked streams have turns of their own."""
    (row,) = compare(Setup(trace="tails", n_requests=10_000, n_clients=200), (8,), ("fair",)).rows
    assert row.n_parked > 0
    assert row.itl_s.max < 30.0
