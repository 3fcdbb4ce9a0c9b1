"""Real engines, started once for all tests of this folder."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from runner.serving.client import EngineClient
from tests.conftest import engine_config


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def smollm2(smollm2_path: Path) -> AsyncIterator[EngineClient]:
    """SmolLM2 with 4 slots of 512 tokens and small chunks."""
    client = EngineClient(engine_config(smollm2_path, n_slots=4, n_ctx_slot=512, n_batch=64))
    await client.start()
    await client.wait_ready()
    yield client
    await client.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def gemma3(gemma3_path: Path, gemma3_template: str) -> AsyncIterator[EngineClient]:
    """Gemma 3 with 2 slots of 2,048 tokens."""
    client = EngineClient(engine_config(gemma3_path, n_slots=2, n_ctx_slot=2048, chat_template=gemma3_template))
    await client.start()
    await client.wait_ready()
    yield client
    await client.close()
