"""Case 9 where slots are shifted, over HTTP on SmolLM2: `max_tokens` is the only end, and without it the slot is."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from runner.api.server import Server, bind
from runner.bundle.catalogue import find_entry, read_catalogue
from runner.config import ServerConfig
from runner.serving.client import EngineClient
from tests.api.wire import COMPLETIONS, Wire
from tests.conftest import ROOT, engine_config

pytestmark = pytest.mark.asyncio(loop_scope="session")

N_CTX = 512


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def wire(smollm2_path: Path) -> AsyncIterator[Wire]:
    """A server whose slots are shifted."""
    template = find_entry(read_catalogue(ROOT / "models.toml"), "smollm2-135m")[1].chat_template
    engine_settings = engine_config(smollm2_path, n_slots=4, n_ctx_slot=N_CTX, n_batch=64, chat_template=template)
    engine = EngineClient(msgspec.structs.replace(engine_settings, context_shift=True, n_threads=1))
    config = ServerConfig(port=0)
    server = Server(config, engine, bind(config), version="0")
    await engine.start()
    await server.start()
    await engine.wait_ready()
    async with aiohttp.ClientSession(base_url=server.urls[0]) as session:
        yield Wire(server.urls[0], session)
    await server.close()
    await engine.close()


async def test_every_token_counts_and_only_who_asks_for_more_than_a_slot_holds_gets_it(wire: Wire) -> None:
    """A prompt of 400 tokens with a limit of 512 and without one, and a system prompt of 450, streamed."""
    prompt = [100 + index for index in range(400)]
    messages = [{"role": "system", "content": "word " * 450}, {"role": "user", "content": "Count."}]
    common = {"temperature": 0, "ignore_eos": True}
    limited, unlimited, chat = await asyncio.gather(
        wire.post(COMPLETIONS, common | {"prompt": prompt, "max_tokens": 512}),
        wire.post(COMPLETIONS, common | {"prompt": [101, *prompt[1:]]}),
        wire.chat(**common, messages=messages, max_tokens=300, stream=True, stream_options={"include_usage": True}),
    )
    assert limited.json["usage"]["completion_tokens"] == 512
    assert unlimited.json["usage"]["total_tokens"] == N_CTX
    assert chat.chunks[-1]["usage"]["completion_tokens"] == 300
    assert [reply.json["choices"][0]["finish_reason"] for reply in (limited, unlimited)] == ["length", "length"]
    assert '"finish_reason":"length"' in chat.body.decode()
    n_shifts = next(
        line for line in (await wire.get("/metrics")).body.decode().splitlines() if line.startswith("slotfile_engine_shifts_total")
    )
    assert int(float(n_shifts.split()[1])) >= 4
    assert "slotfile_kv_violations_total 0" in (await wire.get("/metrics")).body.decode()


async def test_prompt_that_does_not_fit_is_refused_all_the_same(wire: Wire) -> None:
    reply = await wire.post(COMPLETIONS, {"prompt": [100] * N_CTX, "max_tokens": 600})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
