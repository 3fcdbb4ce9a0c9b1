"""What the HTTP library would answer by itself: broken HTTP is an error like all others, and `Expect` waits for the guard."""

import asyncio
import json
import logging

import pytest

from tests.api.test_guard import serving
from tests.api.test_status import fields, metrics
from tests.api.wire import COMPLETIONS, Wire
from tests.fakes import FakeEngineClient, Reply

HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
BODY = json.dumps({"prompt": "x"}).encode()
BROKEN = {
    "chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "later chunk": HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\nzz\r\n',
    "two lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "length and chunks": HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no length": HEAD + b"Content-Length: x\r\n\r\nabcd",
    "gzip that is none": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
    "huge header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"secret" * 4000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: secret\r\n" * 300 + b"\r\n",
    "huge target": b"GET /" + b"secret" * 4000 + b" HTTP/1.1\r\n\r\n",
    "request line": b"GET\r\n\r\n",
    "target": b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\r\n\r\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
async def test_broken_http_is_an_error_like_every_other(
    wire: Wire, engine: FakeEngineClient, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    caplog.set_level(logging.INFO)
    reader, writer = await wire.open()
    writer.write(data)
    head, _, body = (await asyncio.wait_for(reader.read(), 5)).decode().partition("\r\n\r\n")  # to the end: the connection is closed
    writer.close()
    status, *lines = head.split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    assert status.endswith(" 400 Bad Request")
    assert (headers["content-type"], headers["server"], headers["x-content-type-options"]) == (
        "application/json",
        "slotfile/1.2.3",
        "nosniff",
    )
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_request_error")
    assert "\n" not in error["message"]
    (line,) = [fields(record.getMessage()) for record in caplog.records if record.name == "slotfile.access"]
    assert (line["id"], line["status"], line["reason"]) == (headers["x-request-id"], "400", "invalid_request_error")
    assert "secret" not in caplog.text
    assert not engine.submits
    counts = await metrics(wire)
    assert sum(count for name, count in counts.items() if name.startswith("slotfile_http_requests_total") and 'status="400"' in name) == 1


async def test_broken_request_behind_a_good_one_does_not_touch_its_answer(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(end_gate=(hold := asyncio.Event())))
    reader, writer = await wire.start({"prompt": "x", "stream": True}, COMPLETIONS)
    first = await asyncio.wait_for(reader.readuntil(b"world"), 5)
    writer.write(b"\x00 no request\r\n\r\n")
    await asyncio.sleep(0.02)
    hold.set()
    answer = first + await asyncio.wait_for(reader.read(), 5)
    assert answer.count(b"HTTP/1.") == 2
    assert answer.index(b"data: [DONE]") < answer.index(b"400 Bad Request") < answer.index(b'"code":"invalid_request_error"')
    writer.close()


def waiting(path: str = COMPLETIONS, host: str = "localhost", expect: str = "100-continue", version: str = "1.1", **more: str) -> bytes:
    """The head of a request whose client waits before it sends the body."""
    headers = {"Host": host, "Content-Type": "application/json", "Content-Length": str(len(BODY)), "Expect": expect} | more
    lines = [f"POST {path} HTTP/{version}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


REFUSED = {
    "host": (waiting(host="evil.example"), 403),
    "host of no route": (waiting("/nothing", host="evil.example"), 403),
    "origin": (waiting(Origin="https://evil.example"), 403),
    "key": (waiting(Authorization="Bearer wrong"), 401),
    "type": (waiting(**{"Content-Type": "text/plain", "Authorization": "Bearer k"}), 415),
    "size": (waiting(**{"Content-Length": "10000000", "Authorization": "Bearer k"}), 413),
    "route": (waiting("/nothing", Authorization="Bearer k"), 404),
    "method": (waiting("/v1/models", Authorization="Bearer k"), 405),
}


@pytest.mark.parametrize(("head", "status"), REFUSED.values(), ids=REFUSED.keys())
async def test_body_is_not_asked_for_where_the_request_is_refused(engine: FakeEngineClient, head: bytes, status: int) -> None:
    async with serving(engine, api_keys=("k",), max_body_bytes=10_000) as wire:
        reply = await wire.raw(head)
        assert reply.status == status
        assert reply.error["code"]
        assert reply.headers["connection"] == "close"


@pytest.mark.parametrize("expect", ["100-continue", "100-Continue"])
async def test_body_is_asked_for_once_the_guard_has_let_the_request_in(wire: Wire, expect: str) -> None:
    reader, writer = await wire.open()
    for _ in range(2):  # the connection lives on
        writer.write(waiting(expect=expect))
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 200 ")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(length)
    writer.close()


@pytest.mark.parametrize("head", [waiting(expect="tea"), waiting(version="1.0")], ids=["other", "HTTP/1.0"])
async def test_what_is_no_wait_is_read_on(wire: Wire, head: bytes) -> None:
    assert (await wire.raw(head + BODY)).status == 200
