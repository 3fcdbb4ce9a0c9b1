"""How long a request may wait and take: 504 while nothing has been sent, else an error event; its slot is free and no timer is left."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from runner.api.deadlines import Deadlines, deadlines
from runner.config import ServerConfig
from runner.errors import InvalidRequest
from tests.api.test_bounds import serving
from tests.api.test_life import gate, until
from tests.api.test_status import metrics
from tests.api.wire import CHAT, COMPLETIONS, HELLO, Wire
from tests.fakes import FakeEngineClient, Reply

SHORT_S = 0.05


def n_timers() -> int:
    """Deadlines that are still to come."""
    scheduled: list[asyncio.TimerHandle] = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    names = [handle._callback.__qualname__ for handle in scheduled if not handle.cancelled() and hasattr(handle._callback, "__qualname__")]  # type: ignore[attr-defined]
    return sum(name.startswith("Call.") for name in names)


async def is_clean(engine: FakeEngineClient, n_cancelled: int) -> None:
    """Nothing of a request that ended is left anywhere."""
    await until(lambda: engine.n_live == 0 and len(engine.cancelled) == n_cancelled)
    assert n_timers() == 0


STAGES = ["accept_gate", "place_gate", "text_gate", "end_gate"]


@pytest.mark.parametrize("stage", STAGES)
async def test_whole_answer_that_is_late_is_a_504_at_any_stage(wire: Wire, engine: FakeEngineClient, stage: str) -> None:
    engine.default = replace(Reply(), **{stage: gate()})  # type: ignore[arg-type]
    reply = await wire.chat(timeout=SHORT_S)
    assert (reply.status, reply.error["code"], reply.error["message"]) == (
        504,
        "timeout",
        "The request is not done after 0.05 s, which is the limit ('timeout')",
    )
    assert reply.headers["x-should-retry"] == "false"
    await is_clean(engine, 1)


@pytest.mark.parametrize("stage", STAGES)
async def test_stream_that_is_late_ends_with_an_event_once_it_has_begun(wire: Wire, engine: FakeEngineClient, stage: str) -> None:
    engine.default = replace(Reply(), **{stage: gate()})  # type: ignore[arg-type]
    reply = await wire.chat(timeout=SHORT_S, stream=True)
    if stage == "accept_gate":
        assert (reply.status, reply.error["code"]) == (504, "timeout")
    else:
        assert reply.status == 200
        assert json.loads(reply.events[-1])["error"]["code"] == "timeout"
        assert "[DONE]" not in reply.events
    assert ('"Hello"' in reply.body.decode()) == (stage == "end_gate")
    await is_clean(engine, 1)


@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, {"n": 3}), (COMPLETIONS, {"prompt": ["a", "b", "c"]}), (COMPLETIONS, {"prompt": "a", "n": 3})]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_all_sequences_of_a_late_request_are_taken_back(
    wire: Wire, engine: FakeEngineClient, path: str, fields: dict[str, Any], stream: bool
) -> None:
    engine.enqueue(Reply(), Reply(end_gate=gate()), Reply(place_gate=gate()))
    reply = await wire.post(path, HELLO | fields | {"stream": stream, "timeout": SHORT_S})
    if stream:
        assert reply.status == 200
        assert json.loads(reply.events[-1])["error"]["code"] == "timeout"
    else:
        assert (reply.status, reply.error["code"]) == (504, "timeout")
    await is_clean(engine, 2)


@pytest.mark.parametrize("stage", ["accept_gate", "place_gate"])
async def test_wait_for_a_slot_has_a_limit(stage: str) -> None:
    async with serving(queue_timeout_s=SHORT_S) as stack:
        stack.engine.default = replace(Reply(), **{stage: gate()})  # type: ignore[arg-type]
        reply = await stack.wire.chat(n=2)
        assert (reply.status, reply.error["code"]) == (504, "timeout")
        assert reply.error["message"] == "The request has waited 0.05 s for a slot, which is the limit (--queue-timeout)"
        late = await stack.wire.chat(stream=True)
        assert late.status == (504 if stage == "accept_gate" else 200)
        assert '"code":"timeout"' in late.body.decode()
        await is_clean(stack.engine, 3)
        await until(stack.is_empty)


BY = [({"queue_timeout": SHORT_S}, {}, "'queue_timeout'"), ({"queue_timeout": 9}, {"X_Queue_Timeout": "0.05"}, "X-Queue-Timeout")]


@pytest.mark.parametrize(("fields", "headers", "by"), BY, ids=["field", "header"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stage", ["accept_gate", "place_gate"])
async def test_request_may_limit_its_own_wait(stage: str, path: str, fields: dict[str, Any], headers: dict[str, str], by: str) -> None:
    async with serving(queue_timeout_s=30) as stack:
        stack.engine.default = replace(Reply(), **{stage: gate()})  # type: ignore[arg-type]
        for stream in (False, True):
            reply = await stack.wire.post(path, HELLO | {"prompt": "x", "n": 2, "stream": stream} | fields, **headers)
            has_begun = stream and stage == "place_gate"
            assert reply.status == (200 if has_begun else 504)
            error = json.loads(reply.events[-1])["error"] if has_begun else reply.error
            assert (error["code"], error["message"]) == ("timeout", f"The request has waited 0.05 s for a slot, which is the limit ({by})")
        await is_clean(stack.engine, 4)
        await until(stack.is_empty)


async def test_wait_that_the_server_limits_further_is_the_servers() -> None:
    async with serving(queue_timeout_s=SHORT_S) as stack:
        stack.engine.default = Reply(place_gate=gate())
        assert "(--queue-timeout)" in (await stack.wire.chat(queue_timeout=9)).error["message"]


@pytest.mark.parametrize("value", [-1, 86401])
async def test_wait_out_of_range_is_a_400_that_names_the_field(wire: Wire, value: float) -> None:
    reply = await wire.chat(queue_timeout=value)
    assert (reply.status, reply.error["param"]) == (400, "queue_timeout")


async def test_request_that_got_a_slot_waits_no_more() -> None:
    async with serving(queue_timeout_s=SHORT_S) as stack:
        stack.engine.enqueue(Reply(text_gate=(hold := gate())), Reply(place_gate=hold))
        task = asyncio.create_task(stack.wire.chat(n=2))
        await until(lambda: stack.engine.n_live == 2)
        await asyncio.sleep(SHORT_S)
        await asyncio.sleep(SHORT_S / 2)
        assert n_timers() == 0
        hold.set()
        assert (await task).status == 200


async def test_others_do_not_notice(wire: Wire, engine: FakeEngineClient) -> None:
    hold = gate()
    engine.enqueue(Reply(end_gate=hold), Reply(end_gate=gate()))
    other = asyncio.create_task(wire.chat(stream=True))
    await until(lambda: engine.n_live == 1)
    assert (await wire.chat(timeout=SHORT_S)).status == 504
    assert not other.done()
    hold.set()
    assert (await other).events[-1] == "[DONE]"
    await is_clean(engine, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_in_time_leaves_no_timer(stream: bool) -> None:
    async with serving(queue_timeout_s=30, request_timeout_s=60) as stack:
        stack.engine.enqueue(Reply(place_gate=(hold := gate())))
        task = asyncio.create_task(stack.wire.chat(stream=stream))
        await until(lambda: n_timers() == 2)
        hold.set()
        assert (await task).status == 200
        await is_clean(stack.engine, 0)


@pytest.mark.parametrize("stage", STAGES)
async def test_client_that_leaves_before_its_time_leaves_no_timer(stage: str) -> None:
    async with serving(queue_timeout_s=30) as stack:
        stack.engine.default = replace(Reply(), **{stage: gate()})  # type: ignore[arg-type]
        _, writer = await stack.wire.start(HELLO | {"timeout": 60, "n": 2, "stream": True})
        await until(lambda: stack.engine.n_live == 2)
        await asyncio.sleep(0.02)
        assert n_timers() == (2 if stage in ("accept_gate", "place_gate") else 1)
        writer.transport.abort()
        await is_clean(stack.engine, 2)


async def test_refusal_leaves_no_timer(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(refuse=InvalidRequest("no", param="messages")))
    assert (await wire.chat(timeout=60)).status == 400
    await is_clean(engine, 0)


async def test_late_requests_are_counted_and_logged_as_such(wire: Wire, engine: FakeEngineClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "slotfile.access")
    engine.default = Reply(end_gate=gate())
    await wire.chat(timeout=SHORT_S)
    await is_clean(engine, 1)
    assert (await metrics(wire))['slotfile_request_failure_total{code="timeout"}'] == 1
    assert " status=504 " in caplog.text
    assert "reason=timeout" in caplog.text


CONFIG = ServerConfig(queue_timeout_s=1.0, request_timeout_s=10.0)
TOTAL, QUEUE = "X-Request-Timeout", "X-Queue-Timeout"
OF_SERVER = Deadlines(queue_s=1.0, queue_by="--queue-timeout", ends_at=110.0, total_s=10.0, total_by="--request-timeout")
JOINED = [
    (ServerConfig(), 0.0, 0.0, {}, Deadlines()),
    (ServerConfig(), 0.0, 0.0, {TOTAL: "0", QUEUE: "0"}, Deadlines()),
    (ServerConfig(), 0.0, 0.0, {TOTAL: " 2.5 "}, Deadlines(ends_at=102.5, total_s=2.5, total_by=TOTAL)),
    (ServerConfig(), 0.0, 0.0, {QUEUE: " 2.5 "}, Deadlines(queue_s=2.5, queue_by=QUEUE)),
    (ServerConfig(), 3.0, 0.0, {}, Deadlines(queue_s=3.0, queue_by="'queue_timeout'")),
    (CONFIG, 0.0, 0.0, {TOTAL: "", QUEUE: ""}, OF_SERVER),
    (
        CONFIG,
        0.5,
        5.0,
        {TOTAL: "7", QUEUE: "0.7"},
        Deadlines(queue_s=0.5, queue_by="'queue_timeout'", ends_at=105.0, total_s=5.0, total_by="'timeout'"),
    ),
    (CONFIG, 0.5, 5.0, {TOTAL: "3", QUEUE: "0.3"}, Deadlines(queue_s=0.3, queue_by=QUEUE, ends_at=103.0, total_s=3.0, total_by=TOTAL)),
    (CONFIG, 50.0, 50.0, {TOTAL: "70", QUEUE: "70"}, OF_SERVER),
]


@pytest.mark.parametrize(("config", "queue_s", "total_s", "headers", "expected"), JOINED)
def test_smallest_limit_counts(config: ServerConfig, queue_s: float, total_s: float, headers: dict[str, str], expected: Deadlines) -> None:
    assert deadlines(config, queue_s, total_s, headers, 100.0) == expected


@pytest.mark.parametrize("name", [TOTAL, QUEUE])
@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "86401", "1s", "٣", "1_0"])
async def test_header_that_is_no_time_is_a_400_that_names_it(wire: Wire, engine: FakeEngineClient, name: str, text: str) -> None:
    reply = await wire.post(COMPLETIONS, {"prompt": "x"}, **{name: text})
    assert (reply.status, reply.error["param"]) == (400, name)
    assert not engine.submits


async def test_header_limits_a_request(wire: Wire, engine: FakeEngineClient) -> None:
    engine.default = Reply(end_gate=gate())
    assert (await wire.post(COMPLETIONS, {"prompt": "x"}, X_Request_Timeout="0.05")).error["code"] == "timeout"
    await is_clean(engine, 1)


async def test_official_client_does_not_ask_again_and_says_what_it_was() -> None:
    async with serving() as stack:
        stack.engine.default = Reply(end_gate=gate())
        async with openai.AsyncOpenAI(base_url=f"{stack.wire.url}/v1", api_key="none", max_retries=2, timeout=5) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": "Hi"}], extra_body={"timeout": SHORT_S}
                )
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        assert len(stack.engine.submits) == 1
        await is_clean(stack.engine, 1)
