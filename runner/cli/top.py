"""`slotfile top`: a server as it is now, live in the terminal."""

from typing import TYPE_CHECKING, Final

import click

from runner.cli.options import FiniteRange, settings_options
from runner.config import SERVER_SETTINGS

if TYPE_CHECKING:
    from runner.cli.signals import StopSignals
    from runner.terminal.top.server import ServerLooks

SETTINGS: Final = ("host", "port", "api-key")
INTERVALS_S: Final = (0.2, 60.0)


@click.command()
@click.option("--url", metavar="URL", help="Where the server is (default: what --host and --port say, on this machine).")
@click.option(
    "--interval", type=FiniteRange(*INTERVALS_S), default=1.0, metavar="X", show_default=True, help="Seconds from one look to the next."
)
@click.option("--once", is_flag=True, help="Print one picture as plain text and end, as where standard output is no terminal.")
@settings_options([setting for setting in SERVER_SETTINGS if setting.name in SETTINGS])
@click.pass_context
def top(ctx: click.Context, /, *, url: str | None, interval: float, once: bool, **_: object) -> int:
    """Show a running server live: slots, tokens a second, the queue and the clients' shares.

    --host, --port and --api-key are what the server was started with; of several keys the first is used. A key sees its own requests
    and everybody's numbers, one with `admin` sees all. q, Ctrl-D and Ctrl-C leave.
    """
    import asyncio
    import gc

    chosen_url, key = address(ctx, url), first_key(ctx)
    gc.enable()  # it was off for the imports
    return asyncio.run(watch(chosen_url, key, interval, once=once))


def address(ctx: click.Context, url: str | None) -> str:
    """Where to look. Raises ConfigError."""
    from runner.cli.options import Chosen, known
    from runner.errors import ConfigError
    from runner.terminal.top.server import base_url

    if url is not None:
        return base_url(url)
    chosen = Chosen(ctx, own_arguments())
    host, port = chosen.text("host"), known(chosen.number("port"))
    if port == 0:
        raise ConfigError("--port is 0, which lets the server take a free one", hint="--url names the address that it printed")
    return f"http://{reachable(host)}:{port}"


def own_arguments() -> "dict[str, str | int | float]":
    """Those in the manifest of this executable: what its server would take."""
    from runner.bundle.locate import current_bundle

    bundle = current_bundle()
    return dict(bundle.manifest.arguments) if bundle is not None and bundle.manifest is not None else {}


def reachable(host: str | None) -> str:
    """An address to listen on as one to connect to: every address of this machine is reached on the loopback one."""
    if host in (None, "", "0.0.0.0", "::"):  # noqa: S104 - nothing listens here
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def first_key(ctx: click.Context) -> str | None:
    """The key to send. Raises ConfigError."""
    from runner.cli.keys import check_api_keys

    keys = check_api_keys(ctx.params["api_key"])
    return keys[0] if keys else None


async def watch(url: str, key: str | None, interval_s: float, *, once: bool) -> int:
    """Look until somebody leaves, a signal comes or the bootloader has gone. The exit code."""
    import asyncio

    from runner.cli.parent import parent_gone
    from runner.cli.signals import StopSignals
    from runner.terminal.top.server import ServerLooks

    signals = StopSignals(asyncio.get_running_loop().time)
    signals.install()
    async with ServerLooks(url, key) as looks:
        showing = asyncio.create_task(show(looks, interval_s, signals, once=once))
        others = [asyncio.create_task(signals.asked.wait()), asyncio.create_task(parent_gone())]
        await asyncio.wait([showing, *others], return_when=asyncio.FIRST_COMPLETED)
        for task in (showing, *others):
            task.cancel()
        (shown, *_) = await asyncio.gather(showing, *others, return_exceptions=True)
    if signals.asked.is_set():
        return signals.exit_code
    if isinstance(shown, BaseException):
        raise shown
    return 0


async def show(looks: "ServerLooks", interval_s: float, signals: "StopSignals", *, once: bool) -> None:
    """Once, or until a key leaves."""
    from runner.cli.surface import streams
    from runner.terminal.render import enable_ansi
    from runner.terminal.top.screen import Watch, show_once

    seen = streams()
    if once or not seen.has_cursor:
        await show_once(looks, interval_s)
        return
    enable_ansi()
    live = Watch(looks, interval_s, has_colour=seen.has_colour)
    signals.at_once = live.leave_at_once
    await live.run()
