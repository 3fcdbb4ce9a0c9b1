"""Conversations and answers at the end of a slot, on SmolLM2: what goes, what stays, and what is said of it."""

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from runner.api.server import Server, bind
from runner.bundle.catalogue import find_entry, read_catalogue
from runner.config import ServerConfig
from runner.serving.client import EngineClient
from tests.api.wire import Wire
from tests.conftest import ROOT, engine_config

pytestmark = pytest.mark.asyncio(loop_scope="session")

N_CTX = 256
SYSTEM = {"role": "system", "content": "Zanzibar is the place where you repeat what is said."}
WORDS = ("river", "stone", "copper", "garden", "window", "silver", "market")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def wire(smollm2_path: Path) -> AsyncIterator[Wire]:
    """A server with one slot."""
    template = find_entry(read_catalogue(ROOT / "models.toml"), "smollm2-135m")[1].chat_template
    engine = EngineClient(engine_config(smollm2_path, n_slots=1, n_ctx_slot=N_CTX, n_batch=64, chat_template=template))
    config = ServerConfig(port=0)
    server = Server(config, engine, bind(config), version="0")
    await engine.start()
    await server.start()
    await engine.wait_ready()
    async with aiohttp.ClientSession(base_url=server.urls[0]) as session:
        yield Wire(server.urls[0], session)
    await server.close()
    await engine.close()


def turn(word: str) -> list[dict[str, str]]:
    """A question and its answer, of about 30 tokens."""
    return [{"role": "user", "content": f"Repeat after me: {word} {word}"}, {"role": "assistant", "content": f"{word} {word}"}]


def conversation(n_turns: int) -> list[dict[str, str]]:
    """So many turns and a last question."""
    turns = [message for number in range(n_turns) for message in turn(WORDS[number % len(WORDS)])]
    return [SYSTEM, *turns, turn("Kilimanjaro")[0]]


async def ask(wire: Wire, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    """A greedy answer of 12 tokens."""
    reply = await wire.chat(messages=messages, temperature=0, max_tokens=12, ignore_eos=True, **fields)
    assert reply.status == 200
    return dict(reply.json)


async def test_long_conversation_is_answered_as_the_rest_of_it_is(wire: Wire) -> None:
    """The system prompt and the last turn are there: answer and count are those of what was kept, and not those without the former."""
    messages = conversation(100)
    cut = await ask(wire, messages, truncation="auto")
    n_dropped = cut["truncation"]["dropped_messages"]
    assert 170 < n_dropped < 200
    assert n_dropped % 2 == 0
    left = [SYSTEM, *messages[1 + n_dropped :]]
    kept = await ask(wire, left, cache_prompt=False)
    assert (cut["choices"], cut["usage"]["prompt_tokens"]) == (kept["choices"], kept["usage"]["prompt_tokens"])
    assert "kilimanjaro" in cut["choices"][0]["message"]["content"].lower()
    assert cut["usage"]["prompt_tokens"] <= N_CTX - 12
    other = await ask(wire, [{"role": "system", "content": "Be."}, *messages[1:]], truncation="auto")
    assert other["truncation"] == cut["truncation"]
    assert 5 < cut["usage"]["prompt_tokens"] - other["usage"]["prompt_tokens"] < 20


async def test_official_client_streams_a_truncated_conversation(wire: Wire) -> None:
    async with openai.AsyncOpenAI(base_url=f"{wire.url}/v1", api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {"messages": conversation(60), "max_tokens": 4, "extra_body": {"truncation": "auto"}}
        chunks = [chunk async for chunk in await client.chat.completions.create(model="any", stream=True, **fields)]
    told = [chunk.model_extra["truncation"] for chunk in chunks if chunk.model_extra and "truncation" in chunk.model_extra]
    assert told == [{"dropped_messages": told[0]["dropped_messages"]}]
    assert told[0]["dropped_messages"] > 90


async def test_next_turns_of_a_truncated_conversation_find_it_in_the_cache(wire: Wire) -> None:
    messages, dropped, computed = conversation(40), [], []
    for word in (*WORDS, *WORDS[:3]):
        answer = await ask(wire, messages, truncation="auto")
        dropped.append(answer["truncation"]["dropped_messages"])
        computed.append(answer["timings"]["prompt_n"])
        messages = [*messages, {"role": "assistant", "content": "Kilimanjaro"}, turn(word)[0]]
    moved = [before != after for before, after in pairwise(dropped)]
    assert sum(moved) <= 4  # half of the room holds 3 to 4 turns
    assert max(n for n, has_moved in zip(computed[1:], moved, strict=True) if not has_moved) < 50


@pytest.mark.parametrize("fields", [{}, {"truncation": "disabled"}, {"truncation": None}])
@pytest.mark.parametrize("stream", [False, True])
async def test_by_default_a_chat_that_does_not_fit_is_refused_with_both_numbers(wire: Wire, fields: dict[str, Any], stream: bool) -> None:
    """Case 11."""
    reply = await wire.chat(messages=[SYSTEM, {"role": "user", "content": "word " * 300}], stream=stream, **fields)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "context_length_exceeded", "messages")
    assert reply.error["type"] == "invalid_request_error"
    n_tokens = int(reply.error["message"].split()[3].replace(",", ""))
    assert 300 < n_tokens < 400
    assert f"a slot holds {N_CTX}," in reply.error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_last_turn_that_does_not_fit_is_refused_with_both_numbers(wire: Wire, stream: bool) -> None:
    messages = [*conversation(5)[:-1], {"role": "user", "content": "word " * 300}]
    reply = await wire.chat(messages=messages, stream=stream, truncation="auto")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "context_length_exceeded", "messages")
    assert "tokens without its earlier turns; a slot holds 256," in reply.error["message"]


@pytest.mark.parametrize("fields", [{}, {"max_tokens": N_CTX}, {"max_tokens": N_CTX, "truncation": "auto"}, {"truncation": "auto"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_reaches_the_slots_end_stops_with_length(wire: Wire, fields: dict[str, Any], stream: bool) -> None:
    """Case 9: a prompt of four fifths of the slot, nothing is shifted."""
    messages = [{"role": "user", "content": "word " * 180}]
    reply = await wire.chat(messages=messages, ignore_eos=True, stream=stream, stream_options={"include_usage": True}, **fields)
    last = reply.chunks[-1] if stream else reply.json
    assert '"finish_reason":"length"' in reply.body.decode()
    assert 180 < last["usage"]["prompt_tokens"] < 240
    assert last["usage"]["total_tokens"] == N_CTX
