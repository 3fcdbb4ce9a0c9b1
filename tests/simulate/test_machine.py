"""The scheduler through the simulated machine: whatever comes, leaves or fails, every request ends once and answers as if alone."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runner.config import PolicyName
from runner.engine.batch import Outcome
from runner.engine.lifecycle import Reason
from runner.engine.order import Tier
from runner.engine.policies import POLICIES
from runner.simulate.machine import Machine
from runner.simulate.simulation import Setup, compare, make_scheduler, seconds_between
from runner.simulate.traces import NEVER, TRACES, Arrival, Scene, Trace
from tests.engine.cells import answer
from tests.simulate.cells import COST, Cells, Watch

N_BATCH, N_CTX = 32, 128


SMALL = Setup(trace="", n_requests=0, n_clients=3, n_ctx=N_CTX, n_batch=N_BATCH)


def watched(arrivals: list[Arrival], n_slots: int, policy: PolicyName, setup: Setup = SMALL) -> tuple[Machine, Watch]:
    """A machine with small batches over content that is checked."""
    scheduler = make_scheduler(setup, n_slots, policy)
    cells = Cells(n_slots, n_batch=N_BATCH, n_ctx=N_CTX, is_quick=False)
    watch = Watch(scheduler, cells, n_batch=N_BATCH)
    return Machine(scheduler, cells, COST, Trace(iter(arrivals)), watch), watch


def at_once(*lengths: tuple[int, int]) -> list[Arrival]:
    """Requests of (prompt, generated) tokens, all there from the start, each of its own client."""
    return [Arrival(0.0, client, *pair) for client, pair in enumerate(lengths)]


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Requests that come close together, some of which are given up at once or later."""
    pauses = draw(st.lists(st.sampled_from((0.0, 0.0, 0.01, 0.1, 3.0)), max_size=25))
    found = []
    for at in accumulate(pauses):
        n_prompt, n_generate = draw(st.integers(1, 90)), draw(st.integers(1, 30))
        leaves_at = at + draw(st.sampled_from((NEVER, NEVER, NEVER, 0.0, 0.02, 0.3, 2.0)))
        n_common = draw(st.integers(0, n_prompt))
        found.append(Arrival(at, draw(st.integers(0, 2)), n_prompt, n_generate, draw(st.sampled_from(Tier)), leaves_at, n_common))
    return found


# A trim that mends a slot is refused, and in the same step the slot gets a parked sequence's cells: they are what counts.
@example(
    arrivals=[Arrival(0.0, 0, 1, 3), Arrival(0.01, 0, 1, 1, Tier.HIGH)],
    n_slots=1,
    policy="fair",
    outcomes={2: Outcome.NO_ROOM},
    refused={2},
    share_grace_s=0.0,
    n_host_cells=60,
)
@settings(max_examples=200, deadline=None)
@given(
    arrivals=arrivals(),
    n_slots=st.integers(1, 6),
    policy=st.sampled_from(sorted(POLICIES)),
    outcomes=st.dictionaries(st.integers(0, 80), st.sampled_from((Outcome.NO_ROOM, Outcome.INVALID, Outcome.BROKEN)), max_size=6),
    refused=st.sets(st.integers(0, 20), max_size=4),
    share_grace_s=st.sampled_from((0.0, 0.1, 1.0)),
    n_host_cells=st.sampled_from((0, 60, 1 << 20)),
)
def test_whatever_comes_leaves_or_fails_every_request_ends_once_and_answers_as_if_alone(
    arrivals: list[Arrival],
    n_slots: int,
    policy: PolicyName,
    outcomes: dict[int, Outcome],
    refused: set[int],
    share_grace_s: float,
    n_host_cells: int,
) -> None:
    setup = replace(SMALL, share_grace_s=share_grace_s, kv_host_bytes=n_host_cells * SMALL.costs.cell_bytes)
    machine, watch = watched(arrivals, n_slots, policy, setup)
    n_decodes, n_ops = iter(range(1 << 30)), iter(range(1 << 30))
    watch.cells.outcome = lambda plan: outcomes.get(next(n_decodes), Outcome.DONE)
    watch.cells.refuse = lambda op: next(n_ops) in refused
    machine.run()
    watch.finish()
    assert len(watch.submitted) == len(arrivals)
    for sequence in watch.submitted:
        tokens = watch.tokens.get(sequence.request_id, [])
        assert tokens == answer(sequence.prompt, len(tokens))
        assert sequence.reason is not Reason.LENGTH or len(tokens) == sequence.max_tokens
        assert outcomes or refused or sequence.reason is not Reason.ERROR
        assert sequence.reason is not Reason.STOP


