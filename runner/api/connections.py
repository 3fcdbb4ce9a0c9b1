"""Bounds on connections: how many there are, how long one may take to become a request, and how long to take its answer.

Without them a client that opens connections and says nothing takes every file descriptor, and with those everybody's streams.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from aiohttp import web

from runner.api.errors import error_json
from runner.errors import Overloaded

# Descriptors that are not connections: pipes of the engine, log, libraries.
RESERVED: Final = 100
MOST: Final = 10_000
FIRST_REQUEST_WITHIN_S: Final = 20.0
# How long a client may take nothing of an answer that lies there. A stream has a shorter limit of its own, and knows whose it is (sse.py).
READ_WITHIN_S: Final = 60.0
SWEEP_EVERY_S: Final = 2.0
_LOG: Final = logging.getLogger("slotfile.api")


def room_for_connections() -> int:
    """How many connections this process can hold: its soft limit on descriptors is raised to the hard one first."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MOST
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        wanted = MOST + RESERVED if hard == resource.RLIM_INFINITY else min(hard, MOST + RESERVED)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted) if soft != resource.RLIM_INFINITY else soft, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(8, min(MOST, soft - RESERVED))


class Connections:
    """A protocol factory for `create_server`: aiohttp's own, within bounds."""

    def __init__(
        self,
        server: Callable[[], asyncio.BaseProtocol],
        limit: int,
        *,
        first_request_within_s: float = FIRST_REQUEST_WITHIN_S,
        read_within_s: float = READ_WITHIN_S,
        on_slow: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_slow` hears of each client that was cut off because it did not read."""
        self._server, self._limit = server, limit
        self._first_request_within_s, self._read_within_s, self._on_slow = first_request_within_s, read_within_s, on_slow
        # How much of its answer a client has left, and since when it is that much.
        self._unread: dict[asyncio.BaseProtocol, tuple[int, float]] = {}
        self._open: set[asyncio.BaseProtocol] = set()
        self._silent: dict[asyncio.BaseProtocol, float] = {}

    def __call__(self) -> asyncio.BaseProtocol:
        """A connection came."""
        if len(self._open) >= self._limit:
            self._forget_closed()
        if len(self._open) >= self._limit:
            return _Full(self._limit)
        protocol = self._server()
        self._open.add(protocol)
        self._silent[protocol] = asyncio.get_running_loop().time()
        return protocol

    def began(self, request: web.BaseRequest) -> None:
        """The connection has sent a request with all its headers."""
        self._silent.pop(request.protocol, None)

    async def sweep(self) -> None:
        """For ever: close connections that have not become a request in time, or do not take their answer."""
        while True:
            await asyncio.sleep(min(SWEEP_EVERY_S, self._first_request_within_s, self._read_within_s))
            self._forget_closed()
            now = asyncio.get_running_loop().time()
            for protocol, made_at in list(self._silent.items()):
                if now - made_at > self._first_request_within_s:
                    del self._silent[protocol]
                    _close(protocol)
            self._cut_off_slow(now)

    def _cut_off_slow(self, now: float) -> None:
        before, self._unread = self._unread, {}
        for protocol in self._open:
            transport = _transport(protocol)
            n_unread = transport.get_write_buffer_size() if isinstance(transport, asyncio.Transport) else 0
            n_before, since = before.get(protocol, (0, now))
            if not n_unread:
                continue
            if n_unread != n_before:
                since = now
            if now - since > self._read_within_s:
                _LOG.warning("a client takes nothing of its answer: %d bytes lie there, and it is cut off", n_unread)
                _close(protocol)
                self._on_slow()
            else:
                self._unread[protocol] = (n_unread, since)

    def _forget_closed(self) -> None:
        # A protocol whose transport is gone is closed; one that was made just now has none yet.
        now = asyncio.get_running_loop().time()
        for protocol in [each for each in self._open if _transport(each) is None]:
            if now - self._silent.get(protocol, 0.0) > 1.0:
                self._open.discard(protocol)
                self._silent.pop(protocol, None)


class _Full(asyncio.Protocol):
    """Says that there is no room, and closes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer before anything is read."""
        assert isinstance(transport, asyncio.Transport)
        body = error_json(Overloaded(f"The server holds {self._limit:,} connections and takes no more"))
        head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
        transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        transport.close()


def _transport(protocol: asyncio.BaseProtocol) -> asyncio.BaseTransport | None:
    transport: asyncio.BaseTransport | None = getattr(protocol, "transport", None)
    return transport


def _close(protocol: asyncio.BaseProtocol) -> None:
    transport = _transport(protocol)
    if isinstance(transport, asyncio.Transport):
        transport.abort()
