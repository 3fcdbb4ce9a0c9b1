"""Traces: the same from the same seed, as many as asked for, in order, within a slot, and at the load that was asked for."""

from dataclasses import replace

import pytest

from runner.simulate.traces import TRACES, Arrival, Scene

SCENE = Scene(n_requests=4_000, n_clients=50, between_s=0.5, seed=3, n_ctx=512)
OPEN = [name for name in TRACES if name != "adversarial"]


def drawn(name: str, scene: Scene = SCENE) -> list[Arrival]:
    """All that come by themselves."""
    return list(TRACES[name](scene).arrivals)


@pytest.mark.parametrize("name", TRACES)
def test_a_seed_gives_the_same_requests_again_and_another_one_others(name: str) -> None:
    assert drawn(name) == drawn(name) != drawn(name, replace(SCENE, seed=4))


@pytest.mark.parametrize("name", TRACES)
def test_requests_come_in_order_and_fit_a_slot(name: str) -> None:
    found = drawn(name)
    assert len(found) == SCENE.n_requests
    assert [arrival.at for arrival in found] == sorted(arrival.at for arrival in found)
    assert all(arrival.n_prompt >= 1 and arrival.n_generate >= 1 for arrival in found)
    assert all(arrival.n_prompt + arrival.n_generate <= SCENE.n_ctx and arrival.n_common < arrival.n_prompt for arrival in found)
    members = 10 if name == "team" else 1
    assert {arrival.client for arrival in found} == set(range(SCENE.n_clients // members))
    assert len({arrival.part for arrival in found}) == members


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("between_s", [0.0, 0.5])
def test_requests_are_as_far_apart_as_they_should(name: str, between_s: float) -> None:
    found = drawn(name, replace(SCENE, between_s=between_s, n_requests=20_000))
    assert found[-1].at / 20_000 == pytest.approx(between_s, rel=0.15)


def test_half_of_all_is_the_greedy_clients_and_it_sends_fifty_at_once() -> None:
    own = [arrival for arrival in drawn("greedy", replace(SCENE, n_requests=20_000)) if arrival.client == 0]
    assert len(own) == pytest.approx(10_000, rel=0.1)
    assert {len([a for a in own if a.at == at]) for at in {a.at for a in own}} <= set(range(1, 51))


def test_replies_count_among_the_requests() -> None:
    trace = TRACES["adversarial"](replace(SCENE, n_requests=100))
    n = 0
    for _ in trace.arrivals:
        n += 1 + (trace.reply(0, 1.0) is not None)
    assert n == 100
