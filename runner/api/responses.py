"""Answers as the wire has them: OpenAI's objects, field by field.

`timings` (llama.cpp's name and fields, plus `queue_ms`, `parked_ms`, `ttft_ms` and `total_ms`) and `truncation` are additions that OpenAI's
clients ignore.
"""

from typing import Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from runner.serving.protocol import Finished

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Tokens of the prompt that were not computed again."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens in and out. A prompt counts once, however many answers it got."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(msgspec.Struct, frozen=True):
    """Where one answer's time went, in milliseconds. Time without a slot, `parked_ms`, is part of `prompt_ms` or `predicted_ms`."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    queue_ms: float
    parked_ms: float
    ttft_ms: float
    total_ms: float


class AssistantMessage(msgspec.Struct, frozen=True):
    """A whole answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a whole chat answer."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    logprobs: None = None


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one chunk adds to the message."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice of a chat chunk."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: None = None


class TextChoice(msgspec.Struct, frozen=True):
    """One choice of a text completion, whole or a chunk."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: None = None


Choice = ChatChoice | ChatChunkChoice | TextChoice


class Truncation(msgspec.Struct, frozen=True):
    """What went of a conversation that was too long: so many messages after the system's at its start."""

    dropped_messages: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer or one chunk of it; what is UNSET is left out."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET
    truncation: Truncation | UnsetType = UNSET


class Result(msgspec.Struct, frozen=True):
    """One finished sequence."""

    index: int
    text: str
    finished: Finished

    @property
    def finish_reason(self) -> FinishReason:
        """`length` or `stop`; what else the engine says of an end is not an answer's end."""
        return "length" if self.finished.reason == "length" else "stop"


class Shape(Protocol):
    """How one kind of completion is written. A `None` event is not sent."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def opening(self, index: int) -> Choice | None:
        """The first chunk of a choice."""

    def delta(self, index: int, text: str) -> Choice:
        """A chunk with text."""

    def ending(self, index: int, reason: FinishReason) -> Choice:
        """The last chunk of a choice."""

    def whole(self, result: Result) -> Choice:
        """The choice of an answer that is not streamed."""


def usage(results: list[Result], n: int) -> Usage:
    """Add up the choices; every `n` of them share a prompt, and the first of them tells what was cached."""
    firsts = results[::n]
    n_prompt = sum(result.finished.n_prompt for result in firsts)
    n_completion = sum(result.finished.n_completion for result in results)
    n_cached = sum(result.finished.n_cached for result in firsts)
    return Usage(n_prompt, n_completion, n_prompt + n_completion, PromptTokensDetails(n_cached))


def timings(results: list[Result]) -> Timings | UnsetType:
    """The stamps of a single answer as llama.cpp shows them; several answers have no common time."""
    if len(results) != 1:
        return UNSET
    end, at = results[0].finished, results[0].finished.stamps
    first_token_at = at.first_token_at or at.finished_at
    prompt_s = max(0.0, first_token_at - at.admitted_at)
    decode_s = max(0.0, at.finished_at - first_token_at)
    n_prompt, n_gaps = end.n_prompt - end.n_cached, max(0, end.n_completion - 1)
    return Timings(
        cache_n=end.n_cached,
        prompt_n=n_prompt,
        prompt_ms=_ms(prompt_s),
        prompt_per_second=_per(n_prompt, prompt_s),
        predicted_n=end.n_completion,
        predicted_ms=_ms(decode_s),
        predicted_per_token_ms=_ms(decode_s / n_gaps) if n_gaps else 0.0,
        predicted_per_second=_per(n_gaps, decode_s),
        queue_ms=_ms(max(0.0, at.admitted_at - at.arrived_at)),
        parked_ms=_ms(at.parked_s),
        ttft_ms=_ms(max(0.0, first_token_at - at.arrived_at)),
        total_ms=_ms(max(0.0, at.finished_at - at.arrived_at)),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _per(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0
