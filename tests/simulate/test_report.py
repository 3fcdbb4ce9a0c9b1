"""Percentiles, the index of fairness, and the tables."""

import random

import pytest

from runner.simulate.report import aligned, jain
from runner.simulate.spread import Spread


def test_percentiles_are_right_to_two_percent_and_the_maximum_is_exact() -> None:
    rng, spread = random.Random(1), Spread()
    values = [rng.lognormvariate(0, 2) for _ in range(5_000)]
    for value in values:
        spread.add(value)
    for share in (0.5, 0.95, 0.99):
        assert spread.percentile(share) == pytest.approx(sorted(values)[int(share * len(values)) - 1], rel=0.02)
    assert spread.max == max(values)
    assert len(spread.counts) < 1_000


def test_nothing_is_nothing() -> None:
    spread = Spread()
    assert spread.percentile(0.5) == 0
    spread.add(0.0, 9)
    spread.add(2.0)
    assert (spread.n, spread.percentile(0.5)) == (10, 0)
    assert spread.percentile(0.99) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(
    ("shares", "index"), [([], None), ([3.0], None), ([0.0, 0.0], None), ([2.0, 2.0], 1.0), ([1.0, 0.0, 0.0, 0.0], 0.25), ([1.0, 3.0], 0.8)]
)
def test_jains_index(shares: list[float], index: float | None) -> None:
    assert jain(shares) == (None if index is None else pytest.approx(index))


def test_numbers_are_aligned_to_the_right() -> None:
    assert aligned(("a", "n"), [("bc", "1"), ("d", "1,000")]) == "a       n\nbc      1\nd   1,000"
