"""Adaptive batching: bounds, order, waiting, deadlines, the gap beside streams, and what holds whatever comes."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.engine.batching.adaptive_batch import MAX_SHED, AdaptiveBatcher
from runner.engine.batching.items import NEVER, BatchLimits, Decision, Item
from runner.engine.order import Owner, Tier
from runner.errors import ConfigError, ContextLengthExceeded, Overloaded, RunnerError, TimedOut

FIXED_S = 0.005
TOKEN_S = 0.00005
NUMBERS = itertools.count()


def item(n_tokens: int = 10, at: float = 0.0, *, client: str = "a", tier: Tier = Tier.NORMAL, deadline: float = NEVER) -> Item:
    return Item(f"i{next(NUMBERS)}", n_tokens, at, deadline, Owner(client), tier)


def pass_s(n_tokens: int) -> float:
    return FIXED_S + TOKEN_S * n_tokens


def taught(**limits: float) -> AdaptiveBatcher:
    """One that knows what a pass costs."""
    batcher = AdaptiveBatcher(BatchLimits(**{"n_ubatch": 512, **limits}))  # type: ignore[arg-type]
    for n_tokens in range(8, 512, 12):
        batcher.cost.learn(n_tokens, pass_s(n_tokens))
    return batcher


def added(batcher: AdaptiveBatcher, *items: Item, now: float = 0.0) -> AdaptiveBatcher:
    for each in items:
        batcher.add(each, now)
    return batcher


def computed(batcher: AdaptiveBatcher, now: float, gap_s: float | None = None) -> Decision:
    """One decision; its batch is computed at once."""
    decision = batcher.next_batch(now, gap_s)
    if decision.batch:
        batcher.complete(now + pass_s(decision.n_tokens), pass_s(decision.n_tokens))
    return decision


# -- bounds -----------------------------------------------------------------------------------------------------------------------------


def test_an_item_longer_than_a_pass_is_refused() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"The input has 513 tokens; 512 can be computed at once: shorten it or split it"):
        taught().add(item(513), 0.0)


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    batcher = added(taught(max_waiting=2), item(100), item(100))
    with pytest.raises(Overloaded, match="2 inputs wait and the queue holds no more") as refused:
        batcher.add(item(), 0.0)
    assert refused.value.retry_after_s == pytest.approx(TOKEN_S * 200 + FIXED_S * 200 / 512, rel=0.05)
    assert (batcher.counts.refused, len(batcher)) == (1, 2)


@pytest.mark.parametrize(
    "wrong", [{"n_ubatch": 0}, {"max_batch_size": 0}, {"max_wait_s": 0.0}, {"max_gap_wait_s": NEVER}, {"max_waiting": -1}]
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        BatchLimits(**{"n_ubatch": 512, **wrong})  # type: ignore[arg-type]


def test_a_batch_has_no_more_items_than_it_may() -> None:
    batcher = added(taught(max_batch_size=3), *(item() for _ in range(7)))
    assert [len(computed(batcher, 0.0).batch) for _ in range(4)] == [3, 3, 1, 0]


def test_a_shorter_one_fills_the_room_that_the_next_in_order_leaves() -> None:
    items = [item(30), item(30), item(20), item(10)]
    batcher = added(taught(n_ubatch=50), *items)
    assert computed(batcher, 0.0).batch == (items[0], items[2])
    assert computed(batcher, 0.0).batch == (items[1], items[3])


def test_the_first_pass_of_all_has_one_item() -> None:
    batcher = added(AdaptiveBatcher(BatchLimits(n_ubatch=512)), item(), item())
    assert len(computed(batcher, 0.0).batch) == 1


def test_while_only_one_size_was_seen_batches_are_full() -> None:
    batcher = AdaptiveBatcher(BatchLimits(n_ubatch=512))
    for _ in range(20):
        batcher.cost.learn(10, 1.0)
    added(batcher, *(item() for _ in range(30)))
    assert len(batcher.next_batch(0.0).batch) == 30


# -- order ------------------------------------------------------------------------------------------------------------------------------


def test_better_tiers_go_first_and_equals_in_order_of_arrival() -> None:
    items = [item(at=at, tier=tier) for tier in reversed(Tier) for at in (0.0, 0.001)]
    batcher = added(taught(max_batch_size=8), *items)
    assert [each.tier for each in computed(batcher, 0.01).batch] == sorted(each.tier for each in items)
    batcher = added(taught(max_batch_size=8), *items)
    assert [each.arrived_at for each in computed(batcher, 0.01).batch] == [0.0, 0.001] * 4


def test_clients_take_turns() -> None:
    greedy = [item(client="greedy") for _ in range(20)]
    others = [item(client=name) for name in "wxyz"]
    batcher = added(taught(max_batch_size=5), *greedy, *others)
    assert Counter(each.owner.client for each in computed(batcher, 0.0).batch) == Counter(["greedy", *"wxyz"])


def test_of_one_client_the_earliest_due_goes_first() -> None:
    late, early, patient = item(deadline=9.0), item(deadline=5.0), item()
    batcher = added(taught(max_batch_size=3), patient, late, early)
    assert computed(batcher, 0.0).batch == (early, late, patient)


# -- waiting ----------------------------------------------------------------------------------------------------------------------------


def clustered(batcher: AdaptiveBatcher, n: int = 60) -> float:
    """Two clients that both ask again shortly after they have their answers. Returns the time."""
    now = 0.0
    for _ in range(n):
        for client in "ab":
            now += 0.0004
            batcher.add(item(at=now, client=client), now)
        while len(batcher):
            decision = batcher.next_batch(now)
            if decision.batch:
                now += pass_s(decision.n_tokens)
                batcher.complete(now, pass_s(decision.n_tokens))
            else:
                assert decision.wake_at is not None
                now = decision.wake_at
    return now


def test_an_item_is_made_to_wait_for_one_that_follows_it_closely() -> None:
    batcher = taught()
    now = clustered(batcher) + 0.0004
    batcher.add(item(at=now), now)
    decision = batcher.next_batch(now)
    assert decision.batch == ()
    assert decision.wake_at is not None
    assert now < decision.wake_at <= now + batcher.limits.max_wait_s


def test_a_wait_for_nobody_ends() -> None:
    batcher = taught()
    now = clustered(batcher) + 0.0004
    batcher.add(item(at=now), now)
    wake_at = batcher.next_batch(now).wake_at
    assert wake_at is not None
    assert len(batcher.next_batch(wake_at).batch) == 1


def test_nobody_is_made_late_by_waiting_for_company() -> None:
    batcher = taught()
    now = clustered(batcher) + 0.0004
    batcher.add(item(at=now, deadline=now + pass_s(10) * 1.05), now)
    assert len(batcher.next_batch(now).batch) == 1


def test_who_sends_one_at_a_time_never_waits() -> None:
    batcher, now = AdaptiveBatcher(BatchLimits(n_ubatch=512)), 0.0
    for think_s in (1e-5, 1e-3, 0.02) * 200:
        now += think_s
        batcher.add(item(random.Random(now).randrange(8, 200), now), now)
        decision = batcher.next_batch(now)
        assert len(decision.batch) == 1
        now += pass_s(decision.n_tokens)
        batcher.complete(now, pass_s(decision.n_tokens))


# -- deadlines --------------------------------------------------------------------------------------------------------------------------


def test_a_deadline_that_not_even_a_pass_of_its_own_meets_is_refused_at_once() -> None:
    batcher = taught()
    with pytest.raises(TimedOut, match=r"would take about 0.01 s and is wanted within 0.002 s: allow more time"):
        batcher.add(item(100, deadline=0.002), 0.0)
    assert (batcher.counts.too_late, len(batcher)) == (1, 0)


def test_a_deadline_that_those_before_it_leave_no_time_for_is_refused_at_once() -> None:
    batcher = added(taught(), *(item(500, tier=Tier.HIGH) for _ in range(40)))
    with pytest.raises(TimedOut):
        batcher.add(item(100, at=1.0, deadline=1.1), 1.0)
    batcher.add(item(100, at=1.0, deadline=1.1, tier=Tier.HIGH, client="b"), 1.0)


def test_one_that_has_become_late_is_shed_and_not_computed() -> None:
    late, other = item(deadline=0.02), item()
    batcher = added(taught(), late, other)
    assert computed(batcher, 0.019) == Decision((other,), (late,))
    assert (batcher.counts.shed, batcher.counts.served) == (1, 1)


def test_many_late_ones_are_given_up_in_pieces() -> None:
    batcher = added(taught(), *(item(client=str(i), deadline=1.0) for i in range(3 * MAX_SHED)))
    shed = []
    for _ in range(4):
        decision = batcher.next_batch(2.0)
        assert decision.batch == ()
        assert len(decision.shed) <= MAX_SHED
        shed.append(len(decision.shed))
    assert shed == [MAX_SHED] * 3 + [0]


def test_company_makes_nobody_late() -> None:
    batcher = taught()
    urgent = item(10, deadline=0.012)
    added(batcher, urgent, *(item(100, client=str(i)) for i in range(4)))
    decision = batcher.next_batch(0.0)
    assert urgent in decision.batch
    assert 1 < len(decision.batch) < 5
    assert pass_s(decision.n_tokens) <= 0.012


# -- the gap beside streams -------------------------------------------------------------------------------------------------------------


def test_a_batch_beside_streams_fits_the_gap() -> None:
    batcher = added(taught(), *(item(100) for _ in range(9)))
    decision = batcher.next_batch(0.0, gap_s=0.02)
    assert 1 < len(decision.batch) < 5
    assert pass_s(decision.n_tokens) <= 0.02


def test_one_that_never_fits_the_gap_is_computed_alone_after_its_time_and_then_the_next() -> None:
    long = [item(400, client="long"), item(400, client="long")]
    batcher = added(taught(max_gap_wait_s=1.0), *long)
    first = batcher.next_batch(10.0, gap_s=0.006)
    assert first == Decision(wake_at=11.0)
    short = item(10, client="short", at=10.5)
    batcher.add(short, 10.5)
    assert computed(batcher, 10.6, 0.006).batch == (short,)
    assert computed(batcher, 11.0, 0.006).batch == (long[0],)
    assert computed(batcher, 11.5, 0.006) == Decision(wake_at=12.0)
    assert computed(batcher, 12.0, 0.006).batch == (long[1],)
    assert batcher.counts.over_gap == 2


def test_without_streams_the_gap_does_not_count() -> None:
    long = item(400)
    batcher = added(taught(), long)
    assert computed(batcher, 0.0, 0.001).batch == ()
    assert computed(batcher, 0.1).batch == (long,)
    assert computed(batcher, 9.0, 0.001) == Decision()


# -- other ends -------------------------------------------------------------------------------------------------------------------------


def test_one_whose_client_has_left_is_not_computed() -> None:
    gone, other = item(deadline=50.0), item()
    batcher = added(taught(), gone, other)
    assert batcher.cancel(gone.item_id) == gone
    assert batcher.cancel(gone.item_id) is None
    assert computed(batcher, 0.0).batch == (other,)
    assert computed(batcher, 60.0) == Decision()


def test_a_batch_that_failed_teaches_nothing() -> None:
    batcher = added(taught(), item(), item())
    before = batcher.cost.seconds(100)
    batcher.next_batch(0.0)
    batcher.complete(9.0, None)
    assert (batcher.counts.failed, batcher.counts.served) == (2, 0)
    assert batcher.cost.seconds(100) == before


# -- whatever comes ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """Computes what the batcher says, with each decision checked, until nothing is left."""

    batcher: AdaptiveBatcher
    noise: random.Random
    gap_s: float | None = None
    now: float = 0.0
    ends: dict[str, str] = field(default_factory=dict)
    served: list[Item] = field(default_factory=list)
    started_at: dict[str, float] = field(default_factory=dict)
    free_since: float = 0.0
    over_gap_at: list[float] = field(default_factory=list)

    def run(self, arrivals: Sequence[Item]) -> None:
        due = sorted(arrivals, key=lambda each: each.arrived_at)
        while due or len(self.batcher):
            while due and due[0].arrived_at <= self.now:
                self.add(due.pop(0))
            decision = self.batcher.next_batch(self.now, self.gap_s)
            self.check(decision)
            for each in decision.shed:
                self.end(each, "shed")
            if decision.batch:
                ends_at = self.now + pass_s(decision.n_tokens) * self.noise.uniform(0.9, 1.2)
                while due and due[0].arrived_at <= ends_at:
                    self.add(due.pop(0))
                self.batcher.complete(ends_at, ends_at - self.now)
                self.now = self.free_since = ends_at
                for each in decision.batch:
                    self.end(each, "served")
                self.served += decision.batch
            elif decision.wake_at != self.now or not decision.shed:
                wake_at = NEVER if decision.wake_at is None else decision.wake_at
                next_at = min(wake_at, due[0].arrived_at if due else NEVER)
                assert next_at < NEVER or not len(self.batcher)
                self.now = max(self.now, next_at) if next_at < NEVER else self.now

    def add(self, each: Item) -> None:
        try:
            self.batcher.add(each, max(self.now, each.arrived_at))
        except RunnerError:
            self.end(each, "refused")

    def end(self, each: Item, how: str) -> None:
        assert each.item_id not in self.ends, "ends twice"
        self.ends[each.item_id] = how

    def check(self, decision: Decision) -> None:
        limits = self.batcher.limits
        assert len(decision.batch) <= limits.max_batch_size
        assert decision.n_tokens <= limits.n_ubatch
        for each in decision.batch:
            assert self.now + self.batcher.cost.seconds(each.n_tokens) <= each.deadline + 1e-9, "computed although it is late"
            self.started_at[each.item_id] = self.now
        if decision.batch and self.gap_s is not None and self.batcher.cost.seconds(decision.n_tokens) > self.gap_s:
            self.over_gap_at.append(self.now)


items_strategy = st.lists(
    st.builds(
        lambda gap_s, n_tokens, client, tier, patience_s: (gap_s, n_tokens, client, tier, patience_s),
        st.sampled_from([0.0, 0.0, 0.0001, 0.001, 0.01, 0.3]),
        st.integers(1, 140),
        st.sampled_from("abc"),
        st.sampled_from(Tier),
        st.sampled_from([NEVER, NEVER, 0.004, 0.02, 0.2, 40.0]),
    ),
    max_size=60,
)
Draws = list[tuple[float, int, str, Tier, float]]


def drawn(draws: Draws) -> list[Item]:
    at, found = 0.0, []
    for gap_s, n_tokens, client, tier, patience_s in draws:
        at += gap_s
        found.append(item(n_tokens, at, client=client, tier=tier, deadline=at + patience_s))
    return found


def made(n_ubatch: int, size: int, *, is_taught: bool, max_waiting: int = 4096) -> AdaptiveBatcher:
    limits = {"n_ubatch": n_ubatch, "max_batch_size": size, "max_wait_s": 0.02, "max_gap_wait_s": 0.5, "max_waiting": max_waiting}
    return taught(**limits) if is_taught else AdaptiveBatcher(BatchLimits(**limits))  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    items_strategy,
    st.integers(100, 600),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([4096, 5]),
    st.sampled_from([None, 0.0, 0.007, 0.02]),
)
def test_every_item_ends_once_and_no_batch_is_over_its_limits(
    draws: Draws, n_ubatch: int, size: int, is_taught: bool, max_waiting: int, gap_s: float | None
) -> None:
    items = drawn(draws)
    batcher = made(n_ubatch, size, is_taught=is_taught, max_waiting=max_waiting)
    machine = Machine(batcher, random.Random(1), gap_s)
    machine.run(items)
    assert machine.ends.keys() == {each.item_id for each in items}
    ends, counts = Counter(machine.ends.values()), batcher.counts
    assert (ends["served"], ends["shed"], ends["refused"]) == (counts.served, counts.shed, counts.refused + counts.too_late)
    assert all(machine.ends[each.item_id] != "shed" for each in items if each.deadline == NEVER)


@settings(max_examples=150, deadline=None)
@given(items_strategy, st.integers(1, 9), st.booleans())
def test_an_idle_machine_makes_nobody_wait_longer_than_it_may(draws: Draws, size: int, is_taught: bool) -> None:
    batcher = made(600, size, is_taught=is_taught)
    idle: list[float] = []
    ask = batcher.next_batch

    def watched(now: float, gap_s: float | None = None) -> Decision:
        first_at = min((entry.item.arrived_at for entry in batcher._waiting.values()), default=NEVER)
        decision = ask(now, gap_s)
        if not decision.batch and len(batcher):
            assert now < first_at + batcher.limits.max_wait_s
            assert decision.wake_at is not None
            assert decision.wake_at <= first_at + batcher.limits.max_wait_s
            idle.append(now)
        return decision

    batcher.next_batch = watched  # type: ignore[method-assign]
    patient = [(gap_s, n_tokens, client, tier, NEVER) for gap_s, n_tokens, client, tier, _ in draws]
    Machine(batcher, random.Random(1)).run(drawn(patient))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0005, 0.01]), min_size=1, max_size=60), st.integers(1, 9))
def test_equals_are_served_in_the_order_of_their_arrival(gaps: list[float], size: int) -> None:
    items = drawn([(gap_s, 30, "a", Tier.NORMAL, NEVER) for gap_s in gaps])
    machine = Machine(made(200, size, is_taught=True), random.Random(1))
    machine.run(items)
    assert machine.served == items


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 140), min_size=1, max_size=25), st.sampled_from([0.0, 0.006, 0.008]))
def test_beside_streams_that_leave_no_gap_the_p_th_waits_p_times_its_time_at_most(lengths: list[int], gap_s: float) -> None:
    batcher = made(600, 9, is_taught=True)
    machine = Machine(batcher, random.Random(1), gap_s)
    items = [item(n_tokens, client=str(i % 3)) for i, n_tokens in enumerate(lengths)]
    machine.run(items)
    waits = sorted(machine.started_at[each.item_id] for each in items)
    assert all(wait <= (place + 1) * batcher.limits.max_gap_wait_s + pass_s(600) * (place + 1) for place, wait in enumerate(waits))
    assert all(b - a >= batcher.limits.max_gap_wait_s for a, b in itertools.pairwise(machine.over_gap_at))


def test_an_item_of_the_last_tier_is_served_while_better_ones_never_end() -> None:
    batcher, now, old = taught(max_batch_size=2), 0.0, item(tier=Tier.BATCH, client="patient")
    batcher.add(old, 0.0)
    while now < 1300.0:
        for _ in range(3):
            batcher.add(item(at=now, tier=Tier.HIGH, client="busy"), now)
        if old in computed(batcher, now).batch:
            break
        now += 1.0
    assert 600.0 - 30.0 <= now < 1300.0
