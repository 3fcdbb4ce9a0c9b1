"""Writes to a stream on a thread of its own: a terminal or pipe that stands still (Ctrl-S) stops neither the server nor the engine."""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TextIO

from runner.errors import ConfigError

CLOSE: Final = None
CLOSE_WITHIN_S: Final = 0.5


class OutputPump:
    """An unbounded, ordered way to one stream. `write` belongs to the event loop's thread; the stream to the pump's thread."""

    def __init__(self, stream: TextIO | None) -> None:
        """`stream` None (no such descriptor) swallows everything."""
        self.on_broken: Callable[[], None] = lambda: None
        self.error: OSError | ValueError | None = None
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._pieces: queue.SimpleQueue[str | asyncio.Future[None] | None] = queue.SimpleQueue()
        self._has_ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Queue text. Never blocks, never raises."""
        self._pieces.put(text)

    async def flush(self) -> None:
        """Wait until all that was queued is written. Raises BrokenPipeError where nobody reads, ConfigError where it cannot be written."""
        written: asyncio.Future[None] = self._loop.create_future()
        self._pieces.put(written)
        await asyncio.shield(written)
        if isinstance(self.error, BrokenPipeError):
            raise self.error
        if self.error is not None:
            raise ConfigError(f"The output cannot be written: {getattr(self.error, 'strerror', None) or self.error}") from self.error

    async def close(self) -> None:
        """Let the thread end after what is queued; a stream that stands still is not waited for long."""
        self._pieces.put(CLOSE)
        await asyncio.wait([self._has_ended], timeout=CLOSE_WITHIN_S)

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not CLOSE:
            if isinstance(piece, str):
                self._put(piece)
            else:
                self._tell(piece.set_result, None)
        self._tell(self._has_ended.set_result, None)

    def _put(self, text: str) -> None:
        if self._stream is None or self.error is not None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError) as error:
            self.error = error
            self._tell(self.on_broken)

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop has ended before a stream that stood still
            self._loop.call_soon_threadsafe(callback, *args)
