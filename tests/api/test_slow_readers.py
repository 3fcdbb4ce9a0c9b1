"""A client that does not read is cut off: counted, logged once, its slot free, and the others do not notice."""

import asyncio
import contextlib
import time

import pytest
from aiohttp import HttpVersion10
from aiohttp.test_utils import make_mocked_request

from runner.api import sse
from runner.api.server import Server
from tests.api.test_life import gate, until
from tests.api.test_status import metrics
from tests.api.wire import HELLO, Wire
from tests.fakes import FakeEngineClient, Reply

MUCH = ["x" * 10_000] * 2000  # 20 MB: more than the system's buffers of a connection take


async def n_slow(wire: Wire) -> float:
    """Clients that were cut off."""
    return (await metrics(wire))["slotfile_slow_readers_total"]


async def test_reader_that_leaves_too_much_unread_is_cut_off_and_the_others_go_on(
    wire: Wire, engine: FakeEngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    end = gate()
    engine.enqueue(Reply(end_gate=end), Reply(texts=MUCH, end_gate=gate()))
    other = asyncio.create_task(wire.chat(stream=True))
    await until(lambda: engine.n_live == 1)
    assert await n_slow(wire) == 0
    reader, writer = await wire.start(HELLO | {"stream": True})
    await until(lambda: len(engine.cancelled) == 1, timeout_s=5)
    assert engine.n_live == 1
    end.set()
    assert (await other).events[-1] == "[DONE]"
    with contextlib.suppress(ConnectionResetError):
        while await asyncio.wait_for(reader.read(1 << 20), 2):
            pass
    assert await n_slow(wire) == 1
    (line,) = [record.getMessage() for record in caplog.records if "does not read" in record.getMessage()]
    n_unread = int(line.split(" bytes")[0].rpartition(" ")[2])
    assert sse.MAX_UNREAD_BYTES < n_unread < sse.MAX_UNREAD_BYTES + 30_000
    (line,) = [record.getMessage() for record in caplog.records if record.name == "slotfile.access" and "499" in record.getMessage()]
    assert "reason=request_cancelled" in line
    assert (await metrics(wire))['slotfile_request_failure_total{code="request_cancelled"}'] == 1
    writer.transport.abort()


async def test_reader_that_stands_still_is_cut_off_in_time(wire: Wire, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)
    monkeypatch.setattr(sse, "MAX_STANDSTILL_S", 0.1)
    monkeypatch.setattr(sse, "MAX_UNREAD_BYTES", 1 << 30)
    engine.enqueue(Reply(texts=["x" * 10_000_000], end_gate=gate()), Reply(texts=[], end_gate=gate()))
    _, stuck = await wire.start(HELLO | {"stream": True})
    _, silent = await wire.start(HELLO | {"stream": True})  # of which nothing is pending: it may stand still for ever
    await until(lambda: engine.n_live == 2)
    started = time.monotonic()
    await until(lambda: len(engine.cancelled) == 1)
    assert time.monotonic() - started >= 0.08
    await asyncio.sleep(0.15)
    assert engine.n_live == 1
    assert await n_slow(wire) == 1
    stuck.transport.abort()
    silent.transport.abort()


async def test_reader_that_is_slow_but_reads_gets_its_whole_answer(
    wire: Wire, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(sse, "MAX_STANDSTILL_S", 0.25)
    end = gate()
    engine.enqueue(Reply(texts=["x" * 20_000_000], end_gate=end))  # one long text may lie there as a whole
    reader, writer = await wire.start(HELLO | {"stream": True})
    n_read = 0
    while n_read < 20_000_000:
        n_read += len(await asyncio.wait_for(reader.read(400_000), 1))
        await asyncio.sleep(0.003)
    end.set()
    assert b"data: [DONE]" in await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 2)
    assert await n_slow(wire) == 0
    writer.transport.abort()


class Pipe(asyncio.Transport):
    """A connection whose client takes what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.n_unread, self.is_aborted = 0, False

    def get_write_buffer_size(self) -> int:
        """What was not taken."""
        return self.n_unread

    def is_closing(self) -> bool:
        """After an abort."""
        return self.is_aborted

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Nobody takes it at once."""
        self.n_unread += len(data)

    def abort(self) -> None:
        """Remembered."""
        self.is_aborted = True


def piped(cut_off: list[int]) -> tuple[sse.EventStream, Pipe]:
    """A stream of which nothing is sent yet."""
    stream, pipe = sse.EventStream(make_mocked_request("POST", "/", version=HttpVersion10), cut_off.append), Pipe()
    stream._transport = pipe
    return stream, pipe


def test_single_long_text_may_lie_there_besides_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_UNREAD_BYTES", 500)
    cut_off: list[int] = []
    stream, pipe = piped(cut_off)
    stream.write(b"x" * 1000)
    for _ in range(6):
        stream.write(b"x" * 100)
        assert not pipe.is_aborted
    stream.write(b"x" * 100)
    stream.write(b"x" * 100)
    assert (pipe.is_aborted, pipe.n_unread, cut_off) == (True, 1600, [1600])


async def test_only_who_takes_nothing_at_all_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_STANDSTILL_S", 30.0)
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 1000.0)
    cut_off: list[int] = []
    (slow, slow_pipe), (stuck, stuck_pipe), (pausing, pausing_pipe) = (piped(cut_off) for _ in range(3))
    loop, now = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    for seconds in range(0, 41, 5):
        monkeypatch.setattr(loop, "time", lambda at=now + seconds: at)
        for stream in (slow, stuck, pausing):
            if seconds < 40:
                stream.write(b"x" * 100)  # the engine goes on
            stream._tick()
        slow_pipe.n_unread -= 1
        pausing_pipe.n_unread = 0 if seconds == 20 else pausing_pipe.n_unread
        assert stuck_pipe.is_aborted == (seconds >= 30)
    assert (slow_pipe.is_aborted, pausing_pipe.is_aborted, cut_off) == (False, False, [700])
    slow.abandon()
    pausing.abandon()


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_nobody_reads_holds_up_neither_drain_nor_close(
    server: Server, wire: Wire, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(sse, "MAX_UNREAD_BYTES", 1 << 30)
    engine.enqueue(Reply(texts=["x" * 20_000_000]))
    _, writer = await wire.start(HELLO | {"stream": stream})
    await until(lambda: engine.submits and engine.n_live == 0, timeout_s=5)
    await asyncio.sleep(0.05)
    started = time.monotonic()
    await server.drain(5.0)
    assert time.monotonic() - started < 0.2
    await server.close()
    assert time.monotonic() - started < 2.0
    writer.transport.abort()
