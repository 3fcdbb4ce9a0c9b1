"""Request bodies as the wire has them: which fields there are and of which type. Ranges and meaning: `parameters.py`.

Every field may be null, which means: not given. Fields that are not named here are ignored. Fields that are named only to be
refused are Raw, and small structs are kept from the garbage collector: both keep the event loop free where a body is large.
"""

import re
from typing import Final, TypeVar

import msgspec
from msgspec import Raw

from runner.api.errors import shown
from runner.errors import InvalidRequest

_NULL: Final = Raw(b"null")
_LONGEST_PLAIN: Final = 256


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream brings beside the text."""

    include_usage: bool | None = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    user: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    truncation: str | None = None
    service_tier: str | None = None
    priority: int | None = None
    timeout: float | None = None
    queue_timeout: float | None = None

    grammar: Raw = _NULL
    json_schema: Raw = _NULL
    response_format: Raw = _NULL
    structured_outputs: Raw = _NULL
    guided_json: Raw = _NULL
    guided_regex: Raw = _NULL
    guided_choice: Raw = _NULL
    guided_grammar: Raw = _NULL
    tools: Raw = _NULL
    tool_choice: Raw = _NULL
    functions: Raw = _NULL
    function_call: Raw = _NULL
    logprobs: Raw = _NULL
    top_logprobs: Raw = _NULL
    modalities: Raw = _NULL
    audio: Raw = _NULL
    suffix: Raw = _NULL
    best_of: Raw = _NULL


class ContentPart(msgspec.Struct, frozen=True, gc=False):
    """One part of a message's content; only `type: text` has a meaning here."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True, gc=False):
    """The function that an earlier answer called; `arguments` is JSON as text."""

    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """One tool call of an earlier answer."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """The body of POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None


def plain(field: object) -> object:
    """The value of a Raw field; a long one stays as it is, which equals nothing that could be harmless."""
    if not isinstance(field, Raw):
        return field
    return msgspec.json.decode(field) if len(memoryview(field)) <= _LONGEST_PLAIN else field


Body = TypeVar("Body", bound=msgspec.Struct)

_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")
_MISSING: Final = re.compile(r"missing required field `(\w+)`")
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_KEY_BEFORE: Final = re.compile(rb'"(\w{1,64})"\s*:\s*-?\w*$')


def decode(body: bytes | bytearray, kind: type[Body]) -> Body:
    """Turn a body into its struct. Raises InvalidRequest, with `param` where the place is known."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}", param=_key_at(body, str(error))) from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply") from None
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid UTF-8") from None


def _wrong_type(message: str) -> InvalidRequest:
    path = _PATH.search(message)
    what = message[: path.start()] if path else message
    param = path[1] if path else ""
    missing = _MISSING.search(what)
    if missing is not None:
        param = f"{param}.{missing[1]}".lstrip(".")
        return InvalidRequest(f"{shown(param)!r} is required", param=param)
    if not param:
        return InvalidRequest(f"The body must be a JSON object: {what}")
    return InvalidRequest(f"{shown(param)!r} is not valid: {what}", param=param)


def _key_at(body: bytes | bytearray, message: str) -> str | None:
    """The key whose value is no JSON (NaN, Infinity), so that the error can name it."""
    at = _BYTE.search(message)
    if at is None:
        return None
    key = _KEY_BEFORE.search(bytes(body[max(0, int(at[1]) - 80) : int(at[1]) + 1]))
    return key[1].decode() if key is not None else None
