"""Looks again and again and shows what it sees: on the alternate screen of a terminal until somebody leaves, or once as plain text."""

import asyncio
import locale
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from rich.console import Console
from rich.live import Live

from runner.errors import ConfigError, RunnerError
from runner.terminal.keyboard import quiet_keyboard
from runner.terminal.top.drawing import Sheet, draw
from runner.terminal.top.sample import Sample
from runner.terminal.top.server import ServerLooks
from runner.terminal.top.view import View, view

LEAVING_KEYS: Final = frozenset(b"qQ\x04")
KEYS: Final = "q leaves"
TYPED_BYTES: Final = 1024
NOT_READY: Final = 503


def speaks_unicode() -> bool:
    """Whether the terminal's locale is UTF-8: what the streams are set to says nothing of it."""
    return sys.platform == "win32" or locale.getencoding().lower().replace("-", "") == "utf8"


async def show_once(looks: ServerLooks, interval_s: float) -> None:
    """Print one picture of two looks, which are so far apart. Raises RunnerError."""
    try:
        before = await looks.look()
        await asyncio.sleep(interval_s)
        picture = view(before, await looks.look())
    except ConnectionError as error:
        raise unanswered(looks, error) from error
    console = _console(has_colour=False, is_plain=True)
    with console.capture() as captured:
        console.print(draw(picture, looks.url, None, Sheet(console.width, has_unicode=speaks_unicode())))
    for line in captured.get().splitlines():
        sys.stdout.write(line.rstrip() + "\n")


def unanswered(looks: ServerLooks, error: ConnectionError) -> ConfigError:
    """The end of a command that found nobody."""
    return ConfigError(f"No server answers at {looks.url}: {error}", hint="slotfile serve starts one, and --url names another")


class Watch:
    """The live view."""

    def __init__(self, looks: ServerLooks, interval_s: float, *, has_colour: bool) -> None:
        self._looks = looks
        self._interval_s = interval_s
        self._console = _console(has_colour=has_colour, is_plain=False)
        self._has_unicode = speaks_unicode()
        self._live = Live(console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._before: Sample | None = None
        self._view: View | None = None
        self._trouble: str | None = None
        self._has_left = asyncio.Event()
        self._give_keyboard_back: Callable[[], None] = lambda: None

    def leave_at_once(self) -> None:
        """Give the terminal back now, for an end that unwinds nothing."""
        self._live.stop()
        self._give_keyboard_back()

    async def run(self) -> None:
        """Show until a key leaves. Raises what the first look raises, unless the server is only not ready, and Unauthorized at any time."""
        await self._first_look()
        with self._screen(), _resizes(self._draw):
            async with _keys(self._typed):
                looking = asyncio.create_task(self._keep_looking())
                leaving = asyncio.create_task(self._has_left.wait())
                try:
                    await asyncio.wait((looking, leaving), return_when=asyncio.FIRST_COMPLETED)
                    if looking.done():
                        looking.result()
                finally:
                    looking.cancel()
                    leaving.cancel()
                    await asyncio.gather(looking, leaving, return_exceptions=True)

    async def _first_look(self) -> None:
        try:
            await self._look()
        except ConnectionError as error:
            raise unanswered(self._looks, error) from error
        except RunnerError as error:
            if error.status != NOT_READY:
                raise
            self._trouble = _told(error)

    async def _keep_looking(self) -> None:
        loop, n_failures = asyncio.get_running_loop(), 0
        next_at = loop.time()
        while True:
            self._draw()
            next_at = max(next_at + self._interval_s, loop.time())
            await asyncio.sleep(next_at - loop.time())
            try:
                await self._look()
                self._trouble, n_failures = None, 0
            except ConnectionError as error:
                n_failures += 1
                self._trouble = f"No server answers at {self._looks.url}: {error}; asked {n_failures} times, and asking on"
            except RunnerError as error:
                if error.status == 401:
                    raise
                self._trouble = _told(error)

    async def _look(self) -> None:
        sample = await self._looks.look()
        self._view = view(self._before, sample, self._view.trail if self._view is not None else ())
        self._before = sample

    def _draw(self) -> None:
        if self._live.is_started:
            size = self._console.size
            sheet = Sheet(size.width, size.height, self._has_unicode)
            self._live.update(draw(self._view, self._looks.url, self._trouble, sheet, KEYS), refresh=True)

    def _typed(self, keys: bytes) -> None:
        if LEAVING_KEYS & set(keys):
            self._has_left.set()

    @contextmanager
    def _screen(self) -> Iterator[None]:
        """The alternate screen and a quiet keyboard, given back however this ends, and while the shell has the terminal (Ctrl-Z)."""
        with quiet_keyboard(sys.stdin.fileno(), is_prompting=lambda: False) as give_keyboard_back:
            self._give_keyboard_back = give_keyboard_back
            try:
                self._live.start()
                with _stops(self._stop):
                    yield
            finally:
                with suppress(OSError):  # the terminal has gone
                    self._live.stop()

    def _stop(self) -> None:
        self._live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._live.start()
        self._draw()


def _told(error: RunnerError) -> str:
    return f"{error.message}; asking on"


def _console(*, has_colour: bool, is_plain: bool) -> Console:
    return Console(
        file=sys.stdout,
        no_color=not has_colour,
        color_system="auto" if has_colour else None,
        force_terminal=not is_plain,
        highlight=False,
        markup=False,
        emoji=False,
    )


if sys.platform != "win32":

    @asynccontextmanager
    async def _keys(typed: "Callable[[bytes], None]") -> AsyncIterator[None]:
        """Hand on what is typed; the end of the input leaves as Ctrl-D does."""
        loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
        loop.add_reader(keyboard, lambda: typed(_read(keyboard) or b"q"))
        try:
            yield
        finally:
            loop.remove_reader(keyboard)

    def _read(keyboard: int) -> bytes:
        try:
            return os.read(keyboard, TYPED_BYTES)
        except OSError:  # the terminal has gone
            return b""

    @contextmanager
    def _resizes(draw_again: Callable[[], None]) -> Iterator[None]:
        with _on_signal(signal.SIGWINCH, draw_again):
            yield

    @contextmanager
    def _stops(stop: Callable[[], None]) -> Iterator[None]:
        with _on_signal(signal.SIGTSTP, stop):
            yield

    @contextmanager
    def _on_signal(number: signal.Signals, call: Callable[[], None]) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(number, call)
        try:
            yield
        finally:
            loop.remove_signal_handler(number)

else:
    import msvcrt

    KEYBOARD_EVERY_S: Final = 0.05

    @asynccontextmanager
    async def _keys(typed: "Callable[[bytes], None]") -> AsyncIterator[None]:
        """Hand on what is typed: a Windows console has no descriptor that can be waited for."""
        asking = asyncio.create_task(_ask(typed))
        try:
            yield
        finally:
            asking.cancel()

    async def _ask(typed: "Callable[[bytes], None]") -> None:
        while True:
            while msvcrt.kbhit():
                typed(msvcrt.getch())
            await asyncio.sleep(KEYBOARD_EVERY_S)

    @contextmanager
    def _resizes(draw_again: Callable[[], None]) -> Iterator[None]:
        yield  # the next look is drawn in the new size

    @contextmanager
    def _stops(stop: Callable[[], None]) -> Iterator[None]:
        yield
