"""What a body may hold: every wrong value is a 400 that names its field, and the engine never hears of it."""

import json
from typing import Any

import msgspec
import pytest

from runner.api import chat_completions, completions, parameters
from runner.api.parameters import MAX_CHOICES, Generation
from runner.api.schemas import ChatBody, CompletionBody
from runner.engine.sampling import SamplingParams
from runner.errors import InvalidRequest
from runner.serving.protocol import TextPrompt, TokenPrompt
from tests.api.wire import CHAT, COMPLETIONS, HELLO, Wire
from tests.fakes import FakeEngineClient, model_info

INFO = model_info(n_ctx_slot=512, n_vocab=1000)


def chat(**fields: Any) -> Generation:
    return chat_completions.parse(json.dumps(HELLO | fields).encode(), INFO)


def complete(**fields: Any) -> Generation:
    return completions.parse(json.dumps({"prompt": "x"} | fields).encode(), INFO)


def refusal(body: bytes, parse: Any = chat_completions.parse) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body, INFO)
    return caught.value


def raw_chat(field: str, literal: str) -> bytes:
    """A chat body with a literal that `json.dumps` would not write."""
    return json.dumps(HELLO)[:-1].encode() + f', "{field}": {literal}}}'.encode()


NUMBERS = ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repeat_penalty", "timeout"]
COUNTS = ["top_k", "repeat_last_n", "seed", "n", "priority", "max_tokens", "max_completion_tokens"]
BOOLEANS = ["stream", "ignore_eos", "cache_prompt"]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"0.5"', "true", "[]", "{}"])
@pytest.mark.parametrize("field", NUMBERS + COUNTS)
def test_number_that_is_none_is_refused_by_name(field: str, literal: str) -> None:
    assert refusal(raw_chat(field, literal)).param == field


@pytest.mark.parametrize("literal", ["1.5", "5.0", "9" * 30, "-" + "9" * 30, "9" * 5000])
@pytest.mark.parametrize("field", ["top_k", "repeat_last_n", "seed", "n"])
def test_count_that_is_no_64_bit_whole_number_is_refused_by_name(field: str, literal: str) -> None:
    assert refusal(raw_chat(field, literal)).param == field


@pytest.mark.parametrize("field", BOOLEANS)
@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_boolean_that_is_none_is_refused_by_name(field: str, value: Any) -> None:
    assert refusal(json.dumps(HELLO | {field: value}).encode()).param == field


