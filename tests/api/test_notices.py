"""The waiting client knows: headers and comments for everybody, and for those who ask its place, its wait and its prompt's progress."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from runner.api import notices
from runner.api.notices import NOTICES_HEADER, wants_notices
from runner.api.server import Server
from runner.errors import InvalidRequest
from runner.serving.protocol import Counters, SlotState, Snapshot
from tests.api.test_life import gate, until
from tests.api.wire import CHAT, COMPLETIONS, HELLO, Wire
from tests.fakes import FakeEngineClient, Reply

ASKING = {NOTICES_HEADER: "1"}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only snapshots tell, unless a test says otherwise."""
    monkeypatch.setattr(notices, "QUEUE_EVERY_S", 60.0)
    monkeypatch.setattr(notices, "PREFILL_EVERY_S", 0.0)


class Listening:
    """A stream and the blocks that it has sent so far."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.request_id = ""

    async def block(self) -> str:
        """The next event or comment."""
        text = (await asyncio.wait_for(self._reader.readuntil(b"\n\n"), 2)).decode()
        return re.sub(r"^(\r\n)?[0-9a-f]+\r\n", "", text).removesuffix("\n\n")  # without the framing of chunks

    async def event(self) -> tuple[str, Any]:
        """The next event that has a name, which must be the next block."""
        name, _, data = (await self.block()).partition("\n")
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@asynccontextmanager
async def listening(wire: Wire, engine: FakeEngineClient, body: dict[str, Any] | None = None, **headers: str) -> AsyncIterator[Listening]:
    """A stream whose headers are there."""
    reader, writer = await wire.open()
    named = {**ASKING, **{name.replace("_", "-"): value for name, value in headers.items()}}
    message = wire.message({"prompt": "x", "stream": True} | (body or {}), COMPLETIONS)
    writer.write(message.replace(b"\r\n", b"\r\n" + "".join(f"{name}: {value}\r\n" for name, value in named.items()).encode(), 1))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)
    assert head.startswith(b"HTTP/1.1 200")
    stream = Listening(reader)
    assert await stream.block() == ": keep-alive"
    stream.request_id = engine.submits[-1].request_id
    yield stream
    writer.transport.abort()


def waiting(*queue: str, n_waiting: int | None = None) -> Snapshot:
    """An engine whose slots are others'."""
    return Snapshot([], len(queue) if n_waiting is None else n_waiting, Counters(), 0.1, queue=list(queue))


def holding(request_id: str, state: str = "prefill", n_cells: int = 0, n_cached: int = 0, n_decoded: int = 0) -> Snapshot:
    """An engine in which it has slot 1, with a prompt of 100 tokens."""
    return Snapshot([SlotState(1, state, request_id, n_cells, 100, n_cached, n_decoded)], 0, Counters(), 0.1, queue=[])


async def test_stream_that_waits_for_a_slot_has_its_headers_and_comments(
    wire: Wire, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.api.sse.KEEP_ALIVE_S", 0.02)
    engine.enqueue(Reply(place_gate=gate()))
    reader, writer = await wire.start(HELLO | {"stream": True})
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 1)).startswith(b"HTTP/1.1 200")
    for _ in range(4):
        await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 1)
    writer.transport.abort()


