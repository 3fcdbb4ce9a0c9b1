"""The queue alone: who is next, by each policy, and what it costs."""

import gc
import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.config import PolicyName
from runner.engine.order import SLACK_S, Owner, Tier
from runner.engine.policies import TURNS_BEFORE_AGED
from runner.engine.queue import WaitingQueue
from runner.engine.sampling import SamplingParams
from runner.engine.sequence import Sequence, Times
from runner.engine.shares import MAX_IDLE

NUMBERS = itertools.count()


def sequence(client: str = "a", *, at: float = 0.0, tier: Tier = Tier.NORMAL, part: str = "", weight: float = 1.0) -> Sequence:
    owner = Owner(client, part, weight)
    return Sequence(f"q{next(NUMBERS)}", [1], SamplingParams(), 1, tier=tier, owner=owner, times=Times(arrived_at=at))


def filled(*sequences: Sequence, policy: PolicyName = "fair", limit: int = 0) -> WaitingQueue:
    queue = WaitingQueue(policy, max_running_per_client=limit)
    for each in sequences:
        queue.push(each)
    return queue


def served(queue: WaitingQueue, n: int, *, cost: float = 1.0) -> list[Sequence]:
    """The next `n`, each of which runs at once, costs the same, and ends."""
    found = []
    for _ in range(n):
        first = queue.peek()
        if first is None:
            break
        queue.take(first)
        queue.charge(first, cost)
        queue.leave(first)
        found.append(first)
    return found


@pytest.mark.parametrize("policy", ["fair", "priority", "fcfs"])
def test_of_one_client_and_tier_who_came_first_is_first(policy: PolicyName) -> None:
    late, early = sequence(at=2.0), sequence(at=1.0)
    assert served(filled(late, early, policy=policy), 3) == [early, late]


@pytest.mark.parametrize(("policy", "order"), [("fair", "hnlb"), ("priority", "hnlb"), ("fcfs", "blnh")])
def test_tiers_count_unless_first_come_is_first_served(policy: PolicyName, order: str) -> None:
    waiting = {tier.name[0].lower(): sequence(at=3.0 - tier, tier=tier) for tier in Tier}
    assert served(filled(*waiting.values(), policy=policy), 4) == [waiting[letter] for letter in order]


def test_a_client_with_many_requests_gets_no_more_turns_than_one_with_few() -> None:
    greedy = [sequence("greedy", at=float(i)) for i in range(50)]
    others = [sequence(name, at=100.0) for name in "wxyz"]
    first = served(filled(*greedy, *others), 6)
    assert {each.owner.client for each in first[:5]} == {"greedy", "w", "x", "y", "z"}


def test_turns_go_by_cost_and_not_by_count() -> None:
    queue = filled(*(sequence("long") for _ in range(20)), *(sequence("short") for _ in range(20)))
    spent: Counter[str] = Counter()
    for _ in range(20):
        first = queue.peek()
        assert first is not None
        queue.take(first)
        cost = 9.0 if first.owner.client == "long" else 1.0
        queue.charge(first, cost)
        spent[first.owner.client] += int(cost)
        queue.leave(first)
    assert abs(spent["long"] - spent["short"]) <= 9


def test_twice_the_weight_is_twice_the_share() -> None:
    queue = filled(*(sequence("a", weight=2.0) for _ in range(60)), *(sequence("b") for _ in range(60)))
    shares = Counter(each.owner.client for each in served(queue, 60))
    assert shares["a"] == pytest.approx(40, abs=1)


def test_parts_divide_a_share_and_do_not_multiply_it() -> None:
    parts = [sequence("many", part=str(i)) for i in range(30)]
    queue = filled(*parts, *(sequence("one") for _ in range(30)))
    first = served(queue, 20)
    assert Counter(each.owner.client for each in first) == {"many": 10, "one": 10}
    assert len({each.owner.part for each in first if each.owner.client == "many"}) == 10


def test_a_newcomer_neither_catches_up_nor_is_caught_up_with() -> None:
    queue = filled(*(sequence("old") for _ in range(40)))
    served(queue, 20)
    for _ in range(20):
        queue.push(sequence("new"))
    assert Counter(each.owner.client for each in served(queue, 20)) == {"old": 10, "new": 10}


def test_nobody_waits_for_ever_behind_clients_that_have_only_just_come() -> None:
    mine = [sequence("mine", at=0.0), sequence("mine", at=0.1)]
    queue = filled(*mine)
    assert served(queue, 1) == [mine[0]]
    for number in range(50):
        queue.push(sequence(f"new{number}", at=1.0 + number))
        queue.push(sequence(f"newer{number}", at=1.0 + number))
        if served(queue, 1) == [mine[1]]:
            break
    else:
        raise AssertionError("overtaken by everybody")


