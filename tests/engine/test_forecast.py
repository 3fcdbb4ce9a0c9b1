"""What is ahead of a newcomer, and how waits compare with it."""

import random

import pytest

from runner.engine.batching.forecast import Forecast
from runner.engine.order import Tier


def filled(*waiting: tuple[Tier, str, float, int]) -> Forecast:
    forecast = Forecast()
    for each in waiting:
        forecast.push(*each)
    return forecast


def test_better_tiers_and_own_earlier_items_are_ahead() -> None:
    forecast = filled((Tier.HIGH, "b", 1.0, 100), (Tier.NORMAL, "a", 1.0, 40), (Tier.LOW, "a", 1.0, 500))
    assert forecast.tokens_ahead(Tier.NORMAL, "a", 2.0, 0) == 140


def test_another_client_goes_before_with_as_much_as_one_s_own_and_one_s_lead() -> None:
    forecast = filled((Tier.NORMAL, "greedy", 1.0, 5000), (Tier.NORMAL, "small", 1.0, 3))
    assert forecast.tokens_ahead(Tier.NORMAL, "new", 2.0, 10.0) == 20
    assert forecast.tokens_ahead(Tier.NORMAL, "new", 2.0, 1e9) == 5003
    assert forecast.tokens_ahead(Tier.NORMAL, "small", 2.0, 10.0) == 3 + 13


def test_own_items_that_are_due_later_are_not_counted() -> None:
    forecast = filled((Tier.NORMAL, "a", 30.0, 5000))
    assert forecast.tokens_ahead(Tier.NORMAL, "a", 1.0, 0.0) == 0


def test_what_has_gone_is_not_ahead() -> None:
    forecast = filled((Tier.HIGH, "a", 1.0, 7), (Tier.NORMAL, "b", 1.0, 8))
    forecast.remove(Tier.HIGH, "a", 7)
    forecast.remove(Tier.NORMAL, "b", 8)
    assert forecast.tokens_ahead(Tier.BATCH, "c", 9.0, 0.0) == 0


def test_a_tenth_of_all_waits_are_shorter_than_forecast() -> None:
    forecast, rng = Forecast(), random.Random(1)
    for _ in range(2000):
        forecast.learn(1.0, rng.uniform(1.0, 3.0))
    assert forecast.factor == pytest.approx(1.2, rel=0.15)
