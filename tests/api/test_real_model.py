"""The whole way from an HTTP client to SmolLM2 and back."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
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
from tests.api.wire import CHAT, COMPLETIONS, HELLO, Reply, Wire
from tests.conftest import ROOT, engine_config

pytestmark = pytest.mark.asyncio(loop_scope="session")

N_SLOTS = 4
N_CTX = 512
EMOJI = "😀 😺 👩‍👩‍👧 漢字 ключ 😀 😺 👩‍👩‍👧 漢字 ключ 😀 😺"


class Stack(Wire):
    """A server, its engine, and a client."""

    def __init__(self, engine: EngineClient, server: Server, session: aiohttp.ClientSession) -> None:
        super().__init__(server.urls[0], session)
        self.engine = engine

    async def complete(self, prompt: Any, **fields: Any) -> Reply:
        """A greedy text completion."""
        return await self.post(COMPLETIONS, {"prompt": prompt, "temperature": 0} | fields)

    async def both(self, prompt: Any, **fields: Any) -> tuple[str, str]:
        """Text and reason of a completion that is the same streamed and whole."""
        (choice,) = (await self.complete(prompt, **fields)).json["choices"]
        chunks = (await self.complete(prompt, stream=True, **fields)).chunks
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [choice["finish_reason"]]
        return choice["text"], choice["finish_reason"]

    async def idle(self) -> None:
        """Wait until the engine has nothing left to do."""
        async with asyncio.timeout(20):
            while self.engine.n_live:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(smollm2_path: Path) -> AsyncIterator[Stack]:
    """One engine for all tests of this file."""
    template = find_entry(read_catalogue(ROOT / "models.toml"), "smollm2-135m")[1].chat_template
    engine = EngineClient(engine_config(smollm2_path, n_slots=N_SLOTS, n_ctx_slot=N_CTX, n_batch=64, chat_template=template))
    config = ServerConfig(port=0, max_queue=16)
    server = Server(config, engine, bind(config), version="0")
    await engine.start()
    await server.start()
    async with aiohttp.ClientSession(base_url=server.urls[0]) as session:
        stack = Stack(engine, server, session)
        assert (await stack.get("/health")).status == 503
        await engine.wait_ready()
        yield stack
    await server.close()
    await engine.close()


async def test_official_client_is_told_the_capital_of_france(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0, max_tokens=24
        )
    assert "Paris" in (answer.choices[0].message.content or "")


@pytest.mark.parametrize("n", [N_CTX - 1, N_CTX, N_CTX + 1, 600, 2049])
@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_is_measured_against_the_slot(stack: Stack, n: int, stream: bool) -> None:
    reply = await stack.complete([100] * n, stream=stream, max_tokens=1)
    if n < N_CTX:
        assert reply.status == 200
        assert '"finish_reason":"length"' in reply.body.decode()
        return
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "context_length_exceeded", "prompt")
    assert f"{n:,}" in reply.error["message"]
    assert f"{N_CTX:,}" in reply.error["message"]


LIMITED = [({"max_tokens": 600}, 480), ({"max_tokens": 32}, 480), ({}, 490)]


@pytest.mark.parametrize(("fields", "n"), LIMITED)
async def test_answers_that_ask_for_more_than_a_slot_holds_end_there_and_touch_nobody(stack: Stack, fields: dict[str, int], n: int) -> None:
    """Cases 5 (with a region for each slot) and 9: no shifting of the context, no sequence that ends for another one's length."""
    pid = stack.engine.pid
    prompts = [[100 + slot * 1000 + index for index in range(n)] for slot in range(N_SLOTS)]
    replies = await asyncio.gather(*(stack.complete(prompt, ignore_eos=True, **fields) for prompt in prompts))
    for reply in replies:
        (choice,), usage = reply.json["choices"], reply.json["usage"]
        assert choice["finish_reason"] == "length"
        assert (usage["prompt_tokens"], usage["total_tokens"]) == (n, N_CTX)
    assert stack.engine.pid == pid


