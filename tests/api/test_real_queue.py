"""One slot, a short queue and SmolLM2: who waits is served in turn, leaves without a trace, and touches nobody."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from msgspec.structs import replace

from runner.api.server import Server, bind
from runner.config import ApiKey, ServerConfig
from runner.serving.client import EngineClient
from tests.api.test_life import until
from tests.api.test_real_model import Stack
from tests.api.wire import COMPLETIONS, Reply
from tests.conftest import engine_config

pytestmark = pytest.mark.asyncio(loop_scope="session")

N_CTX = 512
MAX_QUEUE = 12
CLIENTS = ("anna", "bert", "cleo", "dora")
COUNT = {"prompt": "1, 2, 3, 4,", "temperature": 0, "ignore_eos": True}
N_TURNS = 40


class OneSlot(Stack):
    """A server with one slot and the four clients' keys."""

    async def ask(self, client: str = "anna", **fields: Any) -> Reply:
        """A completion for one of them."""
        return await self.post(COMPLETIONS, COUNT | fields, Authorization=f"Bearer {client}")

    async def begin(self, client: str = "anna", **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The same through a connection of its own, which the test may cut."""
        data = json.dumps(COUNT | fields).encode()
        reader, writer = await self.open()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer {client}\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return reader, writer

    async def n_waiting(self) -> int:
        """As the server tells it."""
        queue = (await self.get("/v1/queue", Authorization="Bearer anna")).json
        return int(queue["n_waiting"])

    async def n_computed(self) -> float:
        """Rows that the engine has computed."""
        text = (await self.get("/metrics", Authorization="Bearer anna")).body.decode()
        rows = ("slotfile_engine_prompt_rows_total ", "slotfile_engine_decode_rows_total ")
        return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(rows))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def slot(smollm2_path: Path) -> AsyncIterator[OneSlot]:
    """One engine for all tests of this file."""
    one_thread = replace(engine_config(smollm2_path, n_slots=1, n_ctx_slot=N_CTX, n_batch=64), n_threads=1, n_threads_batch=1)
    engine = EngineClient(one_thread)
    config = ServerConfig(port=0, max_queue=MAX_QUEUE, file_keys=tuple(ApiKey(secret=name, name=name) for name in CLIENTS))
    server = Server(config, engine, bind(config), version="0")
    await engine.start()
    await server.start()
    async with aiohttp.ClientSession(base_url=server.urls[0], connector=aiohttp.TCPConnector(limit=0)) as session:
        await engine.wait_ready()
        yield OneSlot(engine, server, session)
    await server.close()
    await engine.close()


async def test_four_clients_in_a_loop_get_as_many_turns_each(slot: OneSlot) -> None:
    """Case 19."""
    done = dict.fromkeys(CLIENTS, 0)

    async def loop(client: str) -> None:
        while sum(done.values()) < N_TURNS:
            assert (await slot.ask(client, max_tokens=4)).status == 200
            done[client] += 1

    await asyncio.gather(*map(loop, CLIENTS))
    assert max(done.values()) / min(done.values()) < 1.5, done


async def test_ten_that_leave_the_queue_cost_nothing_and_the_eleventh_is_next(slot: OneSlot) -> None:
    """Case 20."""
    await slot.idle()
    reader, running = await slot.begin(max_tokens=400, stream=True)
    await reader.readuntil(b"data: ")
    waiting = [await slot.begin(client=CLIENTS[index % 4], max_tokens=400, stream=bool(index % 2)) for index in range(10)]
    await until(lambda: slot.engine.n_live == 11)
    assert await slot.n_waiting() == 10
    for _, writer in waiting:
        writer.transport.abort()
    await until(lambda: slot.engine.n_live == 1)
    assert await slot.n_waiting() == 0
    running.transport.abort()
    await slot.idle()
    n_before = await slot.n_computed()
    assert (await slot.ask("dora", max_tokens=8)).json["usage"]["completion_tokens"] == 8
    assert await slot.n_computed() - n_before < 40  # its own prompt and tokens, of the others' 4,000 none


async def test_one_that_leaves_the_queue_does_not_touch_the_one_that_runs(slot: OneSlot) -> None:
    """Case 21."""
    await slot.idle()
    alone = (await slot.ask(max_tokens=60)).json["choices"][0]
    reader, writer = await slot.begin(max_tokens=60, stream=True)
    head = await reader.readuntil(b"data: ")
    for index in range(5):
        _, queued = await slot.begin(client="bert", stream=bool(index % 2))
        await until(lambda: slot.engine.n_live == 2)
        queued.transport.abort()
        await until(lambda: slot.engine.n_live == 1)
    body = (head + await reader.read()).decode()
    writer.close()
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == alone["finish_reason"] == "length"
    assert "data: [DONE]" in body


async def test_more_than_slot_and_queue_hold_are_refused_at_once_and_are_no_streams(slot: OneSlot) -> None:
    """Case 22."""
    await slot.idle()
    n = 1 + MAX_QUEUE + 7
    started_at = time.monotonic()
    refused_after: list[float] = []

    async def ask(index: int) -> Reply:
        reply = await slot.ask(CLIENTS[index % 4], max_tokens=8, stream=bool(index % 2))
        if reply.status != 200:
            refused_after.append(time.monotonic() - started_at)
        return reply

    replies = await asyncio.gather(*map(ask, range(n)))
    refused = [reply for reply in replies if reply.status != 200]
    assert len(refused) == 7
    assert {(reply.status, reply.error["code"], reply.headers["content-type"]) for reply in refused} == {
        (503, "server_overloaded", "application/json")
    }
    assert all(1 <= int(reply.headers["retry-after"]) <= 600 for reply in refused)
    assert max(refused_after) < time.monotonic() - started_at
    assert (await slot.ask(max_tokens=1)).status == 200


async def test_wait_of_a_request_has_a_limit_of_its_own_and_the_one_that_runs_none(slot: OneSlot) -> None:
    await slot.idle()
    reader, writer = await slot.begin(max_tokens=100, stream=True, queue_timeout=0.2)
    await reader.readuntil(b"data: ")
    refused = await slot.ask("bert", queue_timeout=0.1)
    assert (refused.status, refused.error["code"]) == (504, "timeout")
    assert "0.1 s" in refused.error["message"]
    assert b"data: [DONE]" in await reader.read()
    writer.close()