def test_what_has_ended_is_not_kept() -> None:
    queue = WaitingQueue("fcfs")
    ended = [sequence(f"c{number % 9}") for number in range(300)]
    for each in ended:
        queue.push(each)
        served(queue, 1)
    ids = {each.request_id for each in ended}
    del ended, each
    kept = [each for each in gc.get_objects() if isinstance(each, Sequence) and each.request_id in ids]
    assert kept == []


def test_who_goes_away_with_debts_finds_them_again() -> None:
    queue = filled(sequence("debtor"), *(sequence("other") for _ in range(40)))
    first = queue.peek()
    assert first is not None
    assert first.owner.client == "debtor"
    queue.take(first)
    queue.charge(first, 10.0)
    queue.leave(first)
    queue.push(sequence("debtor"))
    assert [each.owner.client for each in served(queue, 10)] == ["other"] * 10
    assert served(queue, 1)[0].owner.client == "debtor"


@pytest.mark.parametrize("tier", [Tier.NORMAL, Tier.LOW, Tier.BATCH])
def test_no_tier_waits_for_ever_under_a_stream_of_better_ones(tier: Tier) -> None:
    old = sequence("patient", at=0.0, tier=tier)
    queue = filled(old)
    now, others = 0.0, 0
    while now <= SLACK_S[tier] + 60.0:
        now += 1.0
        queue.push(sequence(f"c{int(now) % 7}", at=now, tier=Tier.HIGH))
        queue.push(sequence(f"c{int(now) % 5}", at=now, tier=Tier.HIGH))  # twice what is served
        if served(queue, 1) == [old]:
            break
        others += 1
    # Those that wait in the better tier came when it had waited its slack out at the latest, but for the turns between.
    assert SLACK_S[tier] / 4 <= now <= SLACK_S[tier] * 2 + TURNS_BEFORE_AGED + 1


def test_aged_requests_take_one_turn_in_four_at_most() -> None:
    old = [sequence("old", at=0.0, tier=Tier.BATCH) for _ in range(20)]
    new = [sequence("new", at=10_000.0, tier=Tier.HIGH) for _ in range(40)]
    tiers = [each.tier for each in served(filled(*old, *new), 16)]
    assert tiers.count(Tier.BATCH) == 4


def test_one_that_was_removed_is_not_served_and_touches_nobody_else() -> None:
    sequences = [sequence("a", at=float(i)) for i in range(5)]
    queue = filled(*sequences)
    queue.remove(sequences[0])
    queue.remove(sequences[3])
    assert len(queue) == 3
    assert served(queue, 9) == [sequences[1], sequences[2], sequences[4]]


def test_one_that_was_parked_comes_back_to_its_place() -> None:
    first, second = sequence(at=1.0), sequence(at=2.0)
    queue = filled(first, second, policy="fcfs")
    queue.take(first)
    queue.leave(first)
    queue.push(first)
    assert served(queue, 2) == [first, second]


def test_a_client_has_no_more_running_than_its_limit_and_holds_nobody_up() -> None:
    mine = [sequence("mine", at=float(i)) for i in range(5)]
    other = sequence("other", at=9.0)
    queue = filled(*mine, other, policy="fcfs", limit=2)
    running = []
    while (first := queue.peek()) is not None:
        queue.take(first)
        running.append(first)
    assert running == [mine[0], mine[1], other]
    queue.remove(mine[2])  # held back, and gives up
    queue.leave(mine[0])
    assert queue.peek() is mine[3]
    queue.remove(mine[3])  # in line, and gives up: the next one comes through
    assert queue.peek() is mine[4]


def test_accounts_of_clients_that_are_gone_are_not_kept_without_bound() -> None:
    queue = WaitingQueue()
    for number in range(MAX_IDLE + 1000):
        queue.push(sequence(f"c{number}"))
        served(queue, 1)
    assert len(queue._lines[Tier.NORMAL]._clients._by_name) <= MAX_IDLE


def test_entries_of_those_that_gave_up_are_not_kept_without_bound() -> None:
    queue = filled(sequence("first"))
    for _ in range(5000):
        gone = sequence("a", at=1.0)
        queue.push(gone)
        queue.remove(gone)
    assert len(queue._lines[Tier.NORMAL]._by_place._keys) < 200


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["push", "push", "take", "end", "park", "remove"]), st.integers(0, 5), st.sampled_from(list(Tier))),
    max_size=80,
)


