"""SIGINT, SIGTERM and SIGHUP: the first asks for a clean end, the second for a quick one, the third gets it."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

DEBOUNCE_S: Final = 0.3  # a terminal's Ctrl-C reaches a one-file program twice: from the terminal, and passed on by the bootloader

EXIT_CODES: Final = {signal.SIGINT: 130, signal.SIGTERM: 0}
SIGHUP: Final = None if sys.platform == "win32" else signal.SIGHUP


class StopSignals:
    """What the process was asked by signal. Lives on the event loop's thread; `now` is the loop's clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.asked = asyncio.Event()
        self.is_urgent = asyncio.Event()
        self.number: signal.Signals | None = None
        self.take_interrupt: Callable[[], bool] = lambda: False
        self.at_once: Callable[[], None] = lambda: None
        self._now = now
        self._last: tuple[signal.Signals, float] | None = None

    @property
    def exit_code(self) -> int:
        """What the process ends with when a signal ended it."""
        assert self.number is not None
        return EXIT_CODES.get(self.number, 128 + self.number)

    def install(self) -> None:
        """Listen from now on. A SIGHUP that the caller had switched off (`nohup`) stays off."""
        loop = asyncio.get_running_loop()
        for number in _wanted():
            if sys.platform == "win32":
                signal.signal(number, lambda number, _: loop.call_soon_threadsafe(self.receive, signal.Signals(number)) and None)
            else:
                loop.add_signal_handler(number, self.receive, number)

    def receive(self, number: signal.Signals) -> None:
        """One signal came."""
        if self._is_echo(number):
            return
        if number == signal.SIGINT and not self.asked.is_set() and self.take_interrupt():
            return
        if self.is_urgent.is_set():
            self.at_once()
            os._exit(EXIT_CODES.get(number, 128 + number))
        if self.asked.is_set():
            self.is_urgent.set()
        else:
            self.number = number
            self.asked.set()

    def _is_echo(self, number: signal.Signals) -> bool:
        now = self._now()
        if self._last is not None and self._last[0] == number and now - self._last[1] < DEBOUNCE_S:
            return True
        self._last = (number, now)
        return False


def _wanted() -> list[signal.Signals]:
    wanted = [signal.SIGINT, signal.SIGTERM]
    if sys.platform == "win32":
        wanted.append(signal.SIGBREAK)
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    return wanted
