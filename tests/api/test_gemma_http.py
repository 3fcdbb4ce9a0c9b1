"""A strict chat template behind the whole HTTP surface: Gemma 3's wants user and assistant to take turns."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from runner.api.server import Server, bind
from runner.config import ServerConfig
from runner.serving.client import EngineClient
from tests.api.wire import COMPLETIONS, Wire
from tests.conftest import engine_config

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gemma_wire(gemma3_path: Path, gemma3_template: str) -> AsyncIterator[Wire]:
    """One engine and server for the tests of this file."""
    engine = EngineClient(engine_config(gemma3_path, n_slots=2, n_ctx_slot=512, chat_template=gemma3_template))
    config = ServerConfig(port=0)
    server = Server(config, engine, bind(config), version="0")
    await engine.start()
    await server.start()
    await engine.wait_ready()
    async with aiohttp.ClientSession(base_url=server.urls[0]) as session:
        yield Wire(server.urls[0], session)
    await server.close()
    await engine.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_strict_templates_refusal_is_a_400_in_its_words(gemma_wire: Wire, stream: bool) -> None:
    """Case 58."""
    reply = await gemma_wire.chat(messages=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], stream=stream)
    assert (reply.status, reply.error["param"], reply.error["type"]) == (400, "messages", "invalid_request_error")
    assert reply.error["message"] == (
        "The model's chat template refuses these messages: Conversation roles must alternate user/assistant/user/assistant/..."
    )


@pytest.mark.parametrize("text", ["<" * 20_000, "A" * 24_576, " " * 200_000, "\\u0000" * 3000, "<eos>" * 2000])
async def test_a_hopeless_prompt_is_refused_and_the_next_is_answered(gemma_wire: Wire, text: str) -> None:
    """Case 89."""
    reply = await gemma_wire.post(COMPLETIONS, {"prompt": text})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    chat = await gemma_wire.chat(messages=[{"role": "user", "content": f"x{text}x"}])
    assert (chat.status, chat.error["code"], chat.error["param"]) == (400, "context_length_exceeded", "messages")
    assert (await gemma_wire.chat(max_tokens=1)).status == 200
