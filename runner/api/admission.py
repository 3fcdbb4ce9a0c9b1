"""The size of prompts, before anything is done with them: how much a request keeps in memory, and whether it can fit at all."""

from collections.abc import Mapping
from typing import Any

from runner.errors import ContextLengthExceeded
from runner.serving.length import certainly_too_long, fewest_tokens, n_word_starts, text_bytes
from runner.serving.protocol import ChatPrompt, ModelInfo, Prompt, TextPrompt, TokenPrompt
from runner.serving.truncation import always_kept

_TOKEN_BYTES = 5  # as msgpack writes most of them


def admit_prompts(prompts: list[Prompt], info: ModelInfo) -> int:
    """About the bytes of all prompts. Raises ContextLengthExceeded for one that certainly does not fit a slot."""
    return sum(_admit(prompt, info) for prompt in prompts)


def check_n_tokens(n_tokens: int, info: ModelInfo) -> None:
    """Raises ContextLengthExceeded for so many token ids."""
    if n_tokens >= info.n_ctx_slot:
        text = f"The prompt has {n_tokens:,} tokens; a slot holds {info.n_ctx_slot:,}, and one at least must be left for the answer"
        raise ContextLengthExceeded(text, param="prompt")


def _admit(prompt: Prompt, info: ModelInfo) -> int:
    match prompt:
        case TokenPrompt(tokens):
            return _TOKEN_BYTES * len(tokens)
        case TextPrompt(text):
            _check(text_bytes(text, info.unknown_bytes), n_word_starts(text), info, "prompt")
            return len(text)
        case ChatPrompt(messages, truncates):
            n_bytes = sum(_message_bytes(message) for message in messages)
            n_certain = n_starts = 0
            for message in always_kept(messages) if truncates else messages:
                content = message["content"]
                # A template may trim what it is given, and leave out an earlier answer's reasoning.
                if message["role"] != "assistant":
                    n_certain += text_bytes(content.strip(), info.unknown_bytes)
                    n_starts += n_word_starts(content.strip())
            _check(n_certain, n_starts, info, "messages")
            return n_bytes


def _message_bytes(message: Mapping[str, Any]) -> int:
    return len(message["content"]) + sum(len(str(value)) for key, value in message.items() if key != "content")


def _check(n_bytes: int, n_starts: int, info: ModelInfo, param: str) -> None:
    n_tokens = fewest_tokens(n_bytes, info.longest_piece_bytes, n_starts, info.word_starts_per_token)
    if n_tokens >= info.n_ctx_slot:
        raise certainly_too_long(n_tokens, info.n_ctx_slot, param)
