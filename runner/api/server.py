"""The HTTP server of one engine: bound before the model loads, answering "loading" until it is ready, gone within 2 seconds.

sockets = bind(config)                    # ConfigError before anything costly happens
server = Server(config, client, sockets, version="0.1.0")
await server.start()                      # answers from here on
...
await server.drain(config.drain_timeout_s)
await server.close()
"""

import asyncio
import logging
import socket
from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.http import HttpProcessingError

from runner.api.app import ROUTES, Route, build_app
from runner.api.connections import Connections, room_for_connections
from runner.api.framing import Protocol, with_waiting
from runner.api.front import Front
from runner.api.guard import Guard
from runner.api.listen import bind, exposure_warning, is_loopback, urls
from runner.config import ServerConfig
from runner.errors import Draining
from runner.serving.client import EngineClient

__all__ = ["Server", "bind"]

SHUTDOWN_S: Final = 0.3  # the library waits twice: for handlers, then for cancelled handlers
KEEP_ALIVE_CONNECTION_S: Final = 75.0
BACKLOG: Final = 128


class Server:
    """Serves one engine's client on sockets that `bind` returned. Its methods belong to the event loop's thread."""

    def __init__(
        self,
        config: ServerConfig,
        client: EngineClient,
        sockets: list[socket.socket],
        *,
        version: str,
        routes: tuple[Route, ...] = ROUTES,
    ) -> None:
        """Takes over the sockets. Raises ConfigError for allowed hosts or origins that could never match."""
        self._sockets = sockets
        self._listeners: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None
        self._front = Front(config, client, version)
        guard = Guard(config, is_loopback=is_loopback(sockets))
        self.urls = urls(sockets)
        self.warning = exposure_warning(config, sockets)
        self._runner = web.AppRunner(
            build_app(self._front, guard, routes),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_S,
        )

    @property
    def is_draining(self) -> bool:
        """Whether new generations are refused."""
        return self._front.is_draining

    @property
    def n_live(self) -> int:
        """HTTP requests that the engine has not finished with."""
        return self._front.n_calls

    async def start(self) -> None:
        """Answer from now on. The sockets have been listening since `bind`, so nobody was refused before."""
        await self._runner.setup()
        library = self._runner.server
        assert library is not None
        library.request_factory = with_waiting(library.request_factory)
        protocol = partial(Protocol, library, self._front, log=_protocol_log(), keep_alive_s=KEEP_ALIVE_CONNECTION_S)
        connections = Connections(protocol, room_for_connections(), on_slow=self._front.metrics.slow_reader)
        self._front.on_request = connections.began
        self._sweeper = asyncio.create_task(connections.sweep())
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            self._listeners.append(await loop.create_server(connections, sock=sock, backlog=BACKLOG))

    async def drain(self, timeout_s: float) -> None:
        """Take no new generations, let running ones go on for `timeout_s`, then end the rest with an error."""
        self._front.is_draining = True
        if not await self._front.idle(timeout_s):
            self._front.fail_all(Draining("The server is going down"))

    async def close(self) -> None:
        """End what is left and give up the ports, within 2 seconds whatever the clients do."""
        await self.drain(0.0)
        for listener in self._listeners:
            listener.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._runner.cleanup()
        for sock in self._sockets:
            sock.close()


class _TerseFilter(logging.Filter):
    """Keeps what a client sent out of the log: of a broken request only the kind of its fault is written."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Reduce a client's fault to its name, at a level that a port scan does not fill the log with."""
        fault = record.exc_info[1] if record.exc_info else None
        if not isinstance(fault, HttpProcessingError | web.RequestPayloadError):
            return True
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {type(fault).__name__}", (), None
        record.levelno, record.levelname = logging.INFO, "INFO"
        return True


def _protocol_log() -> logging.Logger:
    log = logging.getLogger("slotfile.http")
    if not log.filters:
        log.addFilter(_TerseFilter())
    return log
