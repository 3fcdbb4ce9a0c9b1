"""What a pass costs, learned."""

import random

import pytest

from runner.engine.batching.pass_cost import MANY, PassCost


def taught(*, fixed_s: float = 0.01, token_s: float = 0.0005, noise: float = 0.0, sizes: tuple[int, int] = (8, 512)) -> PassCost:
    cost, rng = PassCost(), random.Random(1)
    for _ in range(60):
        n_tokens = rng.randrange(sizes[0], sizes[1] + 1)
        cost.learn(n_tokens, (fixed_s + token_s * n_tokens) * rng.gauss(1.0, noise))
    return cost


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_pass_and_its_tokens_are_told_apart(noise: float) -> None:
    cost = taught(noise=noise)
    assert cost.is_split
    assert cost.fixed_s == pytest.approx(0.01, rel=0.15)
    assert cost.token_s == pytest.approx(0.0005, rel=0.05)


def test_one_measurement_is_put_on_the_tokens() -> None:
    assert not PassCost().is_known
    cost = PassCost()
    cost.learn(10, 0.02)
    assert cost.is_known
    assert not cost.is_split
    assert cost.seconds(20) == pytest.approx(0.04)


def test_batches_of_one_size_tell_nothing_of_the_split() -> None:
    assert not taught(sizes=(64, 64)).is_split


def test_a_pass_that_stood_still_hardly_counts() -> None:
    cost = taught()
    before = cost.seconds(100)
    cost.learn(100, 50 * before)
    assert cost.seconds(100) == pytest.approx(before, rel=0.1)


def test_a_machine_that_became_slower_is_followed() -> None:
    cost, rng = taught(), random.Random(2)
    for _ in range(150):
        n_tokens = rng.randrange(8, 513)
        cost.learn(n_tokens, 3 * (0.01 + 0.0005 * n_tokens))
    assert cost.seconds(100) == pytest.approx(3 * 0.06, rel=0.1)


def test_tokens_that_fit_take_no_longer() -> None:
    cost = taught()
    n_tokens = cost.tokens_in(0.1)
    assert cost.seconds(n_tokens) <= 0.1 < cost.seconds(n_tokens + 1)
    assert cost.tokens_in(0.009) == 0


def test_where_tokens_cost_nothing_any_number_fits() -> None:
    cost = taught(token_s=0.0)
    assert cost.tokens_in(1.0) > 100_000
    assert cost.tokens_in(1.0) <= MANY


def test_caution_grows_with_the_noise() -> None:
    assert taught().caution == pytest.approx(1.0, abs=0.02)
    assert 1.05 < taught(noise=0.05).caution < 1.2


def test_a_clock_that_has_not_moved_teaches_nothing() -> None:
    cost = PassCost()
    cost.learn(8, 0.0)
    assert not cost.is_known
    cost.learn(8, 0.02)
    cost.learn(8, 0.0)
    assert cost.seconds(8) == pytest.approx(0.02)
