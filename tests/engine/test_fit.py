"""Costs learned from measurements."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.engine.fit import Fit

TRUE = (0.015, 0.0007, 4e-7)


def cost(n_rows: int, longest: int) -> float:
    """A machine that is linear."""
    return sum(c * a for c, a in zip(TRUE, amounts(n_rows, longest), strict=True))


def amounts(n_rows: int, longest: int) -> tuple[float, ...]:
    """One pass."""
    return 1.0, float(n_rows), float(n_rows * longest)


def taught(n: int, *, noise: float = 0.0, seed: int = 1) -> Fit:
    """A fit that saw `n` chunks of all sizes at all contexts."""
    rng = random.Random(seed)
    fit = Fit(3, first=1)
    for _ in range(n):
        n_rows, longest = rng.randrange(32, 513), rng.randrange(256, 4097)
        fit.learn(amounts(n_rows, longest), cost(n_rows, longest) * rng.lognormvariate(0.0, noise))
    return fit


def test_one_measurement_is_taken_for_the_cost_of_its_rows() -> None:
    fit = Fit(3, first=1)
    fit.learn(amounts(64, 256), 0.064)
    assert fit.seconds(amounts(128, 256)) == pytest.approx(0.128)


def test_the_coefficients_of_a_linear_machine_are_found() -> None:
    assert taught(300).coefficients == pytest.approx(TRUE, rel=0.05)


def test_a_noisy_machine_is_predicted_nearly_as_well() -> None:
    fit = taught(300, noise=0.1)
    for n_rows, longest in ((64, 256), (64, 4096), (512, 1024)):
        assert fit.seconds(amounts(n_rows, longest)) == pytest.approx(cost(n_rows, longest), rel=0.25)


def test_a_machine_that_becomes_slower_is_followed_in_a_few_measurements() -> None:
    fit = taught(200)
    for _ in range(8):
        fit.learn(amounts(128, 512), 3 * cost(128, 512))
    assert fit.seconds(amounts(128, 512)) == pytest.approx(3 * cost(128, 512), rel=0.15)
    assert fit.seconds(amounts(256, 512)) == pytest.approx(3 * cost(256, 512), rel=0.3)


def test_a_moment_in_which_the_machine_stood_still_counts_for_little() -> None:
    fit = taught(200)
    fit.learn(amounts(128, 512), 1000 * cost(128, 512))
    assert fit.seconds(amounts(128, 512)) < 2 * cost(128, 512)


def test_each_key_keeps_its_level() -> None:
    """A step of one row takes 6 ms and one of two 16: no line through both is of use beside them."""
    fit = Fit(2, first=1)
    for _ in range(50):
        fit.learn((1.0, 1.0), 0.006, key=1)
        fit.learn((1.0, 2.0), 0.016, key=2)
        fit.learn((1.0, 8.0), 0.026, key=8)
    assert [fit.seconds((1.0, float(n)), key=n) for n in (1, 2, 8)] == pytest.approx([0.006, 0.016, 0.026])


def test_where_the_measurements_say_nothing_the_coefficients_stay() -> None:
    """Hours of the same step are no reason to forget what a longer context costs."""
    fit = taught(200)
    for _ in range(5_000):
        fit.learn(amounts(256, 512), cost(256, 512))
    assert fit.seconds(amounts(256, 4096)) == pytest.approx(cost(256, 4096), rel=0.15)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 8192), st.floats(1e-5, 100.0), st.integers(1, 3)), min_size=1, max_size=60))
def test_whatever_was_measured_no_cost_is_negative_and_every_answer_is_a_number(seen: list[tuple[int, int, float, int]]) -> None:
    fit = Fit(3, first=1)
    for n_rows, longest, seconds, key in seen:
        fit.learn(amounts(n_rows, longest), seconds, key)
        assert all(0.0 <= c < math.inf for c in fit.coefficients)
        assert 0.0 < fit.seconds(amounts(n_rows, longest), key) < math.inf


def test_what_the_coefficients_say_nothing_of_is_taken_as_it_was_measured() -> None:
    """Prompts that cost less the larger they are leave no cost of a step: the first steps without a prompt show it."""
    fit = Fit(2, first=0)
    for n_rows, seconds in ((512.0, 1.0), (256.0, 0.4)) * 8:
        fit.learn((1.0, n_rows), seconds)
    assert fit.coefficients[0] == 0.0
    for _ in range(8):
        fit.learn((10.0, 0.0), 0.3)
    assert fit.coefficients[0] == pytest.approx(0.03, rel=0.05)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 8192), st.floats(1e-5, 100.0)), min_size=1, max_size=60))
def test_an_amount_that_is_now_and_then_nothing_leaves_every_coefficient_a_number(seen: list[tuple[int, int, float]]) -> None:
    fit = Fit(2, first=0)
    for n_steps, n_rows, seconds in seen:
        fit.learn((float(n_steps), float(n_rows)), seconds)
        assert all(0.0 <= c < math.inf for c in fit.coefficients)