@given(OPERATIONS, st.sampled_from(["fair", "priority", "fcfs"]), st.integers(0, 3))
def test_whatever_happens_everybody_is_served_once_and_limits_hold(
    operations: list[tuple[str, int, Tier]], policy: PolicyName, limit: int
) -> None:
    queue = WaitingQueue(policy, max_running_per_client=limit)
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    for now, (kind, number, tier) in enumerate(operations):
        match kind:
            case "push":
                waiting.append(sequence(f"c{number % 3}", part=f"p{number}", at=float(now), tier=tier))
                queue.push(waiting[-1])
            case "take" if (first := queue.peek()) is not None:
                queue.take(first)
                waiting.remove(first)
                running.append(first)
            case "end" | "park" if running:
                gone = running.pop(number % len(running))
                queue.charge(gone, 1.0 + number)
                queue.leave(gone)
                if kind == "park":
                    queue.push(gone)
                    waiting.append(gone)
            case "remove" if waiting:
                queue.remove(waiting.pop(number % len(waiting)))
        assert len(queue) == len(waiting)
        assert set(map(id, queue)) == set(map(id, waiting))
        if limit:
            assert max(Counter(each.owner.client for each in running).values(), default=0) <= limit
        elif waiting:
            assert queue.peek() is not None
    while waiting or running:
        while (first := queue.peek()) is not None:
            queue.take(first)
            waiting.remove(first)
            running.append(first)
        assert running
        queue.leave(running.pop(random.Random(len(running)).randrange(len(running))))
    assert len(queue) == 0


@pytest.mark.parametrize("policy", ["fair", "priority", "fcfs"])
def test_the_preview_is_what_happens_when_all_cost_the_same(policy: PolicyName) -> None:
    rng = random.Random(1)
    queue = WaitingQueue(policy)
    for at in range(200):
        queue.push(sequence(rng.choice("aaaabc"), at=at / 100, tier=rng.choice(list(Tier)), part=rng.choice("xxxy"), weight=1.0))
    served(queue, 20)
    ids = queue.preview()
    assert len(ids) == 180
    assert ids == [each.request_id for each in served(queue, 180)]


def test_those_whose_shares_were_never_here_are_previewed_by_arrival() -> None:
    """Their clients' limits hold them back: neither these parts nor, in the other tier, these clients have an account."""
    running = [sequence("a", part="x"), sequence("b")]
    queue = filled(*running, limit=1)
    for each in running:
        queue.take(each)
    held = [sequence("a", at=1.0, part="y"), sequence("a", at=2.0, part="z")]
    held += [sequence("b", at=3.0, tier=Tier.BATCH), sequence("a", at=4.0, tier=Tier.BATCH)]
    for each in held:
        queue.push(each)
    assert queue.preview() == [each.request_id for each in held]


def test_no_preview_of_a_queue_that_is_too_long_to_look_at() -> None:
    assert filled(*(sequence() for _ in range(11))).preview(most=10) == []


def with_parked(*clients: str) -> tuple[WaitingQueue, list[Sequence]]:
    """Each has a parked sequence, and owes more than all who will come."""
    parked = [sequence(client, at=float(i)) for i, client in enumerate(clients)]
    others = [sequence(f"other {i}") for i in range(8)]
    queue = filled(*parked, *others)
    for one in parked:
        queue.take(one)
        queue.charge(one, 1000.0)
        one.n_parks = 1
        queue.leave(one)
        queue.push(one)
    for other in others:
        queue.remove(other)
    return queue, parked


def test_every_fourth_slot_goes_to_the_one_that_was_parked_longest_ago() -> None:
    queue, parked = with_parked("x", "y")
    for i in range(12):
        queue.push(sequence(f"client {i}", at=10.0 + i))
    order = []
    for _ in range(12):
        first = queue.peek()
        assert first is not None
        queue.take(first)
        order.append(first)
    assert [order.index(one) for one in parked] == [order.index(parked[0]), order.index(parked[0]) + 4]
    assert order.index(parked[0]) <= 3


def test_being_parked_for_long_is_no_claim_to_the_slot_of_another() -> None:
    queue, (parked,) = with_parked("x")
    new = [sequence(f"client {i}", at=10.0 + i) for i in range(4)]
    for one in new:
        queue.push(one)
    for one in new[:3]:
        assert queue.claimant() is one
        queue.take(one)
    assert queue.peek() is parked
    assert queue.claimant() is new[3]


def test_requests_that_were_held_back_and_cancelled_leave_nothing() -> None:
    """A client that sends and cancels behind a long request of its own."""
    queue = WaitingQueue(max_running_per_client=1)
    long = sequence("x")
    queue.push(long)
    queue.take(long)
    for i in range(1000):
        held = sequence("x", at=float(i))
        queue.push(held)
        queue.remove(held)
        assert len(queue._gate._held["x"]) <= 2
    last = sequence("x", at=2000.0)
    queue.push(last)
    assert queue.peek() is None
    queue.leave(long)
    assert queue.peek() is last