OUT_OF_RANGE: list[tuple[str, list[Any]]] = [
    ("temperature", [-0.1, 100.1]),
    ("top_p", [-0.1, 1.1]),
    ("min_p", [-0.1, 1.1]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("presence_penalty", [-2.1, 2.1]),
    ("repeat_penalty", [0, -1, 101]),
    ("top_k", [-5, -2, 2**31]),
    ("repeat_last_n", [-2, 2**31]),
    ("seed", [-1, 2**63]),
    ("n", [0, -1, 9, 1000]),
    ("priority", [2**31, -(2**31) - 1]),
    ("timeout", [-1, 86_401]),
    ("service_tier", ["", "scale", "high", "x" * 1000]),
    ("max_tokens", [0, -1, -(10**12)]),
    ("max_completion_tokens", [0, -1]),
    ("stop", ["", [""], ["a"] * 17, "x" * 1025]),
    ("logit_bias", [{"AI": -100}, {"9999999": 1}, {"1000": 1}, {"-1": 1}, {"5": 101}, {"5": -101}, {"٣": 1}, {"": 1}]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in OUT_OF_RANGE for value in values])
def test_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(json.dumps(HELLO | {field: value}).encode())
    assert error.param == field
    assert len(error.message) < 400


WRONG_TYPES = [
    ("model", 7, "model"),
    ("user", 7, "user"),
    ("service_tier", 7, "service_tier"),
    ("priority", "first", "priority"),
    ("stop", 7, "stop"),
    ("stop", ["a", 7], "stop[1]"),
    ("logit_bias", {"5": "x"}, "logit_bias[...]"),
    ("logit_bias", [[5, 1.0]], "logit_bias"),
    ("stream_options", True, "stream_options"),
    ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage"),
    ("messages", None, "messages"),
    ("messages", "hi", "messages"),
    ("messages", [], "messages"),
    ("messages", ["hi"], "messages[0]"),
    ("messages", [{"content": "hi"}], "messages[0].role"),
    ("messages", [{"role": None, "content": "hi"}], "messages[0].role"),
    ("messages", [{"role": "wizard", "content": "hi"}], "messages[0].role"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": None}], "messages[0].content"),
    ("messages", [{"role": "system", "content": None}], "messages[0].content"),
    ("messages", [{"role": "assistant", "content": None}], "messages[0].content"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [{"role": "user", "content": []}], "messages[0].content"),
    ("messages", [{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
    ("messages", [{"role": "user", "content": [{"text": "hi"}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0].function"),
]


@pytest.mark.parametrize(("field", "value", "param"), WRONG_TYPES)
def test_wrong_type_is_refused_with_its_place(field: str, value: Any, param: str) -> None:
    assert refusal(json.dumps(HELLO | {field: value}).encode()).param == param


UNSUPPORTED = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
    ("response_format", {"type": "xml"}),
    ("response_format", "text"),
    ("logprobs", True),
    ("top_logprobs", 2),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x", "format": "wav"}),
    ("grammar", 'root ::= "a"'),
    ("json_schema", {"type": "object"}),
    ("guided_json", {"type": "object"}),
    ("tools", [{"type": "function", "function": {"name": "f" * 1000}}]),
    ("logprobs", 1),
    ("top_logprobs", False),
]


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED)
def test_what_would_change_the_answer_and_is_not_offered_is_refused(field: str, value: Any) -> None:
    assert refusal(json.dumps(HELLO | {field: value}).encode()).param == field


HARMLESS = [
    ("tools", []),
    ("tool_choice", "none"),
    ("tool_choice", "auto"),
    ("functions", []),
    ("response_format", {"type": "text"}),
    ("logprobs", False),
    ("top_logprobs", 0),
    ("modalities", ["text"]),
    ("store", True),
    ("metadata", {"a": "b"}),
    ("parallel_tool_calls", True),
    ("reasoning_effort", "low"),
    ("foo", {"bar": [1, "\u0000"]}),
]


@pytest.mark.parametrize(("field", "value"), HARMLESS)
def test_field_without_effect_changes_nothing(field: str, value: Any) -> None:
    assert chat(**{field: value}) == chat()


NULLABLE = [field for field in ChatBody.__struct_fields__ if field != "messages"]


@pytest.mark.parametrize("field", NULLABLE)
def test_null_means_default(field: str) -> None:
    assert chat(**{field: None}) == chat()


@pytest.mark.parametrize("field", [field for field in CompletionBody.__struct_fields__ if field != "prompt"])
def test_null_means_default_for_text_too(field: str) -> None:
    assert complete(**{field: None}) == complete()


def test_defaults_are_the_models() -> None:
    generation = chat()
    assert generation.sampling == SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.0, repeat_last_n=64)
    assert (generation.max_tokens, generation.stop, generation.n, generation.ignore_eos, generation.cache_prompt) == (
        None,
        (),
        1,
        False,
        True,
    )


def test_every_parameter_reaches_the_engine() -> None:
    generation = chat(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0,
        frequency_penalty=1,
        presence_penalty=-1,
        repeat_penalty=1.1,
        repeat_last_n=-1,
        seed=7,
        logit_bias={"5": -100, "0": 1.5},
        stop=["a", "b", "a"],
        ignore_eos=True,
        cache_prompt=False,
        max_tokens=9,
    )
    submit = generation.submit(0, "id")
    assert submit.sampling == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        min_p=0.0,
        frequency_penalty=1.0,
        presence_penalty=-1.0,
        repeat_penalty=1.1,
        repeat_last_n=512,
        seed=7,
        logit_bias=((5, -100.0), (0, 1.5)),
    )
    assert (submit.stop, submit.ignore_eos, submit.cache_prompt, submit.max_tokens) == (("a", "b"), True, False, 9)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
        ({"max_tokens": None, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 10**12}, 512),
        ({"max_tokens": 10**40}, 512),
    ],
)
def test_smaller_limit_counts_and_none_exceeds_the_slot(fields: dict[str, Any], expected: int) -> None:
    assert chat(**fields).max_tokens == expected


@pytest.mark.parametrize(("given", "expected"), [(600, 600), (10**12, 1 << 30), (10**40, 1 << 30), (None, None)])
def test_limit_may_exceed_a_slot_that_can_be_shifted(given: int | None, expected: int | None) -> None:
    info = msgspec.structs.replace(INFO, context_shift=True)
    assert chat_completions.parse(json.dumps(HELLO | {"max_tokens": given}).encode(), info).max_tokens == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokenPrompt([1, 2])]),
        ([[1, 2], [3]], [TokenPrompt([1, 2]), TokenPrompt([3])]),
    ],
)
def test_prompt_takes_four_forms(prompt: Any, expected: Any) -> None:
    assert complete(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [1, "a"], ["a", [1]], [-1], [10**9], [1000], [[1], [-1]], [1.5], [True], {}, 5, ["a"] * (MAX_CHOICES + 1)]
)
def test_prompt_of_another_form_is_refused(prompt: Any) -> None:
    assert (refusal(json.dumps({"prompt": prompt}).encode(), completions.parse).param or "").startswith("prompt")


