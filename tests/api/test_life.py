"""The life of a request and of the server: loading, full queue, clients that leave or stand still, drain, shutdown."""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from runner.api.server import Server, bind
from runner.config import ServerConfig
from runner.serving.client import EngineState
from tests.api.wire import CHAT, COMPLETIONS, HELLO, Wire
from tests.fakes import FakeEngineClient, Reply, model_info


async def until(condition: Any, timeout_s: float = 2.0) -> None:
    """Wait for something that other tasks bring about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.005)


def gate() -> asyncio.Event:
    return asyncio.Event()


async def test_until_the_model_is_loaded_everything_but_page_and_metrics_is_503(wire: Wire, engine: FakeEngineClient) -> None:
    info, engine.info, engine.state, engine.load_fraction = engine.info, None, EngineState.LOADING, 0.42
    for path in ("/health", "/v1/models", "/v1/models/x", "/slots"):
        reply = await wire.get(path)
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "loading", "1")
        assert "42 %" in reply.error["message"]
    for path in (CHAT, COMPLETIONS):
        assert (await wire.post(path, HELLO | {"prompt": "x"})).error["code"] == "loading"
    assert [(await wire.get(path)).status for path in ("/", "/metrics")] == [200, 200]
    engine.info, engine.state = info, EngineState.READY
    reply = await wire.get("/health")
    assert (reply.status, reply.json) == (200, {"status": "ok"})


async def test_health_stays_200_while_the_engine_restarts(wire: Wire, engine: FakeEngineClient) -> None:
    engine.state = EngineState.RESTARTING
    reply = await wire.get("/health")
    assert (reply.status, reply.json) == (200, {"status": "restarting"})


async def test_engine_that_is_given_up_is_said_so(wire: Wire, engine: FakeEngineClient) -> None:
    engine.state = EngineState.FAILED
    assert (await wire.get("/health")).error["code"] == "engine_stopped"
    assert (await wire.chat()).error["code"] == "engine_stopped"


@pytest.mark.parametrize("stage", ["accept_gate", "text_gate", "end_gate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_is_cancelled_at_any_stage(wire: Wire, engine: FakeEngineClient, stream: bool, stage: str) -> None:
    engine.enqueue(*(replace(Reply(), **{stage: gate()}) for _ in range(2)))  # type: ignore[arg-type]
    _, writer = await wire.start(HELLO | {"stream": stream, "n": 2})
    await until(lambda: len(engine.submits) == 2)
    await asyncio.sleep(0.05)
    assert not engine.cancelled
    writer.transport.abort()
    await until(lambda: len(engine.cancelled) == 2)
    assert engine.n_live == 0
    assert (await wire.chat(stream=stream)).status == 200


async def test_full_queue_is_a_503_at_once_and_opens_again(engine: FakeEngineClient) -> None:
    engine.info = model_info(n_slots=1)
    config = ServerConfig(port=0, max_queue=2)
    server = Server(config, engine, bind(config), version="0")
    await server.start()
    wire = Wire(server.urls[0], None)  # type: ignore[arg-type]
    hold = gate()
    engine.enqueue(*(Reply(accept_gate=hold) for _ in range(3)))
    connections = [await wire.start(HELLO | {"stream": index % 2 == 0}) for index in range(3)]
    await until(lambda: engine.n_live == 3)
    for stream in (False, True):
        reply = await wire.raw(wire.message(HELLO | {"stream": stream}))
        assert (reply.status, reply.error["code"]) == (503, "server_overloaded")
        assert int(reply.headers["retry-after"]) >= 1
    assert (await wire.raw(wire.message(HELLO | {"n": 4}))).error["param"] == "n"
    hold.set()
    for reader, writer in connections:
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
    await until(lambda: engine.n_live == 0)
    assert (await wire.raw(wire.message(HELLO))).status == 200
    assert (await wire.raw(wire.message(HELLO | {"n": 3}))).status == 200
    await server.close()


async def test_reader_that_stands_still_holds_up_nobody(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(texts=["x" * 1000] * 20_000))
    _, writer = await wire.start(HELLO | {"stream": True})
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await until(lambda: engine.submits)
    started = time.monotonic()
    for _ in range(5):
        assert (await wire.chat(stream=True)).status == 200
    assert time.monotonic() - started < 1.0
    await until(lambda: engine.n_live == 0, timeout_s=10)
    writer.transport.abort()


async def test_draining_refuses_new_work_and_lets_the_old_finish(server: Server, wire: Wire, engine: FakeEngineClient) -> None:
    hold = gate()
    engine.enqueue(Reply(text_gate=hold))
    running = asyncio.ensure_future(wire.chat(stream=True))
    await until(lambda: engine.n_live == 1)
    draining = asyncio.ensure_future(server.drain(5.0))
    await until(lambda: server.is_draining)
    refused = await wire.chat()
    assert (refused.status, refused.error["code"]) == (503, "draining")
    health = await wire.get("/health")
    assert (health.status, health.json["status"], health.json["error"]["code"]) == (503, "draining", "draining")
    assert not draining.done()
    hold.set()
    assert (await running).events[-1] == "[DONE]"
    await asyncio.wait_for(draining, 1)


async def test_drain_that_takes_too_long_ends_the_rest_with_an_error(server: Server, wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(end_gate=gate()), Reply(end_gate=gate()))
    tasks = [asyncio.ensure_future(wire.chat(stream=stream)) for stream in (True, False)]
    await until(lambda: engine.n_live == 2)
    await asyncio.sleep(0.05)
    await server.drain(0.1)
    stream, whole = await asyncio.gather(*tasks)
    assert json.loads(stream.events[-1])["error"]["code"] == "draining"
    assert (whole.status, whole.error["code"]) == (503, "draining")
    await until(lambda: len(engine.cancelled) == 2)


async def test_shutdown_takes_less_than_two_seconds_whatever_clients_do(
    config: ServerConfig, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.api.sse.MAX_UNREAD_BYTES", 1 << 30)  # the reader that stands still is there until the end
    server = Server(config, engine, bind(config), version="0")
    await server.start()
    wire = Wire(server.urls[0], None)  # type: ignore[arg-type]
    engine.default = Reply(texts=["x" * 100_000] * 50, end_gate=gate())
    stuck_reader = await wire.start(HELLO | {"stream": True})
    stuck_reader[1].transport.pause_reading()  # type: ignore[attr-defined]
    streams = [await wire.start(HELLO | {"stream": True}) for _ in range(3)]
    engine.default = Reply(accept_gate=gate())
    prefill = await wire.start(HELLO)
    queue = [await wire.start(HELLO | {"stream": bool(index % 2)}) for index in range(20)]
    idle = await wire.open()
    half_sent = await wire.open()
    half_sent[1].write(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode()
    )
    kept = await wire.open()
    kept[1].write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await kept[0].readline()).startswith(b"HTTP/1.1 200")
    await until(lambda: len(engine.submits) == 25)
    started = time.monotonic()
    await server.close()
    assert time.monotonic() - started < 2.0
    assert b'"code":"draining"' in await streams[0][0].read()
    assert (await prefill[0].read()).startswith(b"HTTP/1.1 503")
    await until(lambda: engine.n_live == 0)
    for _, writer in [stuck_reader, *streams, prefill, *queue, idle, half_sent, kept]:
        writer.transport.abort()
    with pytest.raises(OSError):
        await wire.open()


async def test_body_that_never_arrives_is_given_up(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.api.body.BODY_TIMEOUT_S", 0.1)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
    reply = await wire.raw(head.encode())
    assert (reply.status, reply.error["code"]) == (400, "invalid_request_error")


async def test_many_streams_at_once_never_mix(wire: Wire, engine: FakeEngineClient) -> None:
    engine.info = model_info(n_slots=64)
    engine.enqueue(*(Reply(texts=[f"<{index}>"] * 200) for index in range(32)))
    replies = await asyncio.gather(*(wire.chat(stream=True) for _ in range(32)))
    texts = ["".join(chunk["choices"][0]["delta"].get("content", "") for chunk in reply.chunks) for reply in replies]
    assert sorted(texts) == sorted(f"<{index}>" * 200 for index in range(32))