@pytest.mark.parametrize("stream", [False, True])
async def test_system_prompt_that_leaves_room_for_little_ends_at_the_slots_end(stack: Stack, stream: bool) -> None:
    """Case 9."""
    messages = [{"role": "system", "content": "word " * 450}, {"role": "user", "content": "Count."}]
    fields = {"messages": messages, "ignore_eos": True, "stream": stream, "stream_options": {"include_usage": True}}
    reply = await stack.post(CHAT, fields)
    answer = reply.chunks[-1] if stream else reply.json
    assert '"finish_reason":"length"' in reply.body.decode()
    assert 450 < answer["usage"]["prompt_tokens"] < N_CTX
    assert answer["usage"]["total_tokens"] == N_CTX


async def test_waiting_client_is_told_its_place_and_its_prompts_progress_and_a_cancelled_one_makes_room(stack: Stack) -> None:
    long = {"max_tokens": 400, "ignore_eos": True, "stream": True}
    running = [
        asyncio.create_task(stack.post(COMPLETIONS, long | {"prompt": f"{index},"}, X_Request_Id=f"long-{index}"))
        for index in range(N_SLOTS)
    ]
    async with asyncio.timeout(20):
        while sum(row["state"] == "decode" for row in (await stack.get("/v1/requests")).json["data"]) < N_SLOTS:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    body = {"prompt": [100] * 400, "max_tokens": 4, "stream": True}
    asking = asyncio.create_task(stack.post(COMPLETIONS, body, X_Queue_Events="1", X_Request_Id="asking"))
    async with asyncio.timeout(20):
        while not any(row["place"] for row in (await stack.get("/v1/requests")).json["data"]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    (cancelled,) = (await stack.send("DELETE", "/v1/requests/long-0")).json["cancelled"]
    assert cancelled["state"] == "decode"
    assert cancelled["n_generated"] > 0
    text = (await asking).body.decode()
    blocks = [block.removeprefix("event: ").partition("\ndata: ") for block in text.split("\n\n") if block.startswith("event: ")]
    told = [(name, json.loads(data)) for name, _, data in blocks]
    assert told[0] == ("queue", {"place": 1, "n_waiting": 1, "estimated_wait_s": told[0][1]["estimated_wait_s"]})
    assert [name for name, _ in told] == sorted((name for name, _ in told), reverse=True)  # the queue's come first
    progress = [notice for name, notice in told if name == "prefill"]
    assert all(notice["n_prompt"] == 400 and notice["n_cached"] + notice["n_computed"] <= 400 for notice in progress)
    assert text.endswith("data: [DONE]\n\n")
    assert [task.done() for task in running] == [True] + [False] * (N_SLOTS - 1)
    for index in range(1, N_SLOTS):
        assert (await stack.send("DELETE", f"/v1/requests/long-{index}")).status == 200
    for task in running:
        assert '"code":"request_cancelled"' in (await task).events[-1]
    await stack.idle()


async def test_stop_text_split_over_tokens_does_not_leak(stack: Stack) -> None:
    text, reason = await stack.both("1, 2, 3, 4, 5, 6,", stop="9, 10, 11", max_tokens=60)
    assert (text, reason) == (" 7, 8, ", "stop")


async def test_tail_that_was_held_back_is_not_lost(stack: Stack) -> None:
    text, reason = await stack.both("1, 2, 3, 4, 5, 6,", stop="7, 8, X", max_tokens=5)
    assert (text, reason) == (" 7, 8", "length")


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8, 24])
async def test_characters_of_many_bytes_arrive_whole(stack: Stack, max_tokens: int) -> None:
    text, _ = await stack.both(EMOJI, max_tokens=max_tokens)
    assert "\ufffd" not in text[:-1]
    text.encode()


async def test_hot_sampler_makes_valid_json(stack: Stack) -> None:
    hot = {"temperature": 5, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 16, "n": 8}
    reply = await stack.post(COMPLETIONS, {"prompt": EMOJI, "seed": 1} | hot)
    assert [choice["finish_reason"] in ("stop", "length") for choice in reply.json["choices"]] == [True] * 8


