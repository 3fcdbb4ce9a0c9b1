"""Adaptive batching in the simulator: what it must reach beside no batching, full batches and a fixed wait."""

import json
from pathlib import Path

import pytest

from runner.engine.batching.adaptive_batch import AdaptiveBatcher, _Entry
from runner.engine.batching.items import NEVER, BatchLimits, Item
from runner.simulate.batch_planning import measure
from runner.simulate.batch_report import Row
from runner.simulate.batchers import POLICIES, FixedBatcher
from runner.simulate.batching import BatchMachine, full_batches_items_s, simulate
from runner.simulate.costs import Costs, StepCost
from runner.simulate.inputs import SCENARIOS, Setup, Source
from tests.cli.program import run

# Where the tokens cost most of a pass, and where the pass does: 2 cores (the default), and an accelerator that 512 tokens hardly fill.
TOKENS = Costs()
PASSES = Costs(pass_s=((1, 0.006), (512, 0.012)))
MACHINES = pytest.mark.parametrize("costs", [TOKENS, PASSES], ids=["tokens", "passes"])


def row(name: str, policy: str, *, costs: Costs, load: float, n_items: int = 3000) -> Row:
    setup = Setup(n_items=n_items, load=load, costs=costs)
    return simulate(name, policy, setup, full_batches_items_s(SCENARIOS[name], setup))


@MACHINES
def test_a_lonely_client_is_answered_as_without_batching(costs: Costs) -> None:
    alone, adaptive = (row("lonely", policy, costs=costs, load=1.0) for policy in ("single", "adaptive"))
    assert adaptive.latency_s == alone.latency_s


@MACHINES
@pytest.mark.parametrize("name", ["poisson", "mixed"])
def test_at_low_load_half_of_all_are_answered_as_soon_as_without_batching(costs: Costs, name: str) -> None:
    alone, adaptive = (row(name, policy, costs=costs, load=0.02) for policy in ("single", "adaptive"))
    assert adaptive.latency_s.p50 <= 1.02 * alone.latency_s.p50


@MACHINES
@pytest.mark.parametrize("name", ["poisson", "bursts", "mixed"])
def test_under_overload_throughput_is_that_of_full_batches(costs: Costs, name: str) -> None:
    assert row(name, "adaptive", costs=costs, load=2.0).of_full >= 0.95


@MACHINES
@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_independent_arrivals_lose_nothing_against_taking_what_is_there(costs: Costs, load: float) -> None:
    eager, adaptive = (row("poisson", policy, costs=costs, load=load) for policy in ("eager", "adaptive"))
    assert adaptive.latency_s.p50 <= 1.03 * eager.latency_s.p50
    assert adaptive.items_s >= 0.99 * eager.items_s


@pytest.mark.parametrize(("name", "load"), [("bursts", 0.1), ("loops", 1.0)])
def test_where_arrivals_cluster_waiting_pays(name: str, load: float) -> None:
    means = {}
    for policy in ("eager", "adaptive"):
        setup = Setup(n_items=3000, load=load, costs=PASSES)
        between_s = 1.0 / full_batches_items_s(SCENARIOS[name], setup) / load
        machine = BatchMachine(POLICIES[policy](setup.limits), Source(SCENARIOS[name], setup, between_s), StepCost(PASSES), setup)
        machine.run()
        means[policy] = sum(machine.tally.latencies_s) / len(machine.tally.latencies_s)
    assert means["adaptive"] <= 0.95 * means["eager"]


@MACHINES
def test_under_overload_all_that_is_computed_is_in_time(costs: Costs) -> None:
    adaptive, eager = (row("deadlines", policy, costs=costs, load=1.5, n_items=6000) for policy in ("adaptive", "eager"))
    assert adaptive.n_late <= 0.01 * adaptive.n_served
    assert adaptive.of_full >= 0.95
    assert adaptive.n_served - adaptive.n_late > eager.n_served - eager.n_late


def test_below_capacity_hardly_anything_is_shed() -> None:
    assert row("deadlines", "adaptive", costs=PASSES, load=0.9).n_shed == 0


