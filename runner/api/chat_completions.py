"""POST /v1/chat/completions.

Messages take the roles system, developer (the same), user, assistant and tool. Content is text or a list of text parts,
joined by newlines; only an assistant's message with tool calls may have none. Any `model` is accepted: one model is served,
many clients send a fixed name, and the answer tells which model it was.
"""

from typing import Any, Final

import msgspec
from aiohttp import web

from runner.api.answer import answer
from runner.api.body import read_body
from runner.api.errors import shown
from runner.api.front import Front
from runner.api.parameters import Generation, generation, truncates
from runner.api.responses import AssistantMessage, ChatChoice, ChatChunkChoice, ChatDelta, FinishReason, Result
from runner.api.schemas import ChatBody, ContentPart, Message, decode
from runner.errors import ContextLengthExceeded, InvalidRequest
from runner.serving.protocol import ChatPrompt, ModelInfo

MAX_PARTS: Final = 4096
MAX_MESSAGES: Final = 16_384
_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


async def chat_completions(front: Front, request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    body = await read_body(request, front.config.max_body_bytes)
    return await answer(front, request, parse(body, front.model()), ChatShape())


def parse(body: bytes | bytearray, info: ModelInfo) -> Generation:
    """Check a chat body. Raises InvalidRequest that names the field."""
    chat = decode(body, ChatBody)
    if not chat.messages:
        raise InvalidRequest("'messages' is empty", param="messages")
    may_drop = truncates(chat)
    _check_count(len(chat.messages), info, may_drop=may_drop)
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(chat.messages)]
    return generation(chat, [ChatPrompt(messages, may_drop)], info)


class ChatShape:
    """How a chat answer is written."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self, index: int) -> ChatChunkChoice:
        """See `Shape`."""
        return ChatChunkChoice(index, ChatDelta(role="assistant", content=""))

    def delta(self, index: int, text: str) -> ChatChunkChoice:
        """See `Shape`."""
        return ChatChunkChoice(index, ChatDelta(content=text))

    def ending(self, index: int, reason: FinishReason) -> ChatChunkChoice:
        """See `Shape`."""
        return ChatChunkChoice(index, ChatDelta(), reason)

    def whole(self, result: Result) -> ChatChoice:
        """See `Shape`."""
        return ChatChoice(result.index, AssistantMessage(result.text), result.finish_reason)


def _check_count(n_messages: int, info: ModelInfo, *, may_drop: bool) -> None:
    """Each costs a token at least: no need to look at more than fit. Those that will be dropped are looked at all the same."""
    if n_messages > info.n_ctx_slot and not may_drop:
        raise ContextLengthExceeded(f"There are {n_messages:,} messages; a slot holds {info.n_ctx_slot:,} tokens", param="messages")
    if n_messages > (limit := max(MAX_MESSAGES, info.n_ctx_slot)):
        raise InvalidRequest(f"There are {n_messages:,} messages; the limit is {limit:,}", param="messages")


def _message(message: Message, where: str) -> dict[str, Any]:
    """One message as the chat template takes it."""
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(f"The role is {shown(message.role)!r}; it takes {', '.join(_ROLES)}", param=f"{where}.role")
    made: dict[str, Any] = {"role": role, "content": _content(message, f"{where}.content")}
    if message.tool_calls:
        made["tool_calls"] = [msgspec.to_builtins(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    return made


def _content(message: Message, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise InvalidRequest(f"A message of the role {shown(message.role)!r} needs content", param=where)
    if not message.content:
        raise InvalidRequest("A list of content parts is empty", param=where)
    if len(message.content) > MAX_PARTS:
        raise InvalidRequest(f"There are {len(message.content):,} content parts; the limit is {MAX_PARTS:,}", param=where)
    return "\n".join(_text(part, f"{where}[{index}]") for index, part in enumerate(message.content))


def _text(part: ContentPart, where: str) -> str:
    if part.type != "text":
        raise InvalidRequest(f"Content of the type {shown(part.type)!r} is not supported; this model reads text", param=where)
    if part.text is None:
        raise InvalidRequest("A text part needs text", param=f"{where}.text")
    return part.text
