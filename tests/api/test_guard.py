"""Who is answered: Host, Origin, content type, body size, API keys, and the headers every response carries."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from runner.api.app import ROUTES, Route
from runner.api.guard import EXPOSED_HEADERS, Authority
from runner.api.server import Server, bind
from runner.config import ServerConfig
from runner.errors import ConfigError
from tests.api.wire import CHAT, HELLO, Wire
from tests.fakes import FakeEngineClient


@asynccontextmanager
async def serving(engine: FakeEngineClient, **config: Any) -> AsyncIterator[Wire]:
    """A server with a configuration of its own."""
    made = ServerConfig(port=0, **config)
    server = Server(made, engine, bind(made), version="1.2.3")
    await server.start()
    async with aiohttp.ClientSession(base_url=server.urls[0]) as session:
        yield Wire(server.urls[0], session)
    await server.close()


OURS = [
    "localhost",
    "LOCALHOST",
    "localhost.",
    "127.0.0.1",
    "127.8.9.10",
    "[::1]",
    "localhost:PORT",
    "LocalHost.:PORT",
    "127.0.0.1:PORT",
    "[::1]:PORT",
]
FOREIGN = [
    "evil.example",
    "evil.example:PORT",
    ":PORT",
    "",
    "127.0.0.1.evil.example",
    "127.0.0.1.evil.example:PORT",
    "localhost:1",
    "localhost:99999",
    "localhost:",
    "user@localhost",
    "localhost evil",
    "localhost,evil",
    "[::1].evil",
    "[::2]",
    "::1",
    "0.0.0.0:PORT",
    "127.1",
    "2130706433",
    "10.0.0.1:PORT",
]


@pytest.mark.parametrize("path", ["/health", "/", CHAT, "/nothing"])
@pytest.mark.parametrize("host", FOREIGN)
async def test_foreign_host_is_refused_before_any_handler(wire: Wire, engine: FakeEngineClient, host: str, path: str) -> None:
    method = "POST" if path == CHAT else "GET"
    body = json.dumps(HELLO | {"stream": True}) if path == CHAT else ""
    lines = f"{method} {path} HTTP/1.1\r\nHost: {host.replace('PORT', str(wire.port))}\r\nContent-Type: application/json\r\n"
    reply = await wire.raw(f"{lines}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    assert (reply.status, reply.error["code"]) == (403, "forbidden")
    assert not engine.submits


@pytest.mark.parametrize("host", OURS)
async def test_own_host_is_answered(wire: Wire, host: str) -> None:
    reply = await wire.raw(f"GET /health HTTP/1.1\r\nHost: {host.replace('PORT', str(wire.port))}\r\n\r\n".encode())
    assert reply.status == 200


@pytest.mark.parametrize(
    ("head", "statuses"),
    [
        ("GET / HTTP/1.0\r\n\r\n", {403}),
        ("GET / HTTP/1.1\r\n\r\n", {400, 403}),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", {400, 403}),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", {400, 403}),
        ("GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", {403}),
        ("GET http://localhost/ HTTP/1.1\r\nHost: evil.example\r\n\r\n", {403}),
        ("GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", {200}),
        ("GET //evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", {404}),
    ],
)
async def test_odd_request_lines_and_hosts(wire: Wire, head: str, statuses: set[int]) -> None:
    assert (await wire.raw(head.encode())).status in statuses


async def test_allowed_host_is_answered_with_any_port_unless_it_names_one(engine: FakeEngineClient) -> None:
    async with serving(engine, allowed_hosts=("Chat.Example", "other.example:81")) as wire:
        hosts = {"chat.example": 200, "chat.example:443": 200, "other.example:81": 200, "other.example": 403, "third.example": 403}
        assert {host: (await wire.get("/health", Host=host)).status for host in hosts} == hosts


async def test_on_a_network_the_machines_own_name_and_the_address_of_the_connection_are_answered(engine: FakeEngineClient) -> None:
    async with serving(engine, host="0.0.0.0") as wire:
        own = [socket.gethostname(), f"{socket.gethostname().upper()}:{wire.port}", "localhost", "127.0.0.1"]
        assert [(await wire.get("/health", Host=host)).status for host in own] == [200] * 4
        foreign = ["evil.example", "10.255.255.1", f"{socket.gethostname()}.evil.example"]
        assert [(await wire.get("/health", Host=host)).status for host in foreign] == [403] * 3


@pytest.mark.parametrize("text", ["", ":80", "a b", "http://x", "a:b", "a:99999", "[::1"])
def test_text_that_is_no_authority(text: str) -> None:
    assert Authority.parse(text) is None


@pytest.mark.parametrize(
    "config", [{"allowed_hosts": ("http://x",)}, {"cors_origins": ("*",)}, {"cors_origins": ("chat.example",)}, {"cors_origins": ("null",)}]
)
def test_host_or_origin_that_can_never_match_is_a_config_error(engine: FakeEngineClient, config: Any) -> None:
    with pytest.raises(ConfigError):
        Server(ServerConfig(**config), engine, [], version="0")


CORS_HEADERS = {"access-control-allow-origin", "access-control-allow-methods", "access-control-allow-headers"}


def _foreign(port: int) -> list[str]:
    return ["https://evil.example", "null", "http://localhost:3000", f"http://127.0.0.1:{port}.evil.example", "http://localhost", "", "x"]


async def test_page_of_another_origin_can_start_nothing_and_read_nothing(wire: Wire, engine: FakeEngineClient) -> None:
    for origin in _foreign(wire.port):
        reply = await wire.post(CHAT, HELLO, Origin=origin)
        assert (reply.status, reply.error["code"]) == (403, "forbidden")
        assert not CORS_HEADERS & set(reply.headers)
        preflight = await wire.send("OPTIONS", CHAT, headers={"Origin": origin, "Access-Control-Request-Method": "POST"})
        assert preflight.status == 403
        assert not CORS_HEADERS & set(preflight.headers)
        assert not CORS_HEADERS & set((await wire.get("/health", Origin=origin)).headers)
    assert not engine.submits


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_browser_that_says_cross_site_is_refused(wire: Wire, site: str) -> None:
    assert (await wire.post(CHAT, HELLO, Sec_Fetch_Site=site)).status == 403


async def test_own_page_is_answered(wire: Wire) -> None:
    origin = f"http://{wire.host}:{wire.port}"
    reply = await wire.post(CHAT, HELLO, Origin=origin, Sec_Fetch_Site="same-origin")
    assert (reply.status, reply.headers["access-control-allow-origin"], reply.headers["vary"]) == (200, origin, "Origin")


async def test_allowed_origin_is_reflected_on_answers_errors_streams_and_preflights(engine: FakeEngineClient) -> None:
    origin = "https://chat.example"
    async with serving(engine, cors_origins=("https://Chat.Example/", "http://localhost:3000"), api_keys=("k",)) as wire:
        replies = [
            await wire.post(CHAT, HELLO, Origin=origin, Authorization="Bearer k"),
            await wire.post(CHAT, HELLO | {"stream": True}, Origin=origin, Authorization="Bearer k"),
            await wire.post(CHAT, HELLO, Origin=origin),
            await wire.post(CHAT, {}, Origin=origin, Authorization="Bearer k"),
            await wire.get("/nothing", Origin=origin),
        ]
        assert [reply.status for reply in replies] == [200, 200, 401, 400, 401]
        assert {(reply.headers["access-control-allow-origin"], reply.headers["vary"]) for reply in replies} == {(origin, "Origin")}
        wanted = "authorization, content-type, x-stainless-os"
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
        preflight = await wire.send("OPTIONS", CHAT, headers=asked)
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-origin"] == origin
        assert preflight.headers["access-control-allow-headers"] == wanted
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in preflight.headers
        assert (await wire.get("/health")).headers["vary"] == "Origin"


# What any page may read (Fetch standard, CORS-safelisted response-header names), and what speaks to the browser or the transport.
SAFELISTED = {"cache-control", "content-language", "content-length", "content-type", "expires", "last-modified", "pragma"}
OF_TRANSPORT = CORS_HEADERS | {"access-control-expose-headers", "vary", "date", "connection", "transfer-encoding", "x-content-type-options"}


async def test_page_of_an_allowed_origin_may_read_every_header_of_ours(engine: FakeEngineClient) -> None:
    origin = "https://chat.example"
    bounds: dict[str, Any] = {"max_queue": 0, "max_waiting_per_client": 1, "tokens_per_minute": 1000}
    async with serving(engine, cors_origins=(origin,), api_keys=("k",), **bounds) as wire:
        known = {"Origin": origin, "Authorization": "Bearer k"}
        replies = [await wire.post(CHAT, body, **known) for body in (HELLO, HELLO | {"stream": True}, HELLO | {"n": 5})]
        replies += [await wire.post(CHAT, HELLO, Origin=origin), await wire.get(CHAT, **known)]
        engine.default.end_gate = asyncio.Event()
        replies += [await wire.post(CHAT, HELLO | {"timeout": 0.02}, **known)]
        running = [asyncio.create_task(wire.post(CHAT, HELLO, **known)) for _ in range(4)]
        while engine.n_live < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        replies += [await wire.post(CHAT, HELLO, **known)]
        engine.default.end_gate.set()
        await asyncio.gather(*running)
    assert [reply.status for reply in replies] == [200, 200, 400, 401, 405, 504, 503]
    sent = {name for reply in replies for name in reply.headers} - SAFELISTED - OF_TRANSPORT - {"cache-control", "x-accel-buffering"}
    assert sent == {name.lower() for name in EXPOSED_HEADERS}
    assert {reply.headers["access-control-expose-headers"] for reply in replies} == {", ".join(EXPOSED_HEADERS)}


@pytest.mark.parametrize("path", ["/health", "/", "/v1/models", CHAT])
async def test_options_without_origin_names_the_methods(wire: Wire, path: str) -> None:
    reply = await wire.send("OPTIONS", path)
    assert reply.status == 204
    assert "OPTIONS" in reply.headers["allow"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json", "", "application/json5"]
)
async def test_body_of_another_type_is_refused(wire: Wire, engine: FakeEngineClient, kind: str) -> None:
    reply = await wire.post(CHAT, HELLO, Content_Type=kind)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    assert "application/json" in reply.error["message"]
    assert not engine.submits


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/json;charset=UTF-8"])
async def test_json_type_is_accepted_in_any_spelling(wire: Wire, kind: str) -> None:
    assert (await wire.post(CHAT, HELLO, Content_Type=kind)).status == 200


async def test_body_is_limited_to_the_byte_whatever_its_framing(engine: FakeEngineClient) -> None:
    limit = 20_000
    async with serving(engine, max_body_bytes=limit) as wire:

        async def chunks(data: bytes) -> AsyncIterator[bytes]:
            for start in range(0, len(data), 4096):
                yield data[start : start + 4096]

        empty = len(json.dumps(HELLO | {"x": ""}))
        for extra, status in ((-1, 200), (0, 200), (1, 413), (5 * limit, 413)):
            body = json.dumps(HELLO | {"x": "x" * (limit - empty + extra)}).encode()
            assert len(body) == limit + extra
            for data in (body, chunks(body)):
                reply = await asyncio.wait_for(wire.send("POST", CHAT, headers={"Content-Type": "application/json"}, data=data), 5)
                assert reply.status == status
                if status == 413:
                    assert reply.error["code"] == "request_too_large"


async def test_huge_announced_body_is_refused_before_it_is_sent(wire: Wire) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {1 << 40}\r\n\r\n"
    reply = await wire.raw(head.encode())
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")


def _request(route: Route) -> tuple[str, str, dict[str, Any]]:
    path = route.path.replace("{id:.+}", "fake-model")
    body = {"data": json.dumps(HELLO | {"prompt": "x"}).encode()} if route.method == "POST" else {}
    return route.method, path, body


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
async def test_only_health_is_open_without_a_key(engine: FakeEngineClient, route: Route) -> None:
    async with serving(engine, api_keys=("secret-1", "secret-2")) as wire:
        method, path, body = _request(route)

        async def status(**headers: str) -> int:
            reply = await wire.send(method, path, headers={"Content-Type": "application/json"} | headers, **body)
            if reply.status == 401:
                assert reply.error["code"] == "invalid_api_key"
                assert reply.headers["www-authenticate"].startswith("Bearer")
            return reply.status

        refused = 200 if path == "/health" else 401
        wrong = ["Bearer", "Bearer ", "Bearer secret-", "Bearer secret-11", "Basic secret-1", "secret-1", "Bearer sécret-1"]
        assert await status() == refused
        assert [await status(Authorization=value) for value in wrong] == [refused] * len(wrong)
        right = ["Bearer secret-1", "bearer secret-2", "Bearer  secret-1 "]
        let_in = 404 if method == "DELETE" else 200  # there is nothing to delete
        assert [await status(Authorization=value) for value in right] == [let_in] * 3


async def test_unknown_path_asks_for_a_key_too(engine: FakeEngineClient) -> None:
    async with serving(engine, api_keys=("k",)) as wire:
        assert (await wire.get("/nothing")).status == 401


async def test_unknown_route_and_wrong_method_are_errors_in_openais_form(wire: Wire) -> None:
    missing = await wire.get("/v1/nothing")
    wrong = await wire.get(CHAT)
    assert (missing.status, missing.error["code"]) == (404, "not_found")
    assert (wrong.status, wrong.error["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "POST")
    assert (await wire.send("DELETE", "/v1/models", headers={"Content-Type": "application/json"})).status == 405


@pytest.mark.parametrize("given", ["abc-123", "x" * 128, "!~", "trace/7#1"])
async def test_sane_request_id_comes_back(wire: Wire, given: str) -> None:
    assert (await wire.get("/health", X_Request_Id=given)).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "é", "a\tb"])
async def test_other_request_ids_are_replaced(wire: Wire, given: str | None) -> None:
    reply = await wire.get("/health", **({} if given is None else {"X_Request_Id": given}))
    assert reply.headers["x-request-id"].startswith("req_")


async def test_every_response_carries_an_id_and_our_name(wire: Wire) -> None:
    replies = [
        await wire.get("/nothing"),
        await wire.chat(),
        await wire.chat(stream=True),
        await wire.post(CHAT, b"{"),
        await wire.get("/", Host="evil"),
    ]
    for reply in replies:
        assert reply.headers["x-request-id"]
        assert reply.headers["server"] == "slotfile/1.2.3"
        assert reply.headers["x-content-type-options"] == "nosniff"
    assert len({reply.headers["x-request-id"] for reply in replies}) == len(replies)


async def test_repeated_request_id_still_makes_distinct_sequences(wire: Wire, engine: FakeEngineClient) -> None:
    await asyncio.gather(*(wire.post(CHAT, HELLO, X_Request_Id="same") for _ in range(5)))
    ids = [submit.request_id for submit in engine.submits]
    assert len(set(ids)) == 5
    assert all(request_id.startswith("same#") for request_id in ids)


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00", b"BREW /pot HTCPCP/1.0\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n"],
)
async def test_bytes_that_are_no_http_do_no_harm(wire: Wire, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = await wire.open()
    writer.write(data + b"\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.")
    writer.close()
    assert (await wire.get("/health")).status == 200
    assert "BREW" not in caplog.text
    assert "Traceback" not in caplog.text
