"""Server-sent events written straight to the connection: one write an event, no queue, no task to wake.

Nothing is awaited while text arrives: a reader that stands still delays nobody, and what piles up for it is bounded by
the length of its answer. The headers go out through the HTTP library, which writes the end as well; between the two this
module frames the chunks itself (RFC 9112, 7.1).
"""

import asyncio
from typing import Final

from aiohttp import HttpVersion11, web

KEEP_ALIVE_S: float = 5.0
KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event(data: bytes) -> bytes:
    """One event; `data` is JSON on a single line."""
    return b"data: %b\n\n" % data


class EventStream:
    """The body of one response. `write` may be called from any callback of the event loop between `open` and `close`."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=HEADERS)
        self._is_chunked = request.version >= HttpVersion11
        self._is_quiet = True
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, first: bytes) -> None:
        """Send the headers and, in the same write, the first bytes, so that no client waits for its headers."""
        if self._is_chunked:
            self._response.enable_chunked_encoding()
        await self._response.prepare(self._request)
        await self._response.write(KEEP_ALIVE + first)
        transport = self._request.transport
        assert transport is None or isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._arm()

    def write(self, body: bytes) -> None:
        """Send whole events. Nothing happens once the client has left."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._is_quiet = False
        transport.write(b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else body)

    async def close(self) -> web.StreamResponse:
        """End the body and wait until the client has taken it."""
        self.abandon()
        await self._response.write_eof()
        return self._response

    def abandon(self) -> None:
        """Stop writing, for a client that has left."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._tick)

    def _tick(self) -> None:
        """Send a comment where nothing was sent for a while, unless the client does not read what lies there already."""
        transport = self._transport
        if self._is_quiet and transport is not None and transport.get_write_buffer_size() == 0:
            self.write(KEEP_ALIVE)
        self._is_quiet = True
        self._arm()
