"""What the server says of itself: models, slots, metrics, the page; and the access log."""

import asyncio
import json
import logging
import re

import msgspec
import pytest

from runner.api.metrics import ENGINE_COUNTERS
from runner.errors import ContextLengthExceeded
from runner.serving.protocol import Counters, SlotState, Snapshot
from tests.api.test_guard import serving
from tests.api.wire import CHAT, COMPLETIONS, HELLO, Wire
from tests.fakes import FakeEngineClient, Reply, model_info

SECRET = "a-text-that-no-log-may-hold"


async def test_models_lists_the_one_model(wire: Wire) -> None:
    listed = (await wire.get("/v1/models")).json
    (model,) = listed["data"]
    assert listed["object"] == "list"
    assert isinstance(model.pop("created"), int)
    meta = {"n_ctx": 512, "n_ctx_train": 2048, "n_vocab": 1000, "n_params": 1_000_000, "size": 4_000_000}
    assert model == {"id": "fake-model", "object": "model", "owned_by": "slotfile", "meta": meta}
    assert (await wire.get("/v1/models/fake-model")).json["id"] == "fake-model"


@pytest.mark.parametrize("name", ["other", "org/name", "a%20b"])
async def test_other_model_is_not_found(wire: Wire, name: str) -> None:
    reply = await wire.get(f"/v1/models/{name}")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("model", ["gpt-4o", "default", "", None, "fake-model"])
async def test_any_model_is_accepted_and_the_answer_tells_which_it_was(wire: Wire, model: str | None) -> None:
    assert (await wire.chat(model=model)).json["model"] == "fake-model"


async def test_slots_shows_states_and_counts_and_no_text(wire: Wire, engine: FakeEngineClient) -> None:
    assert [slot["state"] for slot in (await wire.get("/slots")).json["slots"]] == ["idle"] * 4
    engine.snapshot = Snapshot([SlotState(0, "decode", "r#1", 20, 10, 4, 10), SlotState(1, "idle", "", 5, 0, 0, 0)], 3, Counters(), 0.1)
    assert (await wire.get("/slots")).json == {
        "n_slots": 4,
        "n_ctx_slot": 512,
        "n_waiting": 3,
        "slots": [
            {"id": 0, "state": "decode", "request_id": "r#1", "n_cells": 20, "n_prompt": 10, "n_cached": 4, "n_decoded": 10},
            {"id": 1, "state": "idle", "request_id": None, "n_cells": 5, "n_prompt": 0, "n_cached": 0, "n_decoded": 0},
        ],
    }


