"""From the options of `start`, `serve` and `chat` to a running session."""

import os
from pathlib import Path
from typing import Final

import click
import msgspec

from runner import log
from runner.cli.options import Chosen, chosen_model, engine_config, server_config
from runner.cli.service import Service, ServicePlan
from runner.cli.session import Session
from runner.cli.state import log_path
from runner.cli.surface import streams
from runner.config import AnswerOptions, EngineConfig

QUIET_LEVEL: Final = "error"  # of commands whose answers are what the person wants to see


def launch(ctx: click.Context, *, serves: bool, chats: bool) -> int:
    """Find the model, take the ports, start the engine, do what is asked. Returns the exit code; raises RunnerError."""
    model, chosen = chosen_model(ctx)
    engine = engine_config(model, chosen)
    seen = streams()
    set_up_log(chosen, is_quiet=not serves, is_beside_chat=chats and seen.has_cursor)
    plan = ServicePlan(
        streams=seen,
        server=server_config(chosen) if serves else None,
        answers=answer_options(chosen) if chats else None,
    )
    return Session(engine if serves else for_one(engine), Service(plan), ctx.obj).run()


def answer_options(chosen: Chosen) -> AnswerOptions:
    """What the person wants of every answer at the terminal."""
    return AnswerOptions(system=chosen.text("system") or "", max_tokens=chosen.number("max-tokens"))


def for_one(engine: EngineConfig) -> EngineConfig:
    """One person needs one slot, unless more were asked for."""
    return engine if engine.n_slots is not None else msgspec.structs.replace(engine, n_slots=1)


def set_up_log(chosen: Chosen, *, is_quiet: bool, is_beside_chat: bool = False) -> None:
    """Log where the person said, else to standard error; beside a chat on the same terminal to a file, or nowhere. Raises ConfigError."""
    level = chosen.text("log-level")
    assert level is not None
    place = chosen.path("log-file")
    if is_beside_chat:
        place = place or log_path() or Path(os.devnull)
    elif is_quiet and not chosen.was_given("log-level") and place is None:
        level = QUIET_LEVEL
    log.setup(level, place)
