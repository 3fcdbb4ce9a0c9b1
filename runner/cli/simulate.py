"""`slotfile simulate`: the real scheduler over a simulated machine, thousands of requests a second and no model."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, get_args

import click
from click.core import ParameterSource

from runner.config import DEFAULT_ITL_TARGET_S, PolicyName

if TYPE_CHECKING:
    from runner.simulate import inputs
    from runner.simulate.simulation import Progress

# As in runner/simulate/traces.py (tests/simulate/test_command.py), which help does not import.
TRACE_NAMES: Final = ("poisson", "bursts", "tails", "greedy", "tiers", "chats", "team", "adversarial")
POLICY_NAMES: Final[tuple[str, ...]] = get_args(PolicyName)
MAX_SLOTS: Final = 256
# Options that have a meaning beside --batching.
BATCHING_TAKES: Final = frozenset({"n_requests", "load", "seed", "n_clients", "itl_target", "costs", "planning", "batching", "as_json"})


class Several(click.ParamType[tuple[Any, ...]]):
    """Values of another type between commas."""

    name = "list"

    def __init__(self, each: click.ParamType[Any]) -> None:
        self._each = each

    def convert(self, value: str | tuple[Any, ...], param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """Raises click.BadParameter."""
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(self._each.convert(part, param, ctx) for part in parts)


@click.command()
@click.option("--trace", type=click.Choice(TRACE_NAMES), default="poisson", show_default=True, help="Who asks for what, and when.")
@click.option("--requests", "n_requests", type=click.IntRange(1), default=20_000, metavar="N", show_default=True, help="Requests.")
@click.option("--clients", "n_clients", type=click.IntRange(1), default=100, metavar="N", show_default=True, help="Clients that send them.")
@click.option(
    "--slots", type=Several(click.IntRange(1, MAX_SLOTS)), default="4,8", metavar="N,N", show_default=True, help="Numbers of slots."
)
@click.option(
    "--policy",
    "policies",
    type=Several(click.Choice(POLICY_NAMES)),
    default="fair,fcfs",
    metavar="NAME,NAME",
    show_default=True,
    help=f"Orders of the queue: {', '.join(POLICY_NAMES)}.",
)
@click.option(
    "--load",
    type=click.FloatRange(0.01, 100),
    default=0.9,
    metavar="X",
    show_default=True,
    help="What is asked for, as a share of what the machine serves when it is never short of requests.",
)
@click.option("--seed", type=click.IntRange(0), default=1, metavar="N", show_default=True, help="The same seed gives the same figures.")
@click.option("--ctx", "n_ctx", type=click.IntRange(16, 1 << 20), default=4096, metavar="N", show_default=True, help="Tokens a slot holds.")
@click.option(
    "--itl-target",
    type=click.FloatRange(0, 3600, min_open=True),
    default=DEFAULT_ITL_TARGET_S,
    metavar="X",
    show_default=True,
    help="Seconds between two tokens of a stream while a prompt is computed.",
)
@click.option(
    "--share-grace",
    type=click.FloatRange(0),
    default=1.0,
    metavar="X",
    show_default=True,
    help="Seconds that a client below its share waits for the slot of one above.",
)
@click.option(
    "--bound",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    metavar="X",
    show_default=True,
    help="Seconds of waiting beyond which a request counts as starved.",
)
@click.option(
    "--max-queue", type=click.IntRange(0), default=0, metavar="N", show_default=True, help="Requests that may wait; 0: any number."
)
@click.option(
    "--max-waiting-per-client",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    show_default=True,
    help="Requests of one client that may wait; 0: any number.",
)
@click.option(
    "--queue-timeout",
    type=click.FloatRange(0),
    default=0.0,
    metavar="X",
    show_default=True,
    help="Seconds to wait for a slot; 0: any time.",
)
@click.option("--timeout", type=click.FloatRange(0), default=0.0, metavar="X", show_default=True, help="Seconds in all; 0: any time.")
@click.option("--foretell", is_flag=True, help="Compare what those that wait, and those that are refused, are told with what comes.")
@click.option("--costs", metavar="JSON", help="Costs of a step, in place of those of SmolLM2 on 2 cores.")
@click.option("--planning", is_flag=True, help="Measure what planning a step takes, with few and with many waiting.")
@click.option("--batching", is_flag=True, help="Inputs without generation instead: adaptive batching beside other ways.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def simulate(
    *,
    trace: str,
    n_requests: int,
    n_clients: int,
    slots: tuple[int, ...],
    policies: tuple[PolicyName, ...],
    load: float,
    seed: int,
    n_ctx: int,
    itl_target: float,
    share_grace: float,
    bound: float,
    max_queue: int,
    max_waiting_per_client: int,
    queue_timeout: float,
    timeout: float,
    foretell: bool,
    costs: str | None,
    planning: bool,
    batching: bool,
    as_json: bool,
) -> None:
    """Drive the scheduler that serves, over a clock and a machine that are made up: no model, no waiting.

    Shows what each order of the queue and each number of slots does to throughput, waiting and fairness.
    """
    from runner.simulate import inputs  # help needs none of it
    from runner.simulate.costs import Costs
    from runner.simulate.limits import Limits
    from runner.simulate.planning import measure, planning_json, planning_table
    from runner.simulate.simulation import Setup, compare

    if batching:
        refuse_beside_batching()
        made_up = Costs.from_json(costs or "{}")
        compare_batching(
            inputs.Setup(n_items=n_requests, load=load, seed=seed, n_clients=n_clients, target_gap_s=itl_target, costs=made_up),
            planning=planning,
            as_json=as_json,
        )
        return
    if planning:
        found = measure(policies)
        click.echo(planning_json(found) if as_json else planning_table(found))
        return
    setup = Setup(
        trace=trace,
        n_requests=n_requests,
        n_clients=n_clients,
        load=load,
        seed=seed,
        n_ctx=n_ctx,
        target_gap_s=itl_target,
        share_grace_s=share_grace,
        bound_s=bound,
        limits=Limits(max_queue=max_queue, max_waiting_per_client=max_waiting_per_client, queue_timeout_s=queue_timeout, timeout_s=timeout),
        foretells=foretell,
        costs=Costs.from_json(costs or "{}"),
    )
    with request_progress(n_requests * len(slots) * len(policies)) as progress:
        report = compare(setup, slots, policies, progress)
    click.echo(report.json() if as_json else report.table())


def refuse_beside_batching() -> None:
    """What has no meaning for inputs without generation is not silently left out. Raises UsageError."""
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        if name not in BATCHING_TAKES and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--batching takes no {option.opts[0]}: its items have no slots, no queue of sequences and no answers")


def compare_batching(setup: "inputs.Setup", *, planning: bool, as_json: bool) -> None:
    """What adaptive batching does in each scenario, or what deciding costs it."""
    from runner.simulate import batch_planning
    from runner.simulate.batchers import POLICIES
    from runner.simulate.batching import compare
    from runner.simulate.inputs import SCENARIOS

    if planning:
        found = batch_planning.measure()
        click.echo(batch_planning.planning_json(found) if as_json else batch_planning.planning_table(found))
        return
    with request_progress(setup.n_items * len(SCENARIOS) * len(POLICIES)) as progress:
        report = compare(setup, progress=progress)
    click.echo(report.json() if as_json else report.table())


@contextmanager
def request_progress(n_requests: int) -> Iterator["Progress"]:
    """Yields the function that is told the requests done since the last call. Shows nothing where nobody watches."""
    with click.progressbar(
        length=n_requests, label="Simulating", file=sys.stderr, hidden=not sys.stderr.isatty(), update_min_steps=max(1, n_requests // 200)
    ) as bar:
        yield bar.update