async def test_page_names_the_endpoints_and_allows_no_script(wire: Wire) -> None:
    reply = await wire.get("/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert b"/v1/chat/completions" in reply.body


async def test_head_is_answered_without_a_body(wire: Wire) -> None:
    reply = await wire.send("HEAD", "/health")
    assert (reply.status, reply.body) == (200, b"")


async def metrics(wire: Wire) -> dict[str, float]:
    reply = await wire.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in reply.body.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_cells_of_a_pool_count_once_whoever_shares_them(wire: Wire, engine: FakeEngineClient) -> None:
    engine.info = msgspec.structs.replace(model_info(), kv_pool=1000)
    slots = [SlotState(slot_id, "decode", "r", 400, 10, 4, 10) for slot_id in range(4)]
    engine.snapshot = Snapshot(slots, 0, Counters(), 0.1, n_used_cells=500)
    assert (await metrics(wire))["slotfile_kv_cache_usage_perc"] == 0.5


async def test_metrics_follow_ends_and_snapshots(wire: Wire, engine: FakeEngineClient) -> None:
    counters = Counters(n_steps=5, n_passes=7, decode_s=1.5)
    engine.snapshot = Snapshot([SlotState(0, "decode", "r", 1024, 10, 4, 10)], 3, counters, 0.1, n_used_cells=1024)
    engine.n_restarts = 2
    await wire.chat()
    engine.enqueue(Reply(refuse=ContextLengthExceeded("too long")))
    await wire.chat()
    await wire.get("/secret-path")
    found = await metrics(wire)
    expected = {
        "slotfile_engine_up": 1,
        "slotfile_engine_restarts_total": 2,
        "slotfile_engine_steps_total": 5,
        "slotfile_engine_passes_total": 7,
        "slotfile_engine_decode_seconds_total": 1.5,
        "slotfile_requests_running": 1,
        "slotfile_kv_cache_usage_perc": 0.5,
        "slotfile_prompt_tokens_total": 7,
        "slotfile_generation_tokens_total": 3,
        "slotfile_prefix_cache_queries_total": 7,
        "slotfile_prefix_cache_hits_total": 3,
        "slotfile_time_to_first_token_seconds_count": 1,
        "slotfile_e2e_request_latency_seconds_count": 1,
        "slotfile_request_time_per_output_token_seconds_count": 1,
        "slotfile_request_parked_time_seconds_count": 0,
        "slotfile_request_queue_time_seconds_count": 1,
        'slotfile_request_success_total{finished_reason="stop"}': 1,
        'slotfile_request_failure_total{code="context_length_exceeded"}': 1,
        'slotfile_http_requests_total{method="POST",route="/v1/chat/completions",status="200"}': 1,
        'slotfile_http_requests_total{method="POST",route="/v1/chat/completions",status="400"}': 1,
        'slotfile_http_requests_total{method="GET",route="other",status="404"}': 1,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_every_counter_of_the_engine_is_a_metric() -> None:
    of_the_gap_histogram = {"itl_s", "itl_counts"}
    assert set(ENGINE_COUNTERS) | of_the_gap_histogram == set(Counters.__struct_fields__)


async def test_metric_labels_are_ours_alone(wire: Wire) -> None:
    for index, method in enumerate(("PROPFIND", "MKCOL", "REPORT", "SEARCH", "LOCK")):
        await wire.send(method, f"/p{index}", headers={"Content-Type": "application/json"})
        await wire.get(f"/v1/models/m{index}")
    names = [name for name in await metrics(wire) if name.startswith("slotfile_http_requests_total")]
    assert sorted(names) == [
        'slotfile_http_requests_total{method="GET",route="/v1/models/{id}",status="404"}',
        'slotfile_http_requests_total{method="other",route="other",status="404"}',
    ]


def fields(line: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in re.findall(r'[\w]+=(?:"(?:[^"\\]|\\.)*"|\S+)', line))


async def test_access_log_is_one_line_a_request_without_text(
    wire: Wire, engine: FakeEngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slotfile.access")
    engine.default = Reply(texts=[SECRET])
    for stream in (False, True):
        await wire.post(CHAT, {"messages": [{"role": "user", "content": SECRET}], "stream": stream}, X_Request_Id="my-id")
    await wire.post(COMPLETIONS, {"prompt": SECRET, "temperature": SECRET})
    await wire.get(f"/health?x={SECRET}", Authorization=f"Bearer {SECRET}")
    lines = [fields(record.getMessage()) for record in caplog.records if record.name == "slotfile.access"]
    assert len(lines) == 4
    for line in lines[:2]:
        assert {
            "id": "my-id",
            "client": wire.host,
            "method": "POST",
            "path": CHAT,
            "status": "200",
            "reason": "stop",
        }.items() <= line.items()
        assert (line["n_prompt"], line["n_cached"], line["n_completion"]) == ("7", "3", "1")
        assert {"queue_s", "prefill_s", "decode_s", "total_s"} <= set(line)
    assert (lines[2]["status"], lines[2]["reason"]) == ("400", "invalid_request_error")
    assert (lines[3]["path"], lines[3]["status"], lines[3]["reason"]) == ("/health", "200", "-")
    assert SECRET not in caplog.text


async def test_access_log_of_a_client_that_left_tells_what_was_done(
    wire: Wire, engine: FakeEngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slotfile.access")
    engine.enqueue(Reply(end_gate=asyncio.Event()))
    reader, writer = await wire.start(HELLO | {"stream": True})
    await reader.readuntil(b"world")
    writer.transport.abort()
    async with asyncio.timeout(2):
        while not caplog.records:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    line = fields(caplog.records[0].getMessage())
    assert {"status": "499", "n_prompt": "7", "n_cached": "3", "n_completion": "3", "reason": "request_cancelled"}.items() <= line.items()


@pytest.mark.parametrize("path", ["/a%0Ab", "/a%20b", '/a"b', "/a=b", "/%F0%9F%98%80", "/" + "x" * 4000])
async def test_path_cannot_forge_a_log_line(wire: Wire, caplog: pytest.LogCaptureFixture, path: str) -> None:
    caplog.set_level(logging.INFO, "slotfile.access")
    await wire.get(path)
    (record,) = [record for record in caplog.records if record.name == "slotfile.access"]
    line = record.getMessage()
    assert "\n" not in line
    assert len(line) < 600
    assert fields(line)["status"] == "404"


async def test_client_in_the_log_is_the_one_that_a_trusted_proxy_names(engine: FakeEngineClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slotfile.access")
    async with serving(engine, trusted_proxies=("127.0.0.1",), api_keys=(SECRET,)) as wire:
        for forwarded in ("203.0.113.7, 198.51.100.2", "evil client=x", '203.0.113.7%"x'):
            await wire.get("/slots", X_Forwarded_For=forwarded, Authorization=f"Bearer {SECRET}")
    lines = [fields(record.getMessage()) for record in caplog.records if record.name == "slotfile.access"]
    assert [line["client"] for line in lines] == ["198.51.100.2", "127.0.0.1", "203.0.113.7"]
    assert SECRET not in caplog.text


async def test_client_in_the_log_is_the_connection_where_no_proxy_is_trusted(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slotfile.access")
    await wire.get("/health", X_Forwarded_For="203.0.113.7")
    (record,) = [record for record in caplog.records if record.name == "slotfile.access"]
    assert fields(record.getMessage())["client"] == wire.host


@pytest.mark.parametrize("request_id", ["a=b", 'a"b', "x\\", "status=200"])
async def test_request_id_cannot_forge_a_log_line(wire: Wire, caplog: pytest.LogCaptureFixture, request_id: str) -> None:
    caplog.set_level(logging.INFO, "slotfile.access")
    await wire.get("/nothing", X_Request_Id=request_id)
    (record,) = [record for record in caplog.records if record.name == "slotfile.access"]
    line = fields(record.getMessage())
    assert (json.loads(line["id"]) if line["id"].startswith('"') else line["id"]) == request_id
    assert (line["status"], line["method"]) == ("404", "GET")
