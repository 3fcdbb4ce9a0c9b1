"""The learned rate of arrivals by the time since the last event."""

import random

import pytest

from runner.engine.batching.arrivals import Arrivals


def rate_at(arrivals: Arrivals, now: float, after_s: float) -> float:
    """What is expected at that time after `now`."""
    elapsed = 0.0
    for seconds, rate in arrivals.ahead(now):
        elapsed += seconds
        if after_s < elapsed:
            return rate
    raise AssertionError("beyond the horizon")


def test_nothing_is_expected_before_anything_came() -> None:
    assert list(Arrivals(0.05).ahead(1.0)) == []


def test_the_time_ahead_ends_at_the_horizon_after_the_last_event() -> None:
    arrivals = Arrivals(0.05)
    arrivals.arrived(1.0)
    assert sum(seconds for seconds, _ in arrivals.ahead(1.0)) == pytest.approx(0.05)
    assert sum(seconds for seconds, _ in arrivals.ahead(1.02)) == pytest.approx(0.03)
    assert list(arrivals.ahead(2.0)) == []


def test_independent_arrivals_have_the_same_rate_at_any_time() -> None:
    rng, arrivals, now = random.Random(1), Arrivals(0.05), 0.0
    for _ in range(2000):
        now += rng.expovariate(50.0)
        arrivals.arrived(now)
    rates = [rate for _, rate in list(arrivals.ahead(now))[-4:]]
    assert rates == pytest.approx([50.0] * 4, rel=0.6)
    assert arrivals.rate == pytest.approx(50.0, rel=0.3)


def test_who_sends_one_at_a_time_is_never_expected_while_it_waits() -> None:
    arrivals, now = Arrivals(0.05), 0.0
    for _ in range(100):
        arrivals.arrived(now)
        arrivals.batch_done(now + 0.01)
        now += 0.011
    assert all(rate == 0.0 for _, rate in _ahead_of_one_more(arrivals, now))


def _ahead_of_one_more(arrivals: Arrivals, now: float) -> list[tuple[float, float]]:
    arrivals.arrived(now)
    return list(arrivals.ahead(now))


def test_after_a_batch_those_come_who_waited_for_it() -> None:
    arrivals, now = Arrivals(0.05), 0.0
    for _ in range(100):
        arrivals.batch_done(now)
        arrivals.arrived(now + 0.002)
        now += 1.0
    arrivals.batch_done(now)
    assert rate_at(arrivals, now, 0.002) > 300.0
    assert rate_at(arrivals, now, 0.02) == 0.0


def test_items_of_the_same_instant_are_one_event_and_count_in_the_rate() -> None:
    arrivals = Arrivals(0.05)
    for now in range(200):
        for _ in range(16):
            arrivals.arrived(float(now))
    assert all(rate == 0.0 for _, rate in arrivals.ahead(199.0))
    assert arrivals.rate == pytest.approx(16.0, rel=0.2)


def test_what_was_long_ago_is_forgotten() -> None:
    arrivals, now = Arrivals(0.05), 0.0
    for between_s in (0.002, 1.0):
        for _ in range(700):
            now += between_s
            arrivals.arrived(now)
    assert rate_at(arrivals, now, 0.002) < 2.0