async def test_n_answers_differ_and_a_seed_repeats_them(stack: Stack) -> None:
    fields = {"prompt": "Once upon a time", "n": 4, "temperature": 1, "max_tokens": 12}
    first, second = [(await stack.post(COMPLETIONS, fields | {"seed": 7})).json["choices"] for _ in range(2)]
    assert first == second
    assert len({choice["text"] for choice in first}) > 1


async def test_sixteen_streams_never_mix(stack: Stack) -> None:
    words = [f"{chr(ord('A') + index)}{index}" for index in range(16)]
    replies = await asyncio.gather(*(stack.complete(f"{word} " * 12, stream=True, max_tokens=12) for word in words))
    for word, reply in zip(words, replies, strict=True):
        text = "".join(chunk["choices"][0]["text"] for chunk in reply.chunks)
        assert not [other for other in words if other != word and f" {other} " in text]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wait_s", [0.02, 0.5])
async def test_client_that_leaves_frees_its_slot(stack: Stack, stream: bool, wait_s: float) -> None:
    body = {"prompt": [100 + index for index in range(400)], "stream": stream, "ignore_eos": True}
    leaving = [await stack.start(body, COMPLETIONS) for _ in range(N_SLOTS)]
    await asyncio.sleep(wait_s)
    for _, writer in leaving:
        writer.transport.abort()
    await stack.idle()
    assert (await stack.complete("1, 2, 3,", max_tokens=4)).status == 200


async def test_status_is_answered_while_a_prompt_is_computed(stack: Stack) -> None:
    prompts = [asyncio.ensure_future(stack.complete([300 + index] * 400, max_tokens=1)) for index in range(2)]
    while not all(prompt.done() for prompt in prompts):
        for path in ("/health", "/v1/models", "/", "/slots", "/metrics"):
            started = time.monotonic()
            assert (await stack.get(path)).status == 200
            assert time.monotonic() - started < 1.0
        await asyncio.sleep(0.02)


async def test_queue_is_bounded_and_opens_again(stack: Stack) -> None:
    await stack.idle()
    body = {"prompt": "x", "ignore_eos": True, "max_tokens": 4}
    replies = await asyncio.gather(*(stack.post(COMPLETIONS, body | {"stream": bool(index % 2)}) for index in range(N_SLOTS + 16 + 5)))
    statuses = [reply.status for reply in replies]
    assert (statuses.count(200), statuses.count(503)) == (N_SLOTS + 16, 5)
    assert {reply.error["code"] for reply in replies if reply.status == 503} == {"server_overloaded"}
    assert (await stack.complete("x", max_tokens=1)).status == 200


async def test_engine_killed_during_four_streams_fails_these_and_answers_the_waiting_and_a_ninth(stack: Stack) -> None:
    await stack.idle()
    body = HELLO | {"stream": True, "ignore_eos": True, "max_tokens": 200, "temperature": 0}
    running = [await stack.start(body) for _ in range(N_SLOTS)]
    for reader, _ in running:
        await asyncio.wait_for(reader.readuntil(b'"delta":{"content"'), 20)
    waiting = [asyncio.ensure_future(stack.chat(**(body | {"max_tokens": 5}))) for _ in range(4)]
    async with asyncio.timeout(20):
        while stack.engine.n_live < 8:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
    assert stack.engine.pid is not None
    os.kill(stack.engine.pid, signal.SIGKILL)
    for reader, writer in running:
        rest = (await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 20)).decode()
        error = json.loads(rest[rest.index('{"error"') :].splitlines()[0])["error"]
        assert error["code"] == "engine_stopped"
        assert "[DONE]" not in rest
        writer.close()
    ninth = await stack.chat(max_tokens=5)
    assert ninth.status == 200
    for reply in await asyncio.gather(*waiting):
        assert reply.events[-1] == "[DONE]"
    assert (await stack.get("/health")).json == {"status": "ok"}


async def test_access_to_chat_is_counted_in_metrics(stack: Stack) -> None:
    text = (await stack.get("/metrics")).body.decode()
    assert f'route="{CHAT}",status="200"' in text
    assert "slotfile_engine_restarts_total 1.0" in text
