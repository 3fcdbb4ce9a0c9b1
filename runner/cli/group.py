"""The commands by name. Each is a file of its own that is imported when it is called, so `--help` and `--version` load nothing."""

import importlib
import sys
from pathlib import Path
from typing import Final

import click

from runner import __version__
from runner.config import ENV_PREFIX

DEFAULT_COMMAND: Final = "start"

COMMANDS: Final = {
    "start": "Serve and, on a terminal, chat: what happens without a command.",
    "serve": "Serve the model over HTTP.",
    "chat": "Chat at the terminal, without a server.",
    "run": "Answer one prompt on standard output.",
    "top": "Show a running server live in the terminal.",
    "pack": "Make an executable of another model.",
    "info": "Show what an executable or a GGUF file holds.",
    "extract": "Write the model inside an executable to a file.",
    "models": "List the models that can be built by name.",
    "cache": "List or delete conversations kept on disk.",
    "licenses": "Print the licences of the program, its libraries and the model.",
    "bench": "Measure tokens a second.",
    "simulate": "Try the scheduler on made-up clients, without a model.",
    "doctor": "Check this machine, the back ends and the model.",
}


class LazyGroup(click.Group):
    """Finds a command by importing `runner.cli.<name>`; arguments that name none belong to the default command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of their usefulness."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"runner.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default command before options that come without a command."""
        if not args or (args[0].startswith("-") and args[0] not in ("--help", "--version")):
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table above, so that help imports none of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The default command's options, then the commands."""
        default = self.get_command(ctx, DEFAULT_COMMAND)
        assert default is not None
        default.format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


def program_name() -> str:
    """What the person typed: the executable's name, or `slotfile`."""
    return Path(sys.executable).name if getattr(sys, "frozen", False) else "slotfile"


EPILOG: Final = (
    "COMMAND --help shows a command's options, --version the version. "
    f"Every option can be set as an environment variable too: {ENV_PREFIX} and its name, as in {ENV_PREFIX}API_KEY."
)


@click.group(
    cls=LazyGroup,
    context_settings={"max_content_width": 110},
    subcommand_metavar="[COMMAND] [OPTIONS]",
    options_metavar="",
    epilog=EPILOG,
)
@click.version_option(__version__, prog_name="slotfile", message="%(prog)s %(version)s")
def commands() -> None:
    """One executable file that holds a language model and serves it.

    Without a command: serve the model over HTTP and, on a terminal, chat with it.
    """
