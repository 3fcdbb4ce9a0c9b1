"""A trace through a scheduler of each policy and each number of slots."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from runner.config import DEFAULT_ITL_TARGET_S, PolicyName
from runner.engine.layout import Weights
from runner.engine.scheduler import Scheduler
from runner.engine.slots import SlotPool
from runner.simulate.cells import CountedCells, Mute
from runner.simulate.costs import Costs, StepCost
from runner.simulate.foresight import Foresight
from runner.simulate.limits import NO_LIMITS, Limits
from runner.simulate.machine import Machine, Witness, Witnesses
from runner.simulate.report import Report, Row, Tally
from runner.simulate.traces import NEVER, TRACES, Scene, Trace

_STEPS_BETWEEN_NEWS: Final = 2_000
# Requests by which the machine's capacity is measured.
_N_MEASURED: Final = 2_000

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated. `target_gap_s` as of the prompt budget, `share_grace_s` and `kv_host_bytes` as of the scheduler.

    Who waits longer than `bound_s` counts as starved. `foretells`: whether those that wait, and those that `limits` refuse, are told of
    the time to come, which takes as long again.
    """

    trace: str
    n_requests: int
    n_clients: int
    load: float = 0.9
    seed: int = 1
    n_ctx: int = 4096
    n_batch: int = 512
    target_gap_s: float = DEFAULT_ITL_TARGET_S
    share_grace_s: float = 1.0
    kv_host_bytes: int = 1 << 30
    bound_s: float = 60.0
    limits: Limits = NO_LIMITS
    foretells: bool = False
    costs: Costs = field(default_factory=Costs)


def make_scheduler(setup: Setup, n_slots: int, policy: PolicyName) -> Scheduler:
    """The real one, over slots and a vocabulary without a model."""
    weights = Weights(model_bytes=setup.costs.model_bytes, cell_bytes=setup.costs.cell_bytes)
    return Scheduler(
        SlotPool(n_slots),
        Mute(),
        weights,
        n_batch=setup.n_batch,
        itl_target_s=setup.target_gap_s,
        policy=policy,
        share_grace_s=setup.share_grace_s,
        kv_host_bytes=setup.kv_host_bytes,
    )


def seconds_between(setup: Setup, n_slots: int) -> float:
    """The mean time between two requests at the load that is asked for.

    At load 1 they come as fast as the machine serves them where it is never short of any: measured, with all of them there from the
    start and none that is given up.
    """
    scene = Scene(min(setup.n_requests, _N_MEASURED), setup.n_clients, 0.0, setup.seed, setup.n_ctx)
    patient = Trace(arrival._replace(leaves_at=NEVER) for arrival in TRACES[setup.trace](scene).arrivals)
    machine = _machine(setup, make_scheduler(setup, n_slots, "fcfs"), patient, Tally(bound_s=setup.bound_s))
    machine.run()
    return machine.now / scene.n_requests / setup.load


def simulate(setup: Setup, n_slots: int, policy: PolicyName, between_s: float, progress: Progress = lambda n: None) -> Row:
    """Run it to its end. `progress` is told how many requests have ended since the last time."""
    scene = Scene(setup.n_requests, setup.n_clients, between_s, setup.seed, setup.n_ctx)
    tally, scheduler = Tally(bound_s=setup.bound_s), make_scheduler(setup, n_slots, policy)
    foresight = Foresight(scheduler, n_slots=n_slots, target_gap_s=setup.target_gap_s, limits=setup.limits) if setup.foretells else None
    machine = _machine(setup, scheduler, TRACES[setup.trace](scene), Witnesses(tally, foresight) if foresight else tally, setup.limits)
    n_told = 0
    is_going = True
    while is_going:
        is_going = all(machine.step() for _ in range(_STEPS_BETWEEN_NEWS))
        progress(tally.n_ended - n_told)
        n_told = tally.n_ended
    row = msgspec.structs.replace(tally.row(policy, n_slots), n_timed_out=machine.n_timed_out)
    return row if foresight is None else _with_told(row, foresight)


def _with_told(row: Row, foresight: Foresight) -> Row:
    admitted = foresight.n_admitted / foresight.n_retried if foresight.n_retried else None
    return msgspec.structs.replace(row, admitted=admitted, waits_told=foresight.waits.told(), retries_told=foresight.retries.told())


def compare(setup: Setup, slots: Iterable[int], policies: Iterable[PolicyName], progress: Progress = lambda n: None) -> Report:
    """A row for each policy with each number of slots.

    The requests are the same under every policy, but for those that are sent because another has ended.
    """
    policies, rows = tuple(policies), []
    for n_slots in slots:
        between_s = seconds_between(setup, n_slots)
        rows += [simulate(setup, n_slots, policy, between_s, progress) for policy in policies]
    return Report(
        trace=setup.trace,
        n_requests=setup.n_requests,
        n_clients=setup.n_clients,
        load=setup.load,
        seed=setup.seed,
        n_ctx_slot=setup.n_ctx,
        bound_s=setup.bound_s,
        limits=setup.limits,
        costs=setup.costs,
        rows=rows,
    )


def _machine(setup: Setup, scheduler: Scheduler, trace: Trace, witness: Witness, limits: Limits = NO_LIMITS) -> Machine:
    cells = CountedCells(len(scheduler.pool.slots), n_ctx=setup.n_ctx, n_batch=setup.n_batch)
    return Machine(scheduler, cells, StepCost(setup.costs), trace, witness, limits)
