"""`slotfile doctor`: one line a check, and an exit code that says whether all is well."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from runner.cli.options import settings_options
from runner.config import LOG_SETTINGS, MODEL_SETTINGS, SERVER_SETTINGS

if TYPE_CHECKING:
    from runner.cli.checks import Check

NAME_WIDTH: Final = 13


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
@settings_options(MODEL_SETTINGS, [setting for setting in SERVER_SETTINGS if setting.name in ("host", "port")], LOG_SETTINGS)
@click.pass_context
def doctor(ctx: click.Context, /, *, as_json: bool, **_: object) -> int:
    """Check this machine, the back ends and the model: does it load, and does it answer?

    The exit code is 1 when a check fails.
    """
    report = Report(as_json=as_json)
    for check in checks_without_engine(ctx):
        report.add(check)
    exit_code = try_model(ctx, report)
    return exit_code or report.finish()


class Report:
    """Prints each check as it comes, or all of them as JSON at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self.engine: object = None
        self._as_json = as_json
        self._checks: list[Check] = []

    def add(self, check: "Check") -> None:
        """One check was made."""
        self._checks.append(check)
        if not self._as_json:
            click.echo(f"{check.status:<5} {check.name:<{NAME_WIDTH}} {check.text}")
            if check.hint:
                click.echo(f"      hint: {check.hint}")

    def finish(self) -> int:
        """The exit code."""
        is_well = all(check.status != "fail" for check in self._checks)
        if self._as_json:
            checks = [asdict(check) for check in self._checks]
            click.echo(json.dumps({"ok": is_well, "checks": checks, "engine": self.engine}, indent=2))
        return 0 if is_well else 1


def checks_without_engine(ctx: click.Context) -> "Iterator[Check]":
    """All that needs no model."""
    from runner.cli import checks  # help needs none of it
    from runner.config import ServerConfig

    yield checks.check_system()
    yield checks.check_cpus()
    yield checks.check_memory()
    yield checks.check_temp_dir()
    yield checks.check_state_dir()
    yield checks.check_port(ServerConfig(host=ctx.params["host"], port=ctx.params["port"]))


def try_model(ctx: click.Context, report: Report) -> int:
    """Find the model, load it, let it answer; what fails is the last that is reported. Not 0 where a signal ended it."""
    import msgspec

    from runner.cli.checks import Check, Status, check_kv_cache, check_model
    from runner.cli.launch import set_up_log
    from runner.cli.options import chosen_model, engine_config
    from runner.cli.session import Session
    from runner.cli.trial import Trial, trial_config
    from runner.errors import RunnerError

    trial = Trial(report.add)
    try:
        model, chosen = chosen_model(ctx)
        config = engine_config(model, chosen)
        set_up_log(chosen, is_quiet=True)
        report.add(check_model(model))
        report.add(check_kv_cache(model, config))
        exit_code = Session(trial_config(config), trial).run()
    except RunnerError as error:
        report.add(Check("model", Status.FAIL, error.message, error.hint))
        return 0
    report.engine = msgspec.to_builtins(trial.info)
    return exit_code
