"""What those that wait and those that are refused are told, and how it is corrected by what came."""

import pytest

from runner.engine.order import Tier
from runner.engine.pace import Pace, Work
from runner.engine.waits import Waiter, Waits


def waits() -> Waits:
    """Of a machine that takes 0.1 s for a step."""
    pace = Pace(target_gap_s=1.0)
    for _ in range(50):
        pace.learn_steps(10, 0, 1.0)
    return Waits(pace)


def waiter(name: str, *, client: str = "", tier: Tier = Tier.NORMAL, n_prompt: int = 100, n_new: int = 10) -> Waiter:
    return Waiter(name, client or name, tier, n_prompt, Work(0, n_new))


def test_nothing_is_known_before_a_step_was_seen() -> None:
    found = Waits(Pace(target_gap_s=1.0))
    found.look(0.0, [Work(0, 10)], [waiter("a")], 1)
    assert (found.wait_s("a", 0.0), found.mean_s(), found.room_s(1, 0.0)) == (None, None, None)
    assert (found.tokens_s(5, 0.0), found.client_s("a", 1, 0.0)) == (None, None)


def test_waits_rooms_tokens_and_a_clients_own_come_from_one_look_and_run_down() -> None:
    found = waits()
    found.look(5.0, [Work(0, 10)], [waiter("a"), waiter("b", client="a"), waiter("c", n_prompt=300)], 1)
    assert [found.wait_s(name, 5.0) for name in "abcd"] == [pytest.approx(1.0), pytest.approx(2.0), pytest.approx(3.0), None]
    assert found.mean_s() == pytest.approx(2.0)
    assert [found.room_s(n, 5.5) for n in (1, 3, 99)] == [pytest.approx(0.5), pytest.approx(2.5), pytest.approx(2.5)]
    assert [found.tokens_s(n, 5.0) for n in (1, 100, 101, 10_000)] == [pytest.approx(s) for s in (1.0, 1.0, 2.0, 3.0)]
    assert [found.client_s("a", n, 5.0) for n in (1, 2)] == [pytest.approx(1.0), pytest.approx(2.0)]
    assert found.client_s("nobody", 1, 5.0) is None
    assert found.wait_s("a", 9.0) == 0.0


def test_a_kind_that_waits_twice_as_long_as_the_course_says_is_told_so_and_others_are_not() -> None:
    found = waits()
    for i in range(100):
        now = 10.0 * i
        found.look(now, [Work(0, 10)], [waiter(f"n{i}"), waiter(f"b{i}", tier=Tier.BATCH)], 1)
        found.started(f"n{i}", now + 1.0)
        found.started(f"b{i}", now + 4.0)
    found.look(2000.0, [Work(0, 10)], [waiter("n"), waiter("b", tier=Tier.BATCH)], 1)
    assert found.wait_s("n", 2000.0) == pytest.approx(1.0, rel=0.03)
    assert found.wait_s("b", 2000.0) == pytest.approx(4.0, rel=0.03)
    # Who leaves the queue does so at the course's own times, whoever it is.
    assert found.room_s(2, 2000.0) == pytest.approx(2.0)


def test_nothing_is_remembered_of_those_that_wait_no_more() -> None:
    found = waits()
    found.look(0.0, [Work(0, 10)], [waiter("a"), waiter("b")], 1)
    found.started("a", 1.0)
    found.gone("b")
    found.started("never seen", 1.0)
    assert not found._said