@pytest.mark.parametrize(("field", "value"), [("suffix", "x"), ("best_of", 2), ("best_of", 0), ("logprobs", 0), ("logprobs", 5)])
def test_text_field_that_is_not_offered_is_refused(field: str, value: Any) -> None:
    assert refusal(json.dumps({"prompt": "x", field: value}).encode(), completions.parse).param == field


@pytest.mark.parametrize("field", sorted(parameters.UNSUPPORTED))
def test_what_is_not_offered_is_refused_by_both_endpoints(field: str) -> None:
    """A field of the one, sent to the other by mistake, is not silently without effect either."""
    value = {"x": 1}
    assert refusal(json.dumps({"prompt": "x", field: value}).encode(), completions.parse).param == field
    assert refusal(json.dumps({"messages": [{"role": "user", "content": "x"}], field: value}).encode()).param == field


NO_JSON = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"{'a': 1}",
    b'{"messages": "\xff"}',
    b'{"messages": "\xed\xa0\x80"}',
    rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
    rb'{"messages": [{"role": "user", "content": "a\udc00b"}]}',
    b"\xef\xbb\xbf{}",
    b'{"messages": []}x',
    b"\x00" * 100,
]


@pytest.mark.parametrize("body", NO_JSON)
async def test_body_that_is_no_json_object_is_a_400(wire: Wire, engine: FakeEngineClient, body: bytes) -> None:
    reply = await wire.post(CHAT, body)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert not engine.submits


@pytest.mark.parametrize("depth", [1_000, 10_000, 100_000, 1_000_000])
@pytest.mark.parametrize("field", ["x", "tools", "response_format", "messages", "stop", "logit_bias"])
async def test_deep_nesting_is_a_400(wire: Wire, engine: FakeEngineClient, depth: int, field: str) -> None:
    for nest in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
        reply = await wire.post(CHAT, raw_chat(field, nest.decode()))
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert not engine.submits


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, HELLO | {"messages": HELLO["messages"] * 513}), (COMPLETIONS, {"prompt": [1] * 513}), (COMPLETIONS, {"prompt": [[1] * 513]})],
)
async def test_what_can_never_fit_a_slot_is_refused_without_the_engine(
    wire: Wire, engine: FakeEngineClient, path: str, body: dict[str, Any]
) -> None:
    reply = await wire.post(path, body)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert not engine.submits


def test_nul_and_every_plane_of_unicode_reach_the_prompt() -> None:
    text = "a\u0000b\ufeff😀\u0301"
    assert complete(prompt=text).prompts == [TextPrompt(text)]


async def test_refused_body_never_reaches_the_engine(wire: Wire, engine: FakeEngineClient) -> None:
    for stream in (False, True):
        reply = await wire.chat(temperature=-1, stream=stream)
        assert (reply.status, reply.error["param"]) == (400, "temperature")
    assert (await wire.post(COMPLETIONS, {"prompt": [-1]})).error["param"] == "prompt"
    assert not engine.submits
