"""An engine that ends under a request: whoever has been sent nothing of the answer does not notice."""

import asyncio
import json
import logging

import pytest

from runner.api.call import Call, Choice
from tests.api.test_status import metrics
from tests.api.wire import COMPLETIONS, HELLO, Wire
from tests.fakes import FakeEngineClient, Reply


async def test_an_answer_that_is_sent_whole_is_made_anew_after_half_of_it(
    wire: Wire, engine: FakeEngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slotfile.access")
    engine.enqueue(Reply(dies_after=2))
    reply = await wire.chat()
    assert reply.status == 200
    assert reply.json["choices"][0]["message"]["content"] == "Hello, world"
    assert reply.json["usage"]["completion_tokens"] == 3
    assert " n_completion=3 " in caplog.text


async def test_a_choice_that_had_finished_is_kept_while_another_is_made_anew(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(texts=["first"]), Reply(texts=["se", "cond"], dies_after=1))
    reply = await wire.chat(n=2)
    assert [choice["message"]["content"] for choice in reply.json["choices"]] == ["first", "second"]


@pytest.mark.parametrize("texts", [[], ["", ""]], ids=["nothing", "held back"])
async def test_a_stream_without_text_goes_on_as_if_nothing_had_been(wire: Wire, engine: FakeEngineClient, texts: list[str]) -> None:
    engine.enqueue(Reply(texts=[*texts, "Hello"], dies_after=len(texts)))
    reply = await wire.chat(stream=True)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in reply.chunks) == "Hello"
    assert reply.events[-1] == "[DONE]"


async def test_a_stream_with_text_ends_with_an_error_event(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(dies_after=1))
    reply = await wire.chat(stream=True)
    assert reply.status == 200
    assert json.loads(reply.events[-1])["error"]["code"] == "engine_stopped"


async def test_text_that_came_while_the_headers_went_out_is_sent_and_counts_as_sent(engine: FakeEngineClient) -> None:
    call = Call(engine, lambda _: None)
    early, late = Choice(call, 0, "early"), Choice(call, 1, "late")
    early.on_text("a", 1)
    early.on_text("b", 1)
    sent: list[str] = []
    for choice in (early, late):
        choice.stream_to(sent.append)
    assert sent == ["ab"]
    assert [early.restart(), late.restart()] == [False, True]


async def test_a_cancelled_request_is_no_success(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(end_gate=asyncio.Event()))
    reader, writer = await wire.start(HELLO | {"stream": True})
    await reader.readuntil(b"world")
    writer.transport.abort()
    async with asyncio.timeout(2):
        while engine.n_live:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    found = {name: value for name, value in (await metrics(wire)).items() if "request_success" in name or "request_failure" in name}
    counted = {name: value for name, value in found.items() if "_created" not in name}
    assert counted == {'slotfile_request_failure_total{code="request_cancelled"}': 1}


async def test_an_echo_that_was_only_kept_is_not_doubled(wire: Wire, engine: FakeEngineClient) -> None:
    engine.enqueue(Reply(texts=["prompt", " answer"], dies_after=1))
    assert (await wire.post(COMPLETIONS, {"prompt": "prompt", "echo": True})).json["choices"][0]["text"] == "prompt answer"
