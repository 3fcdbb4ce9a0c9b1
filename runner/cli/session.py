"""One run of the program around one engine, from its start to its end.

start the engine        its process imports and loads the model …
begin the work          … while this one imports what the work needs
until the work is done, a signal comes, the engine is given up, or the bootloader has gone
drain (SIGTERM only, and only while the bootloader lives), then end the work and the engine within two seconds
"""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol

from runner.cli.parent import parent_gone
from runner.cli.signals import StopSignals
from runner.config import EngineConfig
from runner.serving.child import EngineChild
from runner.serving.client import EngineClient
from runner.serving.spawn import EarlyEngine

TEARDOWN_S: Final = 1.7
EXIT_ORPHANED: Final = 1
IMPORTED_AFTER_S: Final = 1.0


class Work(Protocol):
    """What is done with the engine: serving, chatting, one answer."""

    async def run(self, engine: EngineClient, signals: StopSignals) -> int:
        """Do it; the exit code. Cancelled when something else ends the program."""

    async def drain(self) -> None:
        """Take nothing new and let what runs come to its end, as long as the person allowed."""

    async def close(self) -> None:
        """End what still runs with an error, and let go of every port, stream and thread, while the engine is being ended."""


class Deadline:
    """Ends the process when its own end takes too long: whatever hangs, nothing of it is left."""

    def __init__(self, before_exit: Callable[[], None]) -> None:
        self._before_exit = before_exit
        self._timer: threading.Timer | None = None

    def start(self, exit_code: int) -> None:
        """From now on `TEARDOWN_S` are left."""
        self._timer = threading.Timer(TEARDOWN_S, self._expire, (exit_code,))
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """The end came in time."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self, exit_code: int) -> None:
        self._before_exit()
        os._exit(exit_code)


class Session:
    """One engine, the work with it, and the four ways in which that ends."""

    def __init__(self, config: EngineConfig, work: Work, early: EarlyEngine | None = None) -> None:
        """`early` is an engine that was started before its configuration was known; the first start takes it."""
        self._config = config
        self._start_child = partial(EngineChild.start, early=early)
        self._work = work
        self._signals: StopSignals | None = None
        self._deadline = Deadline(self._before_exit)

    def run(self) -> int:
        """Returns the exit code; raises the RunnerError that ended it, and BrokenPipeError where nobody reads the answers."""
        try:
            with asyncio.Runner() as runner:
                return runner.run(self._run())
        finally:
            self._deadline.cancel()

    async def _run(self) -> int:
        self._signals = signals = StopSignals(asyncio.get_running_loop().time)
        signals.install()
        engine = EngineClient(self._config, start_child=self._start_child)
        await engine.start()
        working = asyncio.ensure_future(self._work.run(engine, signals))
        asyncio.get_running_loop().call_later(IMPORTED_AFTER_S, _collect_again)
        exit_code = 1
        try:
            exit_code = await self._first_end(working, engine, signals)
            if signals.number == signal.SIGTERM:
                await _first_of(self._work.drain(), signals.is_urgent.wait(), parent_gone())
        finally:
            self._deadline.start(exit_code)
            await self._end(working, engine)
        return exit_code

    async def _first_end(self, working: asyncio.Future[int], engine: EngineClient, signals: StopSignals) -> int:
        given_up = asyncio.ensure_future(engine.wait_failed())
        await _first_of(working, given_up, signals.asked.wait(), parent_gone())
        given_up.cancel()
        if signals.asked.is_set():
            return signals.exit_code
        if working.done():
            return working.result()
        if given_up.done():
            raise given_up.result()
        return EXIT_ORPHANED

    async def _end(self, working: asyncio.Future[int], engine: EngineClient) -> None:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await asyncio.gather(self._work.close(), engine.close())

    def _before_exit(self) -> None:
        if self._signals is not None:
            self._signals.at_once()


def _collect_again() -> None:
    """What was imported stays for ever: the collector need not walk over it."""
    gc.freeze()
    gc.enable()


async def _first_of(*awaitables: Awaitable[object]) -> None:
    """Wait for the first; the others are cancelled, but for futures that somebody else owns."""
    futures = {asyncio.ensure_future(awaitable): awaitable for awaitable in awaitables}
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    ours = [future for future, awaitable in futures.items() if future is not awaitable]
    for future in ours:
        future.cancel()
    await asyncio.gather(*ours, return_exceptions=True)
