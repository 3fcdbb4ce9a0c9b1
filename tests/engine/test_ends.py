"""The moving average of what ends, on a clock of the test's own."""

import random

import pytest

from runner.engine.ends import FIRST_GUESS_S, LEAST_S, MAX_ENDS, MOST_S, Ends


def steady(n_slots: int, each_s: float, n_ends: int, *, jitter: float = 0.0, start: float = 1000.0) -> tuple[Ends, float]:
    """Slots that are always busy, each of whose requests takes `each_s`; and the instant of the last end."""
    ends, rng = Ends(), random.Random(7)
    ends.began(start)
    frees = [start] * n_slots
    now = start
    for _ in range(n_ends):
        slot = min(range(n_slots), key=lambda index: frees[index] + each_s)
        frees[slot] += each_s * (1 + jitter * (2 * rng.random() - 1))
        now = max(now, frees[slot])
        ends.ended(now, 100)
    return ends, now


TRACES = [(1, 2.0, 10), (1, 30.0, 40), (4, 5.0, 8), (4, 5.0, 400), (8, 1.0, 3000), (8, 20.0, 64), (32, 40.0, 32), (64, 3.0, 6400)]


@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize(("n_slots", "each_s", "n_ends"), TRACES)
@pytest.mark.parametrize("k", [1, 10, 100])
def test_estimate_is_within_a_factor_of_two_on_a_steady_trace(n_slots: int, each_s: float, n_ends: int, k: int, jitter: float) -> None:
    ends, now = steady(n_slots, each_s, n_ends, jitter=jitter)
    truth = k * each_s / n_slots
    for estimate in (ends.wait_s(now, n_ends=k), ends.wait_s(now, n_ends=0, n_tokens=100 * k)):
        assert max(LEAST_S, min(truth / 2, MOST_S)) <= estimate <= max(LEAST_S, min(truth * 2, MOST_S))


def test_wait_at_a_place_is_that_place_by_the_rate_of_ends_and_unknown_before_the_first() -> None:
    assert Ends().estimate_s(1000.0, 3) is None
    ends, now = steady(4, 2.0, 400)
    assert ends.estimate_s(now, 1) == pytest.approx(0.5, rel=0.05)
    assert ends.estimate_s(now, 10) == pytest.approx(5.0, rel=0.05)


def test_idle_time_does_not_make_it_slow() -> None:
    ends, now = steady(1, 2.0, 20)
    ends.idle(now)
    assert ends.wait_s(now + 3600) == pytest.approx(2.0)
    ends.began(now + 3600)
    ends.ended(now + 3602, 100)
    assert ends.wait_s(now + 3602) == pytest.approx(2.0)


def test_it_follows_a_change_of_speed() -> None:
    ends, now = steady(1, 1.0, 500)
    for _ in range(40):
        now += 10.0
        ends.ended(now, 100)
    assert 5.0 <= ends.wait_s(now) <= 20.0


def test_before_the_first_end_it_guesses_and_grows_with_the_time_it_takes() -> None:
    ends = Ends()
    assert ends.wait_s(5.0) == FIRST_GUESS_S
    ends.began(10.0)
    assert [ends.wait_s(now) for now in (10.0, 40.0, 10_000.0)] == [FIRST_GUESS_S, 30.0, MOST_S]


def test_a_standstill_is_noticed() -> None:
    ends, now = steady(1, 1.0, 5)
    assert ends.wait_s(now + 95) == pytest.approx(20.0)


@pytest.mark.parametrize(("k", "expected"), [(0, LEAST_S), (1, LEAST_S), (1e9, MOST_S)])
def test_estimate_has_bounds(k: float, expected: float) -> None:
    ends, now = steady(8, 1.0, 100)
    assert ends.wait_s(now, n_ends=k) == expected


def test_memory_has_a_bound_even_where_all_ends_are_one_instant() -> None:
    ends = Ends()
    ends.began(0.0)
    for _ in range(3 * MAX_ENDS):
        ends.ended(1.0, 1)
    assert len(ends._ends) <= MAX_ENDS
    assert LEAST_S <= ends.wait_s(1.0) <= MOST_S
