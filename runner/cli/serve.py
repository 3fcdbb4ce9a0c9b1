"""`slotfile serve`: the HTTP server alone."""

import click

from runner.cli.options import settings_options
from runner.config import LOG_SETTINGS, MODEL_SETTINGS, SERVER_SETTINGS


@click.command()
@settings_options(MODEL_SETTINGS, SERVER_SETTINGS, LOG_SETTINGS)
@click.pass_context
def serve(ctx: click.Context, /, **_: object) -> int:
    """Serve the model over HTTP: an OpenAI-compatible endpoint on localhost.

    SIGTERM ends it with exit code 0, after --drain-timeout where one is set; Ctrl-C ends it with 130.
    """
    from runner.cli.launch import launch  # help needs none of it

    return launch(ctx, serves=True, chats=False)
