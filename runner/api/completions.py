"""POST /v1/completions.

`prompt` is a text, a list of texts, a list of token ids or a list of those. Choices are numbered as OpenAI does it: the `n`
answers to the first prompt, then those to the second. Without `max_tokens` an answer goes on until it ends or its slot is full.
"""

from aiohttp import web

from runner.api.admission import check_n_tokens
from runner.api.answer import answer
from runner.api.body import read_body
from runner.api.front import Front
from runner.api.parameters import MAX_CHOICES, Generation, generation, truncates
from runner.api.responses import FinishReason, Result, TextChoice
from runner.api.schemas import CompletionBody, decode
from runner.errors import InvalidRequest
from runner.serving.protocol import ModelInfo, Prompt, TextPrompt, TokenPrompt


async def completions(front: Front, request: web.Request) -> web.StreamResponse:
    """Continue a text."""
    body = await read_body(request, front.config.max_body_bytes)
    return await answer(front, request, parse(body, front.model()), TextShape())


def parse(body: bytes | bytearray, info: ModelInfo) -> Generation:
    """Check a completion body. Raises InvalidRequest that names the field."""
    completion = decode(body, CompletionBody)
    if truncates(completion):
        text = "'truncation' drops whole turns of a conversation, so 'auto' needs messages: use /v1/chat/completions"
        raise InvalidRequest(text, param="truncation")
    return generation(completion, _prompts(completion.prompt, info), info, echo=bool(completion.echo))


class TextShape:
    """How a text completion is written: a text needs no opening chunk."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def opening(self, index: int) -> None:
        """See `Shape`."""

    def delta(self, index: int, text: str) -> TextChoice:
        """See `Shape`."""
        return TextChoice(index, text)

    def ending(self, index: int, reason: FinishReason) -> TextChoice:
        """See `Shape`."""
        return TextChoice(index, "", reason)

    def whole(self, result: Result) -> TextChoice:
        """See `Shape`."""
        return TextChoice(result.index, result.text, result.finish_reason)


def _prompts(prompt: str | list[str | int | list[int]], info: ModelInfo) -> list[Prompt]:
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt:
        raise InvalidRequest("'prompt' is an empty list", param="prompt")
    # The lengths first: what is too long is not looked at.
    if isinstance(prompt[0], int):
        check_n_tokens(len(prompt), info)
    elif len(prompt) > MAX_CHOICES:
        raise InvalidRequest(f"'prompt' has {len(prompt)} prompts; the limit is {MAX_CHOICES}", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequest("'prompt' takes a text, texts, token ids or lists of token ids, one kind at a time", param="prompt")
    if int in kinds:
        return [_token_prompt([token for token in prompt if isinstance(token, int)], info)]
    return [TextPrompt(item) if isinstance(item, str) else _token_prompt(item, info) for item in prompt if not isinstance(item, int)]


def _token_prompt(tokens: list[int], info: ModelInfo) -> TokenPrompt:
    if not tokens:
        raise InvalidRequest("'prompt' holds an empty list of token ids", param="prompt")
    check_n_tokens(len(tokens), info)
    if min(tokens) < 0 or max(tokens) >= info.n_vocab:
        raise InvalidRequest(f"'prompt' holds a token id outside 0 to {info.n_vocab - 1}", param="prompt")
    return TokenPrompt(tokens)
