"""The one edge that every error of a command reaches."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import click

from runner.cli.group import commands, program_name
from runner.cli.main import EXIT_INTERRUPTED
from runner.cli.output import OutputLost
from runner.cli.state import crash_path
from runner.config import LOG_SETTINGS
from runner.environment import environment
from runner.errors import RunnerError
from runner.serving.spawn import EarlyEngine

EXIT_BROKEN_PIPE: Final = 141


def guarded(arguments: Sequence[str], early: EarlyEngine | None = None) -> int:
    """Run the command that `arguments` name; whatever goes wrong becomes an exit code and at most a few lines on standard error."""
    try:
        return _run(arguments, early)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except RunnerError as error:
        return _complain(error.message, error.hint)
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except OutputLost as error:
        return _complain(f"The output cannot be written: {error.strerror}", None)
    except OSError as error:
        return _confess(error, wants_traceback=True) if _is_debugging(arguments) else _complain(_told(error), None)
    except Exception as error:  # noqa: BLE001  # the last edge: a bug of ours is told in one sentence too
        return _confess(error, wants_traceback=_is_debugging(arguments))
    finally:
        _give_up_on_stdout()


def _run(arguments: Sequence[str], early: EarlyEngine | None) -> int:
    with commands.make_context(program_name(), list(arguments), obj=early) as ctx:
        code = commands.invoke(ctx)
        sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _complain(message: str, hint: str | None) -> int:
    click.echo(f"Error: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    return 1


def _told(error: OSError) -> str:
    reason = error.strerror or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else reason


def _give_up_on_stdout() -> None:
    """What could not be written goes nowhere, or the interpreter's own flush at the end would complain once more."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _confess(error: Exception, *, wants_traceback: bool) -> int:
    import traceback  # 4 ms that only a fault needs

    trace = "".join(traceback.format_exception(error))
    path = None if wants_traceback else crash_path()
    if path is None:
        click.echo(trace, err=True, nl=False)
        return _complain(f"A fault of this program: {type(error).__name__}: {error}", None)
    with suppress(OSError):
        path.write_text(trace, encoding="utf-8")
    return _complain(f"A fault of this program: {type(error).__name__}: {error}", f"{path} says where")


def _is_debugging(arguments: Sequence[str]) -> bool:
    setting = next(setting for setting in LOG_SETTINGS if setting.name == "log-level")
    typed = f"{setting.flag} debug" in " ".join(arguments) or f"{setting.flag}=debug" in arguments
    return typed or environment(setting.env) == "debug"
