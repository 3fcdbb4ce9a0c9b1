"""The load's own clients, against a server whose engine is a script."""

import asyncio
import time

import aiohttp
import pytest

from runner.bench.load import Load
from tests.api.test_guard import serving
from tests.api.test_life import gate, until
from tests.fakes import FakeEngineClient, Reply


@pytest.mark.parametrize("at_once", [False, True])
async def test_headers_are_timed_one_by_one_or_together_while_all_slots_are_busy(at_once: bool) -> None:
    engine, accepted = FakeEngineClient(), gate()
    engine.enqueue(*(Reply(end_gate=gate()) for _ in range(4)), *(Reply(accept_gate=accepted, place_gate=gate()) for _ in range(3)))
    async with serving(engine) as wire:
        asked = asyncio.create_task(Load(wire.url).headers(4, 64, 3, 10, 1, at_once=at_once))
        await until(lambda: len(engine.submits) == 4 + (3 if at_once else 1))
        started_at = time.perf_counter()
        await asyncio.sleep(0.1)
        assert not asked.done()
        accepted.set()
        seconds = await asked
        waited_s = time.perf_counter() - started_at
    assert [0.1 <= each <= waited_s + 0.1 for each in seconds] == ([True] * 3 if at_once else [True, False, False])
    assert len(engine.submits) == 7


async def test_headers_count_only_while_every_stream_still_runs() -> None:
    engine = FakeEngineClient()
    engine.enqueue(*(Reply() for _ in range(4)), Reply(accept_gate=(hold := gate())))
    async with serving(engine) as wire:
        asked = asyncio.create_task(Load(wire.url).headers(4, 64, 2, 10, 1, at_once=False))
        await until(lambda: asked.done() or len(engine.submits) == 5)
        hold.set()
        with pytest.raises(RuntimeError, match="found a free slot"):
            await asked


async def test_refused_prompt_is_no_figure() -> None:
    engine = FakeEngineClient()
    async with serving(engine, max_queue=0) as wire:
        engine.default = Reply(end_gate=gate())
        with pytest.raises(aiohttp.ClientResponseError):
            await Load(wire.url).headers(4, 64, 1, 10, 1, at_once=False)