async def test_place_is_told_when_it_changes_and_then_the_prompts_progress_and_then_nothing(wire: Wire, engine: FakeEngineClient) -> None:
    placed, text, end = gate(), gate(), gate()
    engine.enqueue(Reply(place_gate=placed, text_gate=text, end_gate=end))
    async with listening(wire, engine) as stream:
        own = stream.request_id
        await asyncio.sleep(0.01)
        for snapshot in (waiting("a", "b", own), waiting("a", "b", own, "c"), waiting("b", own, "c"), waiting(own)):
            engine.tell(snapshot)
        assert [await stream.event() for _ in range(3)] == [
            ("queue", {"place": 3, "n_waiting": 3, "estimated_wait_s": None}),
            ("queue", {"place": 2, "n_waiting": 3, "estimated_wait_s": None}),
            ("queue", {"place": 1, "n_waiting": 1, "estimated_wait_s": None}),
        ]
        placed.set()
        await asyncio.sleep(0.01)
        for snapshot in (
            holding(own, n_cells=20, n_cached=20),
            holding(own, n_cells=60, n_cached=20),
            holding(own, n_cells=60, n_cached=20),
        ):
            engine.tell(snapshot)
        engine.tell(holding(own, n_cells=100, n_cached=20))
        assert [await stream.event() for _ in range(3)] == [
            ("prefill", {"n_prompt": 100, "n_cached": 20, "n_computed": 0}),
            ("prefill", {"n_prompt": 100, "n_cached": 20, "n_computed": 40}),
            ("prefill", {"n_prompt": 100, "n_cached": 20, "n_computed": 80}),
        ]
        text.set()
        assert json.loads((await stream.block()).removeprefix("data: "))["choices"][0]["text"] == "Hello"
        engine.tell(holding(own, n_cells=30))  # computed again, say
        engine.tell(holding(own, "decode", n_cells=102, n_decoded=2))
        end.set()
        rest = [await stream.block() for _ in range(4)]
        assert all(block.startswith("data: ") for block in rest)
        assert rest[-1] == "data: [DONE]"


async def test_parked_request_is_told_its_place_again(wire: Wire, engine: FakeEngineClient) -> None:
    end = gate()
    engine.enqueue(Reply(texts=["Hello"], end_gate=end))
    async with listening(wire, engine) as stream:
        own = stream.request_id
        assert "Hello" in await stream.block()
        engine.tell(holding(own, "decode", n_cells=101, n_decoded=1))
        engine.tell(waiting("a", own))
        assert await stream.event() == ("queue", {"place": 2, "n_waiting": 2, "estimated_wait_s": None})
        engine.tell(holding(own, "prefill", n_cells=50))  # its cells had been dropped: text is out, so of this nothing is said
        engine.tell(waiting("a", own))
        assert await stream.event() == ("queue", {"place": 2, "n_waiting": 2, "estimated_wait_s": None})
        end.set()
        assert [(await stream.block())[:6] for _ in range(2)] == ["data: "] * 2