class Lenient(AdaptiveBatcher):
    """Gives one item a chance that was shed, and treats all others as it did."""

    def __init__(self, limits: BatchLimits, spared: str) -> None:
        super().__init__(limits)
        self._spared = spared

    def _check_deadline(self, item: Item, takes_s: float, now: float) -> None:
        if item.item_id != self._spared:
            super()._check_deadline(item, takes_s, now)

    def _late_at(self, entry: _Entry) -> float:
        return NEVER if entry.item.item_id == self._spared else super()._late_at(entry)


@pytest.mark.parametrize("n_clients", [1, 100])
def test_what_is_shed_would_have_been_late(n_clients: int) -> None:
    setup = Setup(n_items=1000, load=1.5, n_clients=n_clients)
    scenario = SCENARIOS["deadlines"]
    between_s = 1.0 / full_batches_items_s(scenario, setup) / setup.load
    batcher = AdaptiveBatcher(setup.limits)
    machine = BatchMachine(batcher, Source(scenario, setup, between_s), StepCost(setup.costs), setup)
    machine.run()
    shed = [item_id for item_id, end in machine.tally.ends.items() if end == "shed"]
    assert batcher.counts.too_late > 0
    tried = shed[:: max(1, len(shed) // 30)]
    in_time = 0
    for item_id in tried:
        again = BatchMachine(Lenient(setup.limits, item_id), Source(scenario, setup, between_s), StepCost(setup.costs), setup)
        again.run()
        in_time += again.tally.ends[item_id] == "served"
    assert in_time <= 0.2 * len(tried)


def test_streams_keep_their_gap_and_items_are_served() -> None:
    adaptive = row("streams", "adaptive", costs=TOKENS, load=0.9)
    assert adaptive.gap_s is not None
    assert adaptive.gap_s.p95 <= 0.25
    assert adaptive.gap_s.p99 <= 0.25 * 1.05
    assert adaptive.of_full >= 0.8
    assert (adaptive.n_shed, adaptive.n_refused) == (0, 0)


def test_the_same_seed_gives_the_same_figures() -> None:
    assert row("bursts", "adaptive", costs=TOKENS, load=0.5) == row("bursts", "adaptive", costs=TOKENS, load=0.5)


def test_a_fixed_wait_ends_when_the_batch_is_full_or_the_time_is_over() -> None:
    batcher = FixedBatcher(BatchLimits(n_ubatch=100), size=3, wait_s=0.05)
    for number in range(2):
        batcher.add(Item(str(number), 40, 1.0, NEVER), 1.0)
    assert batcher.next_batch(1.0).wake_at == 1.05
    batcher.add(Item("2", 40, 1.01, NEVER), 1.01)
    assert [item.item_id for item in batcher.next_batch(1.01).batch] == ["0", "1"]
    assert [item.item_id for item in batcher.next_batch(1.06).batch] == ["2"]


def test_decisions_are_measured_with_few_and_many_waiting() -> None:
    found = measure((10, 50), n_batches=5)
    assert [row.n_waiting for row in found] == [10, 50]
    assert all(min(row.add_us, row.plan_us, row.cancel_us) > 0 for row in found)


def test_the_command_compares_every_policy_in_every_scenario(tmp_path: Path) -> None:
    done = run("simulate", "--batching", "--requests", "60", "--json", home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert [(each["scenario"], each["policy"]) for each in report["rows"]] == [(name, policy) for name in SCENARIOS for policy in POLICIES]
    assert all(each["n_served"] + each["n_shed"] + each["n_refused"] == 60 for each in report["rows"])


def test_the_command_prints_a_table(tmp_path: Path) -> None:
    done = run("simulate", "--batching", "--requests", "30", home=tmp_path)
    head, table, legend = done.stdout.rstrip().split("\n\n")
    assert head == "30 items a scenario, load 0.9, seed 1; 64 items and 512 tokens a batch, waits up to 50 ms"
    assert len(table.splitlines()) == 1 + len(SCENARIOS) * len(POLICIES)
    assert legend.startswith("single: no batching.")
