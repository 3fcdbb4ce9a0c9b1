"""Chat completions: OpenAI's shapes, whole and streamed, byte for byte where the framing matters."""

import asyncio
import json
from typing import Any

import pytest

from runner.errors import ContextLengthExceeded, EngineCrashed, EngineStopped
from runner.serving.client import EngineState
from runner.serving.protocol import ChatPrompt
from tests.api.wire import HELLO, Wire
from tests.fakes import FakeEngineClient, Reply

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 3}}


async def test_whole_answer_has_the_shape_openai_documents(wire: Wire) -> None:
    reply = await wire.chat()
    answer = reply.json
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("application/json")
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    times = {f"{name}_ms" for name in ("prompt", "predicted", "queue", "parked", "ttft", "total")}
    assert set(answer.pop("timings")) >= {"cache_n", "prompt_n", "predicted_n", *times}
    assert answer == {
        "object": "chat.completion",
        "model": "fake-model",
        "system_fingerprint": "slotfile-1.2.3",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": USAGE,
    }


def _delta(**delta: str) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}]


async def test_stream_is_role_then_text_then_reason_then_done(wire: Wire) -> None:
    reply = await wire.chat(stream=True)
    chunks = reply.chunks
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert [chunk["choices"] for chunk in chunks] == [
        _delta(role="assistant", content=""),
        _delta(content="Hello"),
        _delta(content=", "),
        _delta(content="world"),
        [{"index": 0, "delta": {}, "finish_reason": "stop", "logprobs": None}],
    ]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": False}])
async def test_usage_is_absent_unless_asked_for(wire: Wire, options: Any) -> None:
    reply = await wire.chat(stream=True, stream_options=options)
    assert not any("usage" in chunk for chunk in reply.chunks)


async def test_usage_comes_in_a_last_chunk_without_choices(wire: Wire) -> None:
    *chunks, last = (await wire.chat(stream=True, stream_options={"include_usage": True})).chunks
    assert [chunk["usage"] for chunk in chunks] == [None] * 5
    assert (last["choices"], last["usage"]) == ([], USAGE)


async def test_stream_options_without_a_stream_are_ignored(wire: Wire) -> None:
    assert (await wire.chat(stream_options={"include_usage": True})).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_without_tokens_is_complete(wire: Wire, engine: FakeEngineClient, stream: bool) -> None:
    engine.enqueue(Reply(texts=[], reason="length"))
    reply = await wire.chat(stream=stream)
    if stream:
        assert [chunk["choices"][0]["delta"] for chunk in reply.chunks] == [{"role": "assistant", "content": ""}, {}]
        assert reply.chunks[-1]["choices"][0]["finish_reason"] == "length"
    else:
        assert reply.json["choices"][0]["message"]["content"] == ""
        assert reply.json["choices"][0]["finish_reason"] == "length"


async def test_held_back_text_makes_no_chunk(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(texts=["", "ab", ""]))
    reply = await wire.chat(stream=True)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in reply.chunks] == ["", "ab", None]
    assert reply.chunks[-1]["timings"]["predicted_n"] == 3


TEXTS = [
    "plain",
    'quo"te',
    "back\\slash",
    "new\nline",
    "\r\n\r\n",
    "data: x\n\n",
    "\x00\x01",
    "\u2028\u2029",
    "😀👩‍👩‍👧",
    "漢字",
    "\ufffd",
    "</script>",
]


async def test_any_text_survives_the_framing(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(texts=TEXTS), Reply(texts=TEXTS))
    streamed = (await wire.chat(stream=True)).chunks
    assert [chunk["choices"][0]["delta"].get("content") for chunk in streamed] == ["", *TEXTS, None]
    assert (await wire.chat()).json["choices"][0]["message"]["content"] == "".join(TEXTS)


async def test_http_1_0_client_gets_a_stream_without_chunks_that_ends_with_the_connection(wire: Wire) -> None:
    reply = await wire.raw(wire.message(HELLO | {"stream": True}, version="1.0"))
    assert "transfer-encoding" not in reply.headers
    assert len(reply.chunks) == 5


async def test_chunked_framing_is_exact_and_the_connection_is_kept(wire: Wire) -> None:
    reader, writer = await wire.start(HELLO | {"stream": True})
    for _ in range(2):
        assert b"Transfer-Encoding: chunked" in await reader.readuntil(b"\r\n\r\n")
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            assert await reader.readexactly(2) == b"\r\n"
        assert await reader.readexactly(2) == b"\r\n"
        assert body.endswith(b"data: [DONE]\n\n")
        writer.write(wire.message(HELLO | {"stream": True}))
    writer.close()


