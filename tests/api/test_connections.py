"""Connections are bounded: idle ones take nothing from those that have something to say."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from runner.api import connections
from runner.api.connections import Connections, room_for_connections

HEALTH = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Bounded:
    """A tiny aiohttp server behind `Connections`."""

    def __init__(self, limit: int, within_s: float, read_within_s: float = 60.0) -> None:
        self._limit, self._within_s, self._read_within_s = limit, within_s, read_within_s
        self.n_slow = 0

    async def __aenter__(self) -> "Bounded":
        async def handler(request: web.BaseRequest) -> web.Response:
            self.connections.began(request)
            await asyncio.sleep(float(request.query.get("sleep", 0)))
            return web.Response(text="x" * int(request.query.get("size", 0)) + "ok")

        self.server = web.Server(handler)
        self.connections = Connections(
            self.server, self._limit, first_request_within_s=self._within_s, read_within_s=self._read_within_s, on_slow=self._count
        )
        self.sweeper = asyncio.create_task(self.connections.sweep())
        self.listener = await asyncio.get_running_loop().create_server(self.connections, "127.0.0.1", 0)
        self.port = self.listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sweeper.cancel()
        self.listener.close()
        await self.server.shutdown(0.1)

    def _count(self) -> None:
        self.n_slow += 1

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """One client."""
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
async def bounded() -> AsyncIterator[Bounded]:
    """At most 5 connections, half a second for the first request."""
    async with Bounded(5, 0.5) as server:
        yield server


async def test_connections_over_the_limit_are_told_so_and_the_others_go_on(bounded: Bounded) -> None:
    clients = [await bounded.connect() for _ in range(5)]
    clients[0][1].write(b"GET /?sleep=0.3 HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.sleep(0.05)
    reader, writer = await bounded.connect()
    answer = await asyncio.wait_for(reader.read(), 2)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"server_overloaded"' in answer
    assert b"\r\n\r\nok" in await asyncio.wait_for(clients[0][0].readuntil(b"ok"), 2)
    for _, each in (*clients, (reader, writer)):
        each.close()


async def test_room_comes_back_when_connections_close(bounded: Bounded) -> None:
    clients = [await bounded.connect() for _ in range(5)]
    await asyncio.sleep(0.05)
    for _, writer in clients:
        writer.close()
    await asyncio.sleep(1.2)
    reader, writer = await bounded.connect()
    writer.write(HEALTH)
    assert await asyncio.wait_for(reader.readuntil(b"ok"), 2)
    writer.close()


@pytest.mark.parametrize("said", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "a byte", "no end of headers"])
async def test_a_connection_that_never_becomes_a_request_is_closed(bounded: Bounded, said: bytes) -> None:
    reader, writer = await bounded.connect()
    writer.write(said)
    with contextlib.suppress(ConnectionResetError):  # the other way of being closed
        assert await asyncio.wait_for(reader.read(), 3) == b""
    writer.close()


async def test_a_connection_that_has_sent_a_request_may_take_its_time(bounded: Bounded) -> None:
    reader, writer = await bounded.connect()
    writer.write(b"GET /?sleep=1.5 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"ok"), 5)
    writer.close()


class Pipe(asyncio.Transport):
    """A connection with so much unread."""

    def __init__(self, n_unread: int) -> None:
        super().__init__()
        self.n_unread, self.is_aborted = n_unread, False

    def get_write_buffer_size(self) -> int:
        """As set."""
        return self.n_unread

    def abort(self) -> None:
        """Remembered."""
        self.is_aborted, self.n_unread = True, 0


class Connected(asyncio.Protocol):
    """A protocol that knows its transport, as the library's do."""

    def __init__(self, n_unread: int) -> None:
        self.transport = Pipe(n_unread)


async def test_only_who_takes_nothing_at_all_is_cut_off() -> None:
    made = [Connected(0), Connected(500), Connected(500), Connected(500)]
    waiting, pausing, slow, stuck = made
    connections = Connections(iter(made).__next__, 9, read_within_s=10.0)
    for _ in made:
        connections()
    for now in range(0, 13, 2):
        slow.transport.n_unread -= 1
        pausing.transport.n_unread = 0 if now == 6 else 500
        connections._cut_off_slow(float(now))
    assert [each.transport.is_aborted for each in (waiting, pausing, slow, stuck)] == [False, False, False, True]


async def test_a_whole_answer_that_nobody_takes_is_not_kept_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    async with Bounded(5, 5.0, read_within_s=0.2) as server:
        stuck, slow = await server.connect(), await server.connect()
        for _, writer in (stuck, slow):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET /?size=30000000 HTTP/1.1\r\nHost: x\r\n\r\n")
        slow[1].transport.resume_reading()  # type: ignore[attr-defined]
        n_read = 0
        while n_read < 30_000_002:  # a bit at a time, for longer than the limit in all
            n_read += len(await asyncio.wait_for(slow[0].read(1_000_000), 1))
            await asyncio.sleep(0.003)
        assert server.n_slow == 1
        assert caplog.text.count("takes nothing of its answer") == 1
        stuck[1].transport.resume_reading()  # type: ignore[attr-defined]
        with contextlib.suppress(ConnectionResetError):
            assert len(await asyncio.wait_for(stuck[0].read(), 2)) < 30_000_000
        for _, writer in (stuck, slow):
            writer.transport.abort()


def test_the_soft_limit_is_raised_and_some_descriptors_stay_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.append(new))
    assert room_for_connections() == 4096 - connections.RESERVED
    assert limits[-1] == (4096, 4096)
