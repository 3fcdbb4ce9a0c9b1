"""Lots and waits that minimise the sum of times to the answer."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engine.batching.flow_time import first_lot, worth_waiting_s


def flow_time(lots: tuple[int, ...], fixed_s: float, item_s: float) -> float:
    """Of items that are all there at the start."""
    now = total = 0.0
    for n in lots:
        now += fixed_s + n * item_s
        total += n * now
    return total


def compositions(n: int) -> list[tuple[int, ...]]:
    """All ways to cut `n` items into lots."""
    cuts = itertools.product((False, True), repeat=n - 1)
    return [tuple(len(list(group)) for _, group in itertools.groupby(itertools.accumulate((0, *cut)))) for cut in cuts]


@pytest.mark.parametrize("fixed_s", [0.0, 0.3, 1.0, 2.5, 7.0, 40.0])
@pytest.mark.parametrize("n", range(1, 10))
def test_lots_one_after_another_are_as_good_as_the_best_there_are(n: int, fixed_s: float) -> None:
    lots, left = [], n
    while left:
        lots.append(first_lot(left, fixed_s, 1.0, 0.0))
        left -= lots[-1]
    best = min(flow_time(cut, fixed_s, 1.0) for cut in compositions(n))
    assert flow_time(tuple(lots), fixed_s, 1.0) <= 1.02 * best


@given(st.integers(1, 10_000), st.floats(0, 10), st.floats(0, 10), st.floats(0, 2))
def test_a_lot_has_one_item_at_least_and_no_more_than_there_are(n: int, fixed_s: float, item_s: float, load: float) -> None:
    assert 1 <= first_lot(n, fixed_s, item_s, load) <= n


def test_the_busier_the_machine_the_larger_the_lot() -> None:
    lots = [first_lot(20, 1.0, 1.0, load) for load in (0.0, 0.5, 0.8, 0.95, 1.0)]
    assert lots == sorted(lots)
    assert lots[0] < lots[2]
    assert lots[-1] == 20


def test_all_are_taken_while_they_add_less_than_the_pass_itself() -> None:
    assert first_lot(10, 1.0, 0.1, 0.0) == 10


def test_nobody_waits_where_nobody_comes() -> None:
    assert worth_waiting_s([(0.01, 0.0), (0.02, 0.0)], 1, 0.5) == 0.0


def test_the_wait_ends_where_the_rate_falls() -> None:
    assert worth_waiting_s([(0.001, 500.0), (0.001, 500.0), (0.008, 2.0)], 1, 0.005) == 0.002


def test_a_quiet_moment_before_many_come_is_waited_out() -> None:
    assert worth_waiting_s([(0.0001, 0.0), (0.001, 2000.0), (0.01, 1.0)], 1, 0.01) == pytest.approx(0.0011)


def test_the_more_wait_the_less_another_is_worth() -> None:
    ahead = [(0.001, 900.0)]
    assert worth_waiting_s(ahead, 1, 0.005) > 0.0
    assert worth_waiting_s(ahead, 5, 0.005) == 0.0


@pytest.mark.parametrize("rate", [100.0, 250.0, 350.0, 450.0, 600.0])
def test_waiting_is_worth_it_exactly_where_it_shortens_the_mean_time(rate: float) -> None:
    """One item waits, one more comes after an exponential time and then nobody; its pass takes 5 ms and 0.1 ms an item."""
    rng, fixed_s, item_s = random.Random(1), 0.005, 0.0001
    longest_s = 0.05
    at_once = joined = 0.0
    for _ in range(40_000):
        next_s = rng.expovariate(rate)
        first_pass_s = fixed_s + item_s
        at_once += first_pass_s + (max(0.0, first_pass_s - next_s) + first_pass_s)
        waited_s = min(next_s, longest_s)
        if next_s < longest_s:
            joined += 2 * (fixed_s + 2 * item_s) + waited_s
        else:
            joined += waited_s + first_pass_s + (max(0.0, waited_s + first_pass_s - next_s) + first_pass_s)
    in_pass = 1.0 - math.exp(-rate * (fixed_s + item_s))
    assert (worth_waiting_s([(longest_s, rate)], 1 + in_pass, fixed_s - item_s) > 0.0) == (joined < at_once)


@given(st.floats(0.001, 1e5), st.integers(1, 50), st.floats(0, 1), st.floats(0, 1))
def test_independent_arrivals_are_never_waited_for(rate: float, n: int, fixed_s: float, item_s: float) -> None:
    n_pass = rate * (fixed_s + n * item_s)
    assert worth_waiting_s([(0.01, rate)], n + n_pass, fixed_s - n * item_s) == 0.0
