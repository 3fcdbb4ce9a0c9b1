"""`slotfile run`: one prompt, one answer, for scripts and pipes."""

import sys

import click

from runner.cli.options import settings_options
from runner.config import ANSWER_SETTINGS, LOG_SETTINGS, MODEL_SETTINGS


@click.command()
@click.option("-p", "--prompt", help="The prompt; without it, standard input is read to its end.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it stands, without chat template.")
@settings_options(MODEL_SETTINGS, LOG_SETTINGS, ANSWER_SETTINGS)
@click.pass_context
def run(ctx: click.Context, /, prompt: str | None, *, raw: bool, **_: object) -> int:
    """Answer one prompt: the answer on standard output, all else on standard error."""
    from runner.cli.launch import answer_options, for_one, set_up_log
    from runner.cli.one_answer import OneAnswer
    from runner.cli.options import chosen_model, engine_config
    from runner.cli.session import Session

    text = read_prompt(prompt)
    model, chosen = chosen_model(ctx)
    set_up_log(chosen, is_quiet=True)
    options = answer_options(chosen)
    if raw and options.system:
        raise click.UsageError("--system has no place in a raw prompt.")
    return Session(for_one(engine_config(model, chosen)), OneAnswer(text, options, is_raw=raw), ctx.obj).run()


def read_prompt(prompt: str | None) -> str:
    """The prompt that was given, else all of a pipe or file on standard input. Raises click.UsageError where there is none."""
    if prompt is None and sys.stdin is not None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is None:
        raise click.UsageError("A prompt is missing: -p TEXT gives one, and so does a pipe into standard input.")
    if not prompt.strip():
        raise click.UsageError("The prompt is empty.")
    return prompt