async def test_headers_and_first_bytes_come_before_the_first_token(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(text_gate=asyncio.Event()))
    reader, writer = await wire.start(HELLO | {"stream": True})
    head = await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 1)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'"role":"assistant"' in await asyncio.wait_for(reader.readuntil(b"\n\n"), 1)
    writer.close()


async def test_waiting_stream_sends_comments(wire: Wire, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.api.sse.KEEP_ALIVE_S", 0.05)
    gate = asyncio.Event()
    engine.enqueue(Reply(text_gate=gate))
    task = asyncio.ensure_future(wire.chat(stream=True))
    await asyncio.sleep(0.3)
    gate.set()
    reply = await task
    assert 3 <= reply.body.count(b": keep-alive\n\n") <= 8
    assert len(reply.chunks) == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_is_a_status_before_any_event(wire: Wire, engine: FakeEngineClient, stream: bool) -> None:
    engine.enqueue(Reply(refuse=ContextLengthExceeded("The prompt has 513 tokens; a slot holds 512", param="messages")))
    reply = await wire.chat(stream=stream)
    assert reply.status == 400
    assert reply.error == {
        "message": "The prompt has 513 tokens; a slot holds 512",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


async def test_failure_in_a_stream_is_an_error_event_and_no_done(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(texts=["a"], fail=EngineStopped("The engine ended")))
    events = (await wire.chat(stream=True)).events
    assert json.loads(events[-1]) == {
        "error": {"message": "The engine ended", "type": "server_error", "param": None, "code": "engine_stopped"}
    }
    assert "[DONE]" not in events
    assert not any('"finish_reason":"' in event for event in events)


async def test_failure_of_a_whole_answer_is_a_status(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(fail=EngineCrashed("The engine ended twice")))
    reply = await wire.chat()
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (500, "engine_crashed", "false")


@pytest.mark.parametrize("stream", [False, True])
async def test_n_answers_have_indices_and_seeds_of_their_own(wire: Wire, engine: FakeEngineClient, stream: bool) -> None:
    engine.enqueue(Reply(texts=["a"]), Reply(texts=["b", "b"]), Reply(texts=[], reason="length"))
    reply = await wire.chat(n=3, seed=2**32 - 3, stream=stream, stream_options={"include_usage": True})
    assert [(submit.sampling.seed, submit.seed_offset) for submit in engine.submits] == [(2**32 - 3, offset) for offset in range(3)]
    assert len({submit.request_id for submit in engine.submits}) == 3
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 3}}
    if not stream:
        choices = reply.json["choices"]
        assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in choices] == [
            (0, "a", "stop"),
            (1, "bb", "stop"),
            (2, "", "length"),
        ]
        assert reply.json["usage"] == usage
        return
    texts: list[str] = ["", "", ""]
    reasons: list[str | None] = [None, None, None]
    for chunk in reply.chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"]
    assert (texts, reasons) == (["a", "bb", ""], ["stop", "stop", "length"])
    assert reply.chunks[-1]["usage"] == usage


async def test_one_failing_answer_of_several_ends_the_others(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(end_gate=asyncio.Event()), Reply(fail=EngineStopped("gone")))
    reply = await wire.chat(n=2)
    assert (reply.status, reply.error["code"]) == (503, "engine_stopped")
    assert engine.cancelled == [engine.submits[0].request_id]


async def test_requests_are_taken_while_the_engine_restarts(wire: Wire, engine: FakeEngineClient) -> None:
    engine.state = EngineState.RESTARTING
    assert (await wire.chat()).status == 200


ROLES = [
    (
        [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}],
        [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}],
    ),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], [{"role": "user", "content": "a\nb"}]),
    ([{"role": "user", "content": "x", "name": "Ann", "foo": 1}], [{"role": "user", "content": "x", "name": "Ann"}]),
    ([{"role": "user", "content": ""}], [{"role": "user", "content": ""}]),
    (
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ],
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": "{}"}, "id": "c1", "type": "function"}],
            },
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ],
    ),
]


@pytest.mark.parametrize(("sent", "rendered"), ROLES)
async def test_messages_reach_the_template(wire: Wire, engine: FakeEngineClient, sent: Any, rendered: Any) -> None:
    assert (await wire.chat(messages=sent)).status == 200
    assert engine.submits[0].prompt == ChatPrompt(rendered)
