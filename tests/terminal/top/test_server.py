"""One look at a server of ours, and at what is none."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from runner.api.server import Server, bind
from runner.config import ApiKey, ServerConfig
from runner.errors import ConfigError, Loading, RunnerError, Unauthorized
from runner.serving.protocol import Counters, SlotState, Snapshot
from runner.terminal.top.sample import SlotNow
from runner.terminal.top.server import ServerLooks, base_url
from tests.fakes import FakeEngineClient

Prepare = Callable[[Server, FakeEngineClient], None]


@asynccontextmanager
async def looking(*keys: ApiKey, key: str | None = None) -> "AsyncIterator[tuple[ServerLooks, Server, FakeEngineClient]]":
    """At a server with these keys."""
    engine, config = FakeEngineClient(), ServerConfig(port=0, file_keys=keys)
    server = Server(config, engine, bind(config), version="0")
    await server.start()
    try:
        async with ServerLooks(server.urls[0], key) as looks:
            yield looks, server, engine
    finally:
        await server.close()


async def test_look_brings_what_the_endpoints_say() -> None:
    async with looking() as (looks, _, engine):
        engine.tell(Snapshot([SlotState(0, "decode", "x#1", 9, 7, 3, 2)], 0, Counters(n_decode_rows=5), 1.0))
        sample = await looks.look()
    assert (sample.model, sample.health, sample.queue.n_ctx_slot, sample.requests) == ("fake-model", "ok", 512, [])
    assert sample.queue.slots == [SlotNow(0, "decode", "x#1", 9, 7, 3, 2)]
    assert sample.queue.clients == {}
    assert sample.metrics["engine_decode_rows_total"] == 5.0


async def test_draining_server_is_shown_to_its_end() -> None:
    async with looking() as (looks, server, _):
        await asyncio.gather(server.drain(0.0), return_exceptions=True)
        assert (await looks.look()).health == "draining"


async def test_loading_server_says_how_far_it_is() -> None:
    async with looking() as (looks, _, engine):
        engine.info, engine.load_fraction = None, 0.37
        with pytest.raises(Loading, match="37 %"):
            await looks.look()


@pytest.mark.parametrize(("key", "sentence"), [(None, "wants an API key"), ("wrong", "does not take this API key")])
async def test_wrong_key_is_unauthorized(key: str | None, sentence: str) -> None:
    async with looking(ApiKey(secret="ka", name="anna"), key=key) as (looks, *_):
        with pytest.raises(Unauthorized, match=sentence):
            await looks.look()


async def test_nobody_is_a_connection_error_with_its_reason() -> None:
    async with looking() as (looks, server, _):
        await server.close()
        with pytest.raises(ConnectionError, match="Connection refused"):
            await looks.look()


def http(status: str, body: str, *headers: str) -> bytes:
    """A whole answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", body]
    return "\r\n".join(lines).encode()


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ([http("404 Not Found", "<html>")], "is no slotfile server: GET /health gives a 404"),
        ([http("200 OK", "<html>")], "is no slotfile server: GET /health gives something else"),
        ([http("200 OK", "{}")], "is no slotfile server: GET /health gives something else"),
        ([http("302 Found", "", "Location: http://elsewhere.invalid/")], "is no slotfile server: GET /health gives a 302"),
        ([http("200 OK", '{"status":"ok"}'), http("404 Not Found", '{"error":{"code":404}}')], "GET /v1/queue gives a 404"),
        ([http("200 OK", '{"status":"ok"}'), http("401 Unauthorized", '{"error":{"code":401}}')], "GET /v1/queue gives a 401"),
        ([http("200 OK", '{"status":"ok"}'), http("200 OK", '{"slots":[]}')], "GET /v1/queue gives something else"),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "speaks no HTTP"),
    ],
    ids=["404", "a page", "other JSON", "a redirect", "llama-server", "llama-server with a key", "other fields", "no HTTP"],
)
async def test_what_is_no_server_of_ours_is_named(answers: list[bytes], sentence: str) -> None:
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        writer.close()

    stranger = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = stranger.sockets[0].getsockname()[1]
    async with stranger, ServerLooks(f"http://127.0.0.1:{port}", "secret") as looks:
        with pytest.raises(ConfigError, match=sentence):
            await looks.look()


async def test_key_goes_nowhere_but_to_the_server() -> None:
    async with ServerLooks("http://127.0.0.1:1", "secret") as looks:
        with pytest.raises(ConnectionError) as refused:
            await looks.look()
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://box:8080", "http://box:8080"),
        ("http://box:8080/", "http://box:8080"),
        ("http://box:8080/v1", "http://box:8080"),
        ("http://box/behind/v1/", "http://box/behind"),
        ("http://[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_address_of_a_server(text: str, url: str) -> None:
    assert base_url(text) == url


@pytest.mark.parametrize(
    "text", ["", "box", "box:8080", "ftp://box", "http://", "http://box:port", "http://a:b@box", "http://box/?x=1", "http://[x"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--url is .*; it takes http://HOST:PORT$"):
        base_url(text)


def test_tls_is_refused_with_the_reason() -> None:
    with pytest.raises(RunnerError, match="this program speaks no TLS"):
        base_url("https://box")
