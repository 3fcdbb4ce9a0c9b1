"""Adaptive batching over a clock that is made up, beside what others do: no batching, what is there, a fixed wait.

The machine computes one pass at a time and takes what `costs.StepCost` says, with some noise. Load 1 is what it serves in full batches.
"""

import heapq
import random
from collections.abc import Callable, Iterable
from typing import Final

from runner.engine.batching.items import NEVER, Decision, Item
from runner.engine.order import Owner
from runner.errors import RunnerError
from runner.simulate.batch_report import Report, Row, Tally, figures
from runner.simulate.batchers import POLICIES, Batcher, FixedBatcher
from runner.simulate.costs import StepCost
from runner.simulate.inputs import SCENARIOS, Arrival, Scenario, Setup, Source

# Passes of the same batch differ by so much, as a share (standard deviation).
_NOISE: Final = 0.03
# Beside generation: so many streams, each of which gets a token a step.
_N_STREAMS: Final = 8
# Full batches by which the machine's capacity is measured.
_N_MEASURED: Final = 200

Progress = Callable[[int], None]


class BatchMachine:
    """Drives a batcher as the decode loop does: take what came, ask, compute, and, where streams run, give each of them a token."""

    def __init__(self, batcher: Batcher, source: Source, cost: StepCost, setup: Setup, *, has_streams: bool = False) -> None:
        self.now = 0.0
        self.tally = Tally()
        self._batcher, self._source, self._cost, self._setup = batcher, source, cost, setup
        self._stream_s = cost.pass_s(_N_STREAMS) if has_streams else None
        self._random = random.Random(setup.seed + 1)  # noqa: S311
        self._due = source.start()
        heapq.heapify(self._due)

    def run(self) -> None:
        """Until all items have ended."""
        while self._due or len(self._batcher):
            self.step()

    def step(self) -> None:
        """Decide once and do it."""
        self._pass_time(self.now)
        gap_s = None if self._stream_s is None else max(0.0, self._setup.target_gap_s - self._stream_s)
        decision = self._batcher.next_batch(self.now, gap_s)
        for item in decision.shed:
            self._end(item, "shed")
        started_at = self.now
        if decision.batch:
            self._compute(decision)
        if self._stream_s is not None:
            self._pass_time(self.now + self._stream_s * self._noise())
            self.tally.gaps_s.append(self.now - started_at)
        elif not decision.batch:
            wake_at = NEVER if decision.wake_at is None else decision.wake_at
            next_at = min(wake_at, self._due[0].at if self._due else NEVER)
            assert next_at < NEVER or not len(self._batcher), "items wait and nothing will happen"
            if next_at < NEVER:
                self._pass_time(max(self.now, next_at))

    def _compute(self, decision: Decision) -> None:
        seconds = self._cost.pass_s(decision.n_tokens) * self._noise()
        self._pass_time(self.now + seconds)
        self._batcher.complete(self.now, seconds)
        self.tally.batches.append(len(decision.batch))
        for item in decision.batch:
            self.tally.latencies_s.append(self.now - item.arrived_at)
            self._end(item, "late" if self.now > item.deadline else "served")

    def _pass_time(self, until: float) -> None:
        """Give the batcher all that comes until then, each at its time."""
        while self._due and self._due[0].at <= until:
            self._submit(heapq.heappop(self._due))
        self.now = until

    def _submit(self, arrival: Arrival) -> None:
        item = Item(str(arrival.number), arrival.n_tokens, arrival.at, arrival.at + arrival.patience_s, Owner(str(arrival.client)))
        try:
            self._batcher.add(item, arrival.at)
        except RunnerError as error:
            self.now = max(self.now, arrival.at)
            self._end(item, "shed" if error.status == 504 else "refused")

    def _end(self, item: Item, how: str) -> None:
        self.tally.end(item.item_id, how)
        answer = self._source.reply(int(item.owner.client), self.now)
        if answer is not None:
            heapq.heappush(self._due, answer)

    def _noise(self) -> float:
        return max(0.5, self._random.gauss(1.0, _NOISE))


def full_batches_items_s(scenario: Scenario, setup: Setup) -> float:
    """Items a second where every batch is as full as it can be: measured, with all of them there from the start and no deadline."""
    everything = _N_MEASURED * setup.limits.max_batch_size
    at_once = Setup(n_items=everything, seed=setup.seed, limits=setup.limits, costs=setup.costs)
    source = Source(Scenario(has_long=scenario.has_long), at_once, 0.0)
    batcher = FixedBatcher(setup.limits, size=setup.limits.max_batch_size, wait_s=0.0)
    machine = BatchMachine(batcher, source, StepCost(setup.costs), at_once)
    machine.run()
    return everything / machine.now


def simulate(name: str, policy: str, setup: Setup, full_items_s: float) -> Row:
    """One scenario under one policy, to its end."""
    scenario = SCENARIOS[name]
    source = Source(scenario, setup, 1.0 / full_items_s / setup.load)
    machine = BatchMachine(POLICIES[policy](setup.limits), source, StepCost(setup.costs), setup, has_streams=scenario.has_streams)
    machine.run()
    tally = machine.tally
    items_s = len(tally.latencies_s) / machine.now
    return Row(
        scenario=name,
        policy=policy,
        n_served=tally.count("served", "late"),
        n_shed=tally.count("shed"),
        n_refused=tally.count("refused"),
        n_late=tally.count("late"),
        items_s=items_s,
        of_full=items_s / full_items_s,
        items_a_batch=sum(tally.batches) / max(1, len(tally.batches)),
        latency_s=figures(tally.latencies_s),
        gap_s=figures(tally.gaps_s) if scenario.has_streams else None,
    )


def compare(setup: Setup, names: Iterable[str] = SCENARIOS, progress: Progress = lambda n: None) -> Report:
    """Every policy in every scenario. `progress` is told the items that have ended since the last time."""
    rows = []
    for name in names:
        full_items_s = full_batches_items_s(SCENARIOS[name], setup)
        for policy in POLICIES:
            rows.append(simulate(name, policy, setup, full_items_s))
            progress(setup.n_items)
    limits = setup.limits
    return Report(
        n_items=setup.n_items,
        load=setup.load,
        seed=setup.seed,
        max_wait_s=limits.max_wait_s,
        max_batch_size=limits.max_batch_size,
        n_ubatch=limits.n_ubatch,
        costs=setup.costs,
        rows=rows,
    )
