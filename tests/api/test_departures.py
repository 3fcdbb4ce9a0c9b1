"""A client that leaves in the very moment in which its answer begins."""

import asyncio
import logging

import pytest
from aiohttp import ClientConnectionResetError

from runner.api.sse import EventStream
from tests.api.test_life import until
from tests.api.test_status import fields, metrics
from tests.api.wire import HELLO, Wire
from tests.fakes import FakeEngineClient


async def test_client_that_leaves_before_the_headers_go_out_is_no_fault_of_ours(
    wire: Wire, engine: FakeEngineClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_too_late(stream: EventStream, first: bytes) -> None:
        raise ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(EventStream, "open", open_too_late)
    caplog.set_level(logging.INFO)
    reader, writer = await wire.start(HELLO | {"stream": True})
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    await until(lambda: engine.n_live == 0)
    (line,) = [fields(record.getMessage()) for record in caplog.records if record.name == "slotfile.access"]
    assert line["status"] == "499"
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []
    counts = await metrics(wire)
    assert {name for name in counts if name.startswith("slotfile_http_requests_total")} == {
        'slotfile_http_requests_total{method="POST",route="/v1/chat/completions",status="499"}'
    }
