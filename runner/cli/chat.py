"""`slotfile chat`: the terminal chat alone; from a pipe, one answer a line."""

import click

from runner.cli.options import settings_options
from runner.config import ANSWER_SETTINGS, LOG_SETTINGS, MODEL_SETTINGS


@click.command()
@settings_options(MODEL_SETTINGS, LOG_SETTINGS, ANSWER_SETTINGS)
@click.pass_context
def chat(ctx: click.Context, /, **_: object) -> int:
    """Chat at the terminal, without a server.

    Where input or output is no terminal, each line of the input is a message and the output holds nothing but answers.
    """
    from runner.cli.launch import launch  # help needs none of it

    return launch(ctx, serves=False, chats=True)
