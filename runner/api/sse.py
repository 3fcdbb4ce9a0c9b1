"""Server-sent events written straight to the connection: one write an event, no queue, no task to wake.

Nothing is awaited while text arrives: a reader that stands still delays nobody. What piles up for it is bounded: a client that has left
too much unread, or takes nothing of what lies there for too long, is cut off. The headers go out through the HTTP library, which
writes the end as well; between the two this module frames the chunks itself (RFC 9112, 7.1).
"""

import asyncio
from collections.abc import Callable
from typing import Final

from aiohttp import HttpVersion11, web

KEEP_ALIVE_S: float = 5.0
# What may lie unread in our memory (the system's buffers come before it), and how long a client may take nothing of it.
MAX_UNREAD_BYTES: int = 256 * 1024
MAX_STANDSTILL_S: float = 30.0
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


def named_event(name: bytes, data: bytes) -> bytes:
    """One event of a type of its own."""
    return b"event: %b\ndata: %b\n\n" % (name, data)


class EventStream:
    """The body of one response. `write` and `offer` may be called from any callback of the event loop between `open` and `close`."""

    def __init__(self, request: web.Request, on_slow: Callable[[int], None] = lambda n_unread: None) -> None:
        """`on_slow` is told how much lies unread, once, when the client is cut off for it."""
        self._request = request
        self._on_slow = on_slow
        self._response = web.StreamResponse(headers=HEADERS)
        self._is_chunked = request.version >= HttpVersion11
        self._is_quiet = True
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._n_written = 0
        self._n_surely_taken = 0  # as of the last look: until it could be too much that lies there, there is none for each token
        self._longest_write = 0
        self._n_taken = 0
        self._still_since: float | None = None

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
        """Send whole events. Nothing happens once the client has left; one that has left too much unread is cut off."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._n_written - self._n_surely_taken > MAX_UNREAD_BYTES and self._has_left_too_much(transport):
            self._cut_off(transport)
            return
        self._is_quiet = False
        data = b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else body
        self._n_written += len(data)
        if len(data) > self._longest_write:
            self._longest_write = len(data)
        transport.write(data)

    def offer(self, body: bytes) -> None:
        """Send what can be left out: it is where the client does not read what lies there already."""
        if self._transport is not None and self._transport.get_write_buffer_size() == 0:
            self.write(body)

    async def close(self) -> web.StreamResponse:
        """End the body and wait until the client has taken it; `Connections` sees to it that this ends."""
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
        """Send a comment where nothing was sent for a while. See whether the client takes anything."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._stands_still(transport.get_write_buffer_size()):
            self._cut_off(transport)
            return
        if self._is_quiet:
            self.offer(KEEP_ALIVE)
        self._is_quiet = True
        self._arm()

    def _has_left_too_much(self, transport: asyncio.Transport) -> bool:
        """A single long text is nobody's fault: it may lie there besides the limit."""
        n_unread = transport.get_write_buffer_size()
        self._n_surely_taken = self._n_written - n_unread
        return n_unread > MAX_UNREAD_BYTES + self._longest_write

    def _stands_still(self, n_unread: int) -> bool:
        now, n_taken = asyncio.get_running_loop().time(), self._n_written - n_unread
        if n_unread == 0:
            self._still_since = None
        elif self._still_since is None or n_taken != self._n_taken:
            self._still_since = now
        self._n_taken = n_taken
        return self._still_since is not None and now - self._still_since >= MAX_STANDSTILL_S

    def _cut_off(self, transport: asyncio.Transport) -> None:
        n_unread = transport.get_write_buffer_size()
        self.abandon()
        transport.abort()
        self._on_slow(n_unread)
