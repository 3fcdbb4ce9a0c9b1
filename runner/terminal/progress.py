"""How far the model is loaded, on one line that goes away again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, TextIO

PATIENCE_S: Final = 0.4  # a load that is shorter shows nothing
FRAME_S: Final = 0.1
ERASE_LINE: Final = "\r\x1b[K"


@asynccontextmanager
async def progress_line(stream: TextIO | None, fraction: Callable[[], float]) -> AsyncIterator[None]:
    """Show `fraction` on `stream` while the block runs; `stream` None shows nothing."""
    if stream is None:
        yield
        return
    drawing = asyncio.ensure_future(_draw(stream, fraction))
    try:
        yield
    finally:
        drawing.cancel()
        with suppress(asyncio.CancelledError):
            await drawing


async def _draw(stream: TextIO, fraction: Callable[[], float]) -> None:
    await asyncio.sleep(PATIENCE_S)
    try:
        while True:
            stream.write(f"\rLoading the model: {fraction():.0%} ")
            stream.flush()
            await asyncio.sleep(FRAME_S)
    finally:
        stream.write(ERASE_LINE)
        stream.flush()
