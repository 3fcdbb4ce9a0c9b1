"""Text completions: shapes, several prompts, echo."""

import pytest

from tests.api.wire import COMPLETIONS, Wire
from tests.fakes import FakeEngineClient, Reply


async def test_whole_answer_has_the_shape_openai_documents(wire: Wire) -> None:
    answer = (await wire.post(COMPLETIONS, {"prompt": "x"})).json
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    answer.pop("timings")
    assert answer == {
        "object": "text_completion",
        "model": "fake-model",
        "system_fingerprint": "slotfile-1.2.3",
        "choices": [{"index": 0, "text": "Hello, world", "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 3}},
    }


async def test_stream_is_text_then_reason_then_done(wire: Wire) -> None:
    reply = await wire.post(COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage = reply.chunks
    texts = ["Hello", ", ", "world"]
    assert [chunk["choices"] for chunk in chunks] == [
        *([{"index": 0, "text": text, "finish_reason": None, "logprobs": None}] for text in texts),
        [{"index": 0, "text": "", "finish_reason": "stop", "logprobs": None}],
    ]
    assert {chunk["object"] for chunk in [*chunks, usage]} == {"text_completion"}
    assert [chunk["usage"] for chunk in chunks] == [None] * 4
    assert usage["usage"]["total_tokens"] == 10


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_numbered_prompt_by_prompt(wire: Wire, engine: FakeEngineClient, stream: bool) -> None:
    engine.enqueue(*(Reply(texts=[text]) for text in "abcd"))
    reply = await wire.post(COMPLETIONS, {"prompt": ["p", "q"], "n": 2, "seed": 5, "stream": stream})
    assert [(submit.prompt.text, submit.seed_offset) for submit in engine.submits] == [("p", 0), ("p", 1), ("q", 0), ("q", 1)]  # type: ignore[union-attr]
    assert {submit.sampling.seed for submit in engine.submits} == {5}
    if stream:
        texts = {c["index"]: c["text"] for chunk in reply.chunks for c in chunk["choices"] if c["text"]}
        assert texts == {0: "a", 1: "b", 2: "c", 3: "d"}
    else:
        assert [(c["index"], c["text"]) for c in reply.json["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
        assert reply.json["usage"]["prompt_tokens"] == 14


async def test_echo_is_the_engines_work(wire: Wire, engine: FakeEngineClient) -> None:
    await wire.post(COMPLETIONS, {"prompt": [1, 2], "echo": True})
    assert engine.submits[0].echo
