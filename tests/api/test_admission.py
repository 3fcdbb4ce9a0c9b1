"""What is refused for its size alone, before the engine hears of it."""

import asyncio
import json
import time
from typing import Any

import pytest

from runner.api import bounds
from runner.api.chat_completions import parse as parse_chat
from runner.api.completions import parse as parse_text
from runner.api.parameters import MAX_CHOICES
from runner.errors import ContextLengthExceeded, InvalidRequest
from runner.serving.length import fewest_tokens, text_bytes
from tests.api.wire import COMPLETIONS, Wire
from tests.fakes import FakeEngineClient, Reply, model_info

# A slot of 512 tokens of 10 bytes at most: 5,110 bytes may fit, one more cannot.
INFO = model_info(n_ctx_slot=512, longest_piece_bytes=10)


def body(**fields: Any) -> bytes:
    """JSON."""
    return json.dumps(fields).encode()


def user(text: str, role: str = "user") -> dict[str, str]:
    """A message."""
    return {"role": role, "content": text}


@pytest.mark.parametrize(("text", "n_bytes"), [("abc", 3), ("é", 2), ("😀", 4), ("", 0)])
def test_length_is_that_of_utf8(text: str, n_bytes: int) -> None:
    assert text_bytes(text) == n_bytes
    assert text_bytes(text + "\x04", b"\x04") == n_bytes


@pytest.mark.parametrize(("n_bytes", "longest", "n_tokens"), [(0, 10, 0), (1, 10, 1), (10, 10, 1), (11, 10, 2), (10**9, 0, 0)])
def test_tokens_at_least(n_bytes: int, longest: int, n_tokens: int) -> None:
    assert fewest_tokens(n_bytes, longest) == n_tokens


@pytest.mark.parametrize("text", ["x" * 5110, "é" * 2555])
def test_what_may_fit_goes_to_the_engine(text: str) -> None:
    assert parse_text(body(prompt=text), INFO).prompts
    assert parse_chat(body(messages=[user(text)]), INFO).prompts
    assert parse_text(body(prompt=text * 100), model_info(n_ctx_slot=512)).prompts


@pytest.mark.parametrize("text", ["x" * 5111, "é" * 2556])
def test_what_cannot_fit_is_told_so_with_both_numbers(text: str) -> None:
    message = "The prompt has at least 512 tokens; a slot holds 512, and one at least must be left for the answer"
    for prompt in (text, ["short", text]):
        with pytest.raises(ContextLengthExceeded) as caught:
            parse_text(body(prompt=prompt), INFO)
        assert (str(caught.value), caught.value.param) == (message, "prompt")
    with pytest.raises(ContextLengthExceeded) as caught:
        parse_chat(body(messages=[user(text[:1000]), user(text[1000:], "system")]), INFO)
    assert (str(caught.value), caught.value.param) == (message, "messages")


def test_what_a_template_may_leave_out_is_not_counted() -> None:
    messages = [user("<think>" + "x" * 9999 + "</think>", "assistant"), user(" " * 9999 + "x" + "\n" * 9999)]
    assert parse_chat(body(messages=messages), INFO).prompts


@pytest.mark.parametrize("n", [512, 200_000])
def test_token_ids_are_counted_before_they_are_looked_at(n: int) -> None:
    for prompt in ([-1] * n, [[-1] * n], [1] * (n - 1) + ["text"]):
        with pytest.raises(ContextLengthExceeded, match=f"The prompt has {n:,} tokens; a slot holds 512"):
            parse_text(body(prompt=prompt), INFO)


@pytest.mark.parametrize("item", ["", [1]])
def test_prompts_are_counted_before_they_are_looked_at(item: object) -> None:
    with pytest.raises(InvalidRequest, match=f"has {MAX_CHOICES + 1} prompts; the limit is {MAX_CHOICES}"):
        parse_text(body(prompt=[item] * (MAX_CHOICES + 1)), INFO)


def test_content_parts_are_counted_before_they_are_looked_at() -> None:
    with pytest.raises(InvalidRequest, match="There are 4,097 content parts; the limit is 4,096"):
        parse_chat(body(messages=[{"role": "user", "content": [{"type": "?"}] * 4097}]), INFO)


@pytest.fixture
def engine() -> FakeEngineClient:
    """An engine with small slots."""
    return FakeEngineClient(INFO)


async def test_over_http_nothing_reaches_the_engine(wire: Wire, engine: FakeEngineClient) -> None:
    started = time.monotonic()
    reply = await wire.post(COMPLETIONS, {"prompt": "A" * 1_000_000})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert "at least 100,000 tokens" in reply.error["message"]
    assert time.monotonic() - started < 1.0
    assert engine.submits == []


async def _until_live(engine: FakeEngineClient, n: int) -> None:
    while engine.n_live < n:  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.01)


async def test_prompts_of_all_live_requests_have_a_bound(wire: Wire, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_LIVE_BYTES", 5000)
    gate = asyncio.Event()
    engine.default = Reply(end_gate=gate)
    first = asyncio.create_task(wire.post(COMPLETIONS, {"prompt": "x" * 2000, "n": 2}))
    await _until_live(engine, 2)
    refused = await wire.post(COMPLETIONS, {"prompt": "x" * 1001})
    assert (refused.status, refused.error["code"]) == (503, "server_overloaded")
    assert refused.error["message"] == "All prompts together would have 5,001 bytes; the limit is 5,000"
    assert int(refused.headers["retry-after"]) >= 1
    second = asyncio.create_task(wire.post(COMPLETIONS, {"prompt": "x" * 1000}))
    await _until_live(engine, 3)
    gate.set()
    assert [(await task).status for task in (first, second)] == [200, 200]
    # One alone may be as large as a body may.
    assert (await wire.post(COMPLETIONS, {"prompt": ["x" * 5000, "x" * 5000]})).status == 200
    assert (await wire.post(COMPLETIONS, {"prompt": "x"})).status == 200