def test_the_clock_moves_by_what_the_steps_cost() -> None:
    machine, watch = watched(at_once((20, 4)), 1, "fcfs")
    machine.run()
    (sequence,) = watch.submitted
    prompt_s = COST.pass_s(20) + COST.costs.prompt_cell_s * 20 * 256
    row_s = COST.pass_s(1) + COST.costs.decode_cell_s * 256
    assert sequence.times.first_token_at == pytest.approx(prompt_s)
    assert machine.now == sequence.times.finished_at == pytest.approx(prompt_s + 3 * row_s)


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    machine, watch = watched([Arrival(0.0, 0, 20, 2), Arrival(0.001, 1, 20, 2)], 2, "fcfs")
    machine.run()
    first, second = watch.submitted
    assert second.times.arrived_at == 0.001
    assert second.times.admitted_at == first.times.first_token_at


def test_an_idle_machine_sleeps_until_the_next_request() -> None:
    machine, watch = watched([Arrival(5.0, 0, 4, 1), Arrival(1000.0, 0, 4, 1)], 1, "fcfs")
    machine.run()
    assert [sequence.times.admitted_at for sequence in watch.submitted] == [5.0, 1000.0]


def test_a_client_that_leaves_is_cancelled_at_its_time_and_a_second_cancel_is_nothing() -> None:
    machine, watch = watched([Arrival(0.0, 0, 4, 30, leaves_at=0.05), Arrival(0.0, 0, 4, 2, leaves_at=9.0)], 1, "fcfs")
    machine.run()
    watch.finish()
    assert [sequence.reason for sequence in watch.submitted] == [Reason.CANCELLED, Reason.LENGTH]
    assert 0.05 <= watch.submitted[0].times.finished_at < 0.06


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_clients_that_come_as_others_leave_are_served_too(policy: PolicyName) -> None:
    setup = Setup(trace="adversarial", n_requests=400, n_clients=30, load=2.0, n_ctx=512)
    scheduler = make_scheduler(setup, 4, policy)
    cells = Cells(4, n_batch=setup.n_batch, n_ctx=setup.n_ctx, is_quick=True)
    watch = Watch(scheduler, cells, n_batch=setup.n_batch)
    scene = Scene(setup.n_requests, setup.n_clients, seconds_between(setup, 4), seed=5, n_ctx=setup.n_ctx)
    Machine(scheduler, cells, COST, TRACES[setup.trace](scene), watch).run()
    watch.finish()
    assert len(watch.submitted) == 400


def test_the_same_seed_gives_the_same_report_and_every_request_is_in_it() -> None:
    setup = Setup(trace="greedy", n_requests=300, n_clients=10)
    told: list[int] = []
    report = compare(setup, (2, 4), ("fair", "fcfs"), told.append)
    assert report == compare(setup, (2, 4), ("fair", "fcfs"))
    assert [(row.policy, row.n_slots, row.n_served) for row in report.rows] == [
        ("fair", 2, 300),
        ("fcfs", 2, 300),
        ("fair", 4, 300),
        ("fcfs", 4, 300),
    ]
    assert sum(told) == 1_200


@pytest.mark.parametrize(("load", "busy"), [(0.5, 0.5), (0.8, 0.8), (2.0, 1.0)])
def test_the_load_is_a_share_of_what_the_machine_can_do(load: float, busy: float) -> None:
    (row,) = compare(Setup(trace="poisson", n_requests=3_000, n_clients=20, load=load), (1,), ("fcfs",)).rows
    assert row.busy == pytest.approx(busy, abs=0.05)


def test_one_greedy_client_takes_less_from_the_others_under_fair_than_under_fcfs() -> None:
    fair, fcfs = compare(Setup(trace="greedy", n_requests=2_000, n_clients=20), (4,), ("fair", "fcfs")).rows
    assert fair.jain is not None
    assert fcfs.jain is not None
    assert fair.jain > fcfs.jain + 0.2
    assert fair.lone_ttft_s.p95 < fcfs.lone_ttft_s.p95 / 4
