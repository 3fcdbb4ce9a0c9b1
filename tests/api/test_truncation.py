"""`truncation`: what the answer says was dropped, and what is refused."""

import asyncio
import json
from typing import Any

import openai
import pytest

from runner.api import chat_completions
from runner.api.chat_completions import MAX_MESSAGES
from runner.api.server import Server
from runner.errors import ContextLengthExceeded, InvalidRequest
from runner.serving.protocol import ChatPrompt
from tests.api.wire import CHAT, COMPLETIONS, HELLO, Wire
from tests.fakes import FakeEngineClient, Reply, model_info


@pytest.mark.parametrize("n_dropped", [0, 12])
async def test_whole_answer_says_how_many_messages_went(wire: Wire, engine: FakeEngineClient, n_dropped: int) -> None:
    engine.enqueue(Reply(n_dropped=n_dropped))
    reply = await wire.chat(truncation="auto")
    assert reply.json["truncation"] == {"dropped_messages": n_dropped}
    assert engine.submits[0].prompt == ChatPrompt(HELLO["messages"], truncates=True)


@pytest.mark.parametrize("n", [1, 2])
async def test_stream_says_it_in_the_first_chunk_of_each_choice(wire: Wire, engine: FakeEngineClient, n: int) -> None:
    engine.enqueue(*[Reply(n_dropped=12)] * n)
    chunks = (await wire.chat(truncation="auto", stream=True, n=n, stream_options={"include_usage": True})).chunks
    told = [chunk for chunk in chunks if "truncation" in chunk]
    assert told == chunks[:n]
    assert [(chunk["choices"][0]["index"], chunk["truncation"]) for chunk in told] == [(i, {"dropped_messages": 12}) for i in range(n)]
    assert all(chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""} for chunk in told)


@pytest.mark.parametrize("fields", [{}, {"truncation": None}, {"truncation": "disabled"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_by_default_nothing_goes_and_nothing_is_said(
    wire: Wire, engine: FakeEngineClient, fields: dict[str, Any], stream: bool
) -> None:
    chat, text = await wire.chat(stream=stream, **fields), await wire.post(COMPLETIONS, {"prompt": "x", "stream": stream, **fields})
    assert (chat.status, text.status) == (200, 200)
    assert b"truncation" not in chat.body + text.body
    assert engine.submits[0].prompt == ChatPrompt(HELLO["messages"])


@pytest.mark.parametrize("value", ["", "Auto", "last", "x" * 1000, 7, True, {"type": "auto"}])
async def test_value_that_is_none_is_refused_by_name(wire: Wire, engine: FakeEngineClient, value: Any) -> None:
    for reply in (await wire.chat(truncation=value), await wire.post(COMPLETIONS, {"prompt": "x", "truncation": value})):
        assert (reply.status, reply.error["param"]) == (400, "truncation")
        assert len(reply.error["message"]) < 300
    assert not engine.submits


@pytest.mark.parametrize("prompt", ["x", ["x", "y"], [1, 2]])
async def test_text_has_no_turns(wire: Wire, engine: FakeEngineClient, prompt: Any) -> None:
    reply = await wire.post(COMPLETIONS, {"prompt": prompt, "truncation": "auto"})
    assert (reply.status, reply.error["param"]) == (400, "truncation")
    assert "needs messages: use /v1/chat/completions" in reply.error["message"]
    assert not engine.submits


async def test_official_client_sees_the_field(server: Server, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(n_dropped=4), Reply(n_dropped=4))
    ask: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "Hi"}], "extra_body": {"truncation": "auto"}}
    async with openai.AsyncOpenAI(base_url=f"{server.urls[0]}/v1", api_key="none", max_retries=0, timeout=5) as client:
        whole = await client.chat.completions.create(**ask)
        first = await anext(aiter(await client.chat.completions.create(stream=True, **ask)))
    assert whole.model_extra is not None
    assert first.model_extra is not None
    assert whole.model_extra["truncation"] == first.model_extra["truncation"] == {"dropped_messages": 4}


async def test_prompt_that_cannot_be_cut_is_a_400_before_any_event(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(refuse=ContextLengthExceeded("The prompt has 513 tokens without its earlier turns; a slot holds 512")))
    reply = await wire.chat(truncation="auto", stream=True)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


async def test_answer_that_starts_anew_says_what_the_next_engine_dropped(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(n_dropped=6, dies_after=0))
    assert (await wire.chat(truncation="auto")).json["truncation"] == {"dropped_messages": 6}


TURN = [{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": "y" * 100}]
LONG = model_info(n_ctx_slot=512, longest_piece_bytes=10)


def parse(messages: list[dict[str, Any]], info: Any = LONG, **fields: Any) -> Any:
    return chat_completions.parse(json.dumps({"messages": messages, **fields}).encode(), info)


def test_long_conversation_is_measured_without_its_earlier_turns() -> None:
    messages = [{"role": "system", "content": "s"}, *TURN * 2000, {"role": "user", "content": "last"}]
    assert len(parse(messages, truncation="auto").prompts[0].messages) == 4002
    with pytest.raises(ContextLengthExceeded):
        parse(messages)
    with pytest.raises(ContextLengthExceeded, match="at least 600 tokens"):
        parse([*messages[:-1], {"role": "user", "content": "z" * 5999}], truncation="auto")
    with pytest.raises(ContextLengthExceeded, match="at least 601 tokens"):
        parse([{"role": "developer", "content": "z" * 6000}, *messages[1:]], truncation="auto")


def test_messages_are_bounded_in_number() -> None:
    messages = [{"role": "user", "content": ""}] * MAX_MESSAGES
    assert parse(messages, truncation="auto").truncates
    with pytest.raises(InvalidRequest, match="There are 16,385 messages; the limit is 16,384") as caught:
        parse([*messages, messages[0]], truncation="auto")
    assert caught.value.param == "messages"
    assert parse([*messages, messages[0]], model_info(n_ctx_slot=20_000), truncation="auto").truncates


async def test_conversation_of_many_turns_does_not_hold_up_the_server(wire: Wire) -> None:
    body = HELLO | {"truncation": "auto", "messages": TURN * 8000 + [{"role": "user", "content": "last"}]}
    long = asyncio.ensure_future(wire.post(CHAT, body))
    while not long.done():
        async with asyncio.timeout(1):
            assert (await wire.get("/health")).status == 200
    assert (await long).status == 200
