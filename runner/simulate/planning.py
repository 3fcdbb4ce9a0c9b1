"""What planning a step costs, and whether that grows with the number of those who wait. Real time, so never a test."""

import statistics
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from runner.config import PolicyName
from runner.engine.batch import BatchPlan, Outcome
from runner.engine.order import Owner, Tier
from runner.engine.scheduler import Scheduler
from runner.engine.sequence import Sequence as Generation
from runner.simulate.cells import CountedCells
from runner.simulate.machine import GREEDY
from runner.simulate.report import aligned
from runner.simulate.simulation import Setup, make_scheduler

N_RUNNING: Final = 8
WAITING: Final = (10, 100_000)
N_CLIENTS: Final = 10_000
N_STEPS: Final = 2_000
_N_PROMPT: Final = 8
_STEP_S: Final = 0.026


class Planning(msgspec.Struct, frozen=True, kw_only=True):
    """Medians in microseconds with so many waiting: a step in which nothing changes, one that fills a slot that was left, and a cancel."""

    policy: str
    n_waiting: int
    plan_us: float
    fill_us: float
    cancel_us: float


def measure(policies: Sequence[PolicyName], waiting: Sequence[int] = WAITING, n_steps: int = N_STEPS) -> list[Planning]:
    """Every policy with few and with many waiting."""
    return [_measured(policy, n_waiting, n_steps) for policy in policies for n_waiting in waiting]


def planning_table(found: list[Planning]) -> str:
    """A line each."""
    rows = [(row.policy, f"{row.n_waiting:,}", f"{row.plan_us:.1f}", f"{row.fill_us:.1f}", f"{row.cancel_us:.1f}") for row in found]
    return aligned(("policy", "waiting", "plan, µs", "plan that fills a slot, µs", "cancel, µs"), rows)


def planning_json(found: list[Planning]) -> str:
    """One array, indented."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def _measured(policy: PolicyName, n_waiting: int, n_steps: int) -> Planning:
    bench = _Bench(policy, n_waiting)
    steady = [bench.step() for _ in range(n_steps)]
    fill, cancel = [], []
    for _ in range(n_steps // 4):
        # One leaves its slot, another the queue, and two come: as many wait as before.
        cancel.append(bench.cancel_a_waiting_one())
        bench.cancel_a_running_one()
        bench.add(2)
        fill.append(bench.step())
        while bench.has_prompts:
            bench.step()
    return Planning(
        policy=policy,
        n_waiting=n_waiting,
        plan_us=statistics.median(steady) * 1e6,
        fill_us=statistics.median(fill) * 1e6,
        cancel_us=statistics.median(cancel) * 1e6,
    )


class _Bench:
    """Eight that decode and never end, and so many that wait."""

    def __init__(self, policy: PolicyName, n_waiting: int) -> None:
        setup = Setup(trace="", n_requests=0, n_clients=N_CLIENTS)
        self._scheduler: Scheduler = make_scheduler(setup, N_RUNNING, policy)
        self._cells = CountedCells(N_RUNNING, n_ctx=1 << 30, n_batch=setup.n_batch)
        self._now = 0.0
        self._n = 0
        self.add(N_RUNNING)
        self.step()
        self.add(n_waiting)
        while self.has_prompts:
            self.step()

    @property
    def has_prompts(self) -> bool:
        """Whether one that has a slot has no token yet."""
        return any(sequence.pending is None for sequence in self._scheduler.running)

    def add(self, n: int) -> None:
        """Let so many come, each of the next client."""
        for _ in range(n):
            self._n += 1
            owner = Owner(str(self._n % N_CLIENTS))
            sequence = Generation(str(self._n), [self._n] * _N_PROMPT, GREEDY, 1 << 30, ignore_eos=True, tier=Tier.NORMAL, owner=owner)
            sequence.times.arrived_at = self._now
            self._scheduler.add(sequence)

    def step(self) -> float:
        """Plan, timed, then pretend to compute."""
        started = time.perf_counter()
        plan = self._scheduler.plan(self._now)
        seconds = time.perf_counter() - started
        self._carry_out(plan)
        return seconds

    def cancel_a_running_one(self) -> None:
        """A slot is free."""
        self._scheduler.cancel(self._scheduler.running[0].request_id, self._now)

    def cancel_a_waiting_one(self) -> float:
        """Timed. The newest: those before it stay."""
        started = time.perf_counter()
        cancelled = self._scheduler.cancel(str(self._n), self._now)
        seconds = time.perf_counter() - started
        assert cancelled is not None
        return seconds

    def _carry_out(self, plan: BatchPlan) -> None:
        self._cells.apply(plan.kv_ops)
        self._scheduler.take_placed()
        sampled: list[int] = []
        if plan.chunks:
            self._cells.decode(plan)
            sampled = self._cells.sample(plan)
        self._now += _STEP_S
        self._scheduler.commit(plan, Outcome.DONE, sampled, self._now)