async def test_place_that_stays_is_told_again_without_any_snapshot(
    wire: Wire, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert notices.LOOK_EVERY_S + 1.5 <= 2.0
    monkeypatch.setattr(notices, "QUEUE_EVERY_S", 0.03)
    monkeypatch.setattr(notices, "LOOK_EVERY_S", 0.01)
    engine.enqueue(Reply(place_gate=gate()))
    async with listening(wire, engine) as stream:
        engine.queue = ["a", stream.request_id]
        assert [await stream.event() for _ in range(3)] == [("queue", {"place": 2, "n_waiting": 2, "estimated_wait_s": None})] * 3


async def test_place_that_is_not_known_is_null_and_is_told_in_its_time_only(
    wire: Wire, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.enqueue(Reply(place_gate=gate()))
    async with listening(wire, engine) as stream:
        await asyncio.sleep(0.01)
        engine.tell(waiting("a", "b", n_waiting=3))
        engine.tell(waiting("a", stream.request_id))
        engine.tell(waiting(n_waiting=5000))
        monkeypatch.setattr(notices, "QUEUE_EVERY_S", 0.0)
        engine.tell(waiting(n_waiting=5001))
        assert await stream.event() == ("queue", {"place": 2, "n_waiting": 2, "estimated_wait_s": None})
        assert await stream.event() == ("queue", {"place": None, "n_waiting": 5001, "estimated_wait_s": None})


async def test_wait_is_the_place_by_the_rate_of_ends(wire: Wire, engine: FakeEngineClient, server: Server) -> None:
    clock = [1000.0]
    server._front.bounds._clock = lambda: clock[0]
    first = gate()
    engine.enqueue(*(Reply(end_gate=first) for _ in range(3)), Reply(place_gate=gate()))
    running = [asyncio.create_task(wire.chat()) for _ in range(3)]
    await until(lambda: engine.n_live == 3)
    await asyncio.sleep(0.01)
    async with listening(wire, engine) as stream:
        await asyncio.sleep(0.01)
        clock[0] += 6.0  # 3 ends in 6 s
        first.set()
        await asyncio.gather(*running)
        engine.tell(waiting("a", "b", stream.request_id))
        assert await stream.event() == ("queue", {"place": 3, "n_waiting": 3, "estimated_wait_s": 6.0})


async def test_request_of_several_answers_waits_until_one_of_them_has_a_slot(wire: Wire, engine: FakeEngineClient) -> None:
    placed = gate()
    engine.enqueue(Reply(place_gate=placed, text_gate=gate()), Reply(place_gate=gate()))
    async with listening(wire, engine, {"n": 2}) as stream:
        first, second = (submit.request_id for submit in engine.submits)
        engine.tell(waiting("a", second, first))
        assert await stream.event() == ("queue", {"place": 2, "n_waiting": 3, "estimated_wait_s": None})
        placed.set()
        await asyncio.sleep(0.01)
        engine.tell(waiting(second, first))  # it was parked: both wait again
        engine.tell(Snapshot([SlotState(0, "prefill", first, 10, 40, 0, 0)], 1, Counters(), 0.1, queue=[second]))
        assert await stream.event() == ("queue", {"place": 1, "n_waiting": 2, "estimated_wait_s": None})
        assert await stream.event() == ("prefill", {"n_prompt": 40, "n_cached": 0, "n_computed": 10})


async def test_progress_is_told_four_times_a_second_at_most(wire: Wire, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "PREFILL_EVERY_S", 0.05)
    text = gate()
    engine.enqueue(Reply(texts=["Hello"], text_gate=text))
    async with listening(wire, engine) as stream:
        for n_cells in range(10, 90, 10):
            engine.tell(holding(stream.request_id, n_cells=n_cells))
        await asyncio.sleep(0.06)
        engine.tell(holding(stream.request_id, n_cells=99))
        assert [(await stream.event())[1]["n_computed"] for _ in range(2)] == [10, 99]
        text.set()
        assert "Hello" in await stream.block()


async def test_those_who_did_not_ask_get_data_alone_and_nobody_who_left_is_told(
    wire: Wire, engine: FakeEngineClient, server: Server
) -> None:
    for headers in ({}, {NOTICES_HEADER: "0"}, {NOTICES_HEADER: "false"}):
        engine.enqueue(Reply(place_gate=(placed := gate())))
        task = asyncio.create_task(
            wire.send("POST", CHAT, headers={"Content-Type": "application/json"} | headers, data=json.dumps(HELLO | {"stream": True}))
        )
        await until(lambda: engine.n_live == 1)
        await asyncio.sleep(0.02)
        assert not server._front.notices._listeners
        engine.tell(waiting(engine.submits[-1].request_id))
        placed.set()
        reply = await task
        assert b"event:" not in reply.body
        assert len(reply.chunks) == 5
    engine.enqueue(Reply(place_gate=gate()))
    async with listening(wire, engine):
        await until(lambda: len(server._front.notices._listeners) == 1)
    await until(lambda: engine.n_live == 0)
    assert not server._front.notices._listeners
    engine.tell(waiting("a"))


async def test_official_client_that_did_not_ask_reads_a_stream_that_waited(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(place_gate=(placed := gate())))
    async with openai.AsyncOpenAI(base_url=f"{wire.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}], stream=True)
        engine.tell(waiting("a", engine.submits[-1].request_id))
        placed.set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello, world"


@pytest.mark.parametrize("header", ["", "yes", "2", "on", "1, 1", "ja\N{LATIN SMALL LETTER E WITH ACUTE}"])
async def test_header_that_is_neither_yes_nor_no_is_a_400_that_names_it(wire: Wire, engine: FakeEngineClient, header: str) -> None:
    for stream in (False, True):
        reply = await wire.post(COMPLETIONS, {"prompt": "x", "stream": stream}, X_Queue_Events=header)
        assert (reply.status, reply.error["param"]) == (400, NOTICES_HEADER)
        assert "1, true, 0, false" in reply.error["message"]
    assert not engine.submits


def test_header_is_off_unless_it_says_yes() -> None:
    assert [wants_notices(header) for header in (None, "0", "false", "1", "True")] == [False, False, False, True, True]
    with pytest.raises(InvalidRequest, match="X-Queue-Events is 'x'; it takes"):
        wants_notices("x")
