"""`slotfile` without a command: serve and, on a terminal, chat on the same engine."""

import click

from runner.cli.options import settings_options
from runner.config import ANSWER_SETTINGS, LOG_SETTINGS, MODEL_SETTINGS, SERVER_SETTINGS


@click.command()
@settings_options(MODEL_SETTINGS, SERVER_SETTINGS, LOG_SETTINGS, ANSWER_SETTINGS)
@click.pass_context
def start(ctx: click.Context, /, **_: object) -> int:
    """Serve the model over HTTP and, on a terminal, chat with it."""
    from runner.cli.launch import launch  # help needs none of it
    from runner.cli.surface import streams

    return launch(ctx, serves=True, chats=streams().is_conversation)
