"""Clients that repeat what came before, against a server whose engine is a script."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from build import bench_kv
from runner.bench.load import Stream
from runner.bench.load_kv import Conversation, KvLoad, TurnTokens, later_turns
from runner.errors import Overloaded
from runner.serving.protocol import ChatPrompt
from tests.api.test_guard import serving
from tests.api.test_life import gate, until
from tests.fakes import FakeEngineClient, Reply


def asked(engine: FakeEngineClient) -> list[list[tuple[str, str]]]:
    """The messages of every request, as they reached the engine."""
    prompts = [submit.prompt for submit in engine.submits]
    assert all(isinstance(prompt, ChatPrompt) for prompt in prompts)
    return [[(m["role"], m["content"]) for m in prompt.messages] for prompt in prompts if isinstance(prompt, ChatPrompt)]


async def test_clients_share_a_system_prompt_that_is_new_with_each_seed() -> None:
    engine, hold = FakeEngineClient(), gate()
    engine.default = Reply(text_gate=hold)
    async with serving(engine) as wire:
        for seed in (1, 2):
            task = asyncio.create_task(KvLoad(wire.url).shared_prefix(3, 20, 4, seed))
            await until(lambda n=3 * seed: len(engine.submits) == n)
            hold.set()
            assert len(await task) == 3
            hold.clear()
    systems = [messages[0] for messages in asked(engine)]
    assert len(set(systems[:3])) == len(set(systems[3:])) == 1
    assert systems[0] != systems[3]
    assert all(role == "system" and len(text.split()) == 24 for role, text in systems)
    assert len({messages[1] for messages in asked(engine)[:3]}) == 3


@pytest.mark.parametrize(("replies", "kept"), [(None, "Hello, world"), ("Noted", "Noted 0.")])
async def test_chat_goes_on_with_what_its_client_keeps(replies: str | None, kept: str) -> None:
    engine, conversation = FakeEngineClient(), Conversation.over(5, 1)
    engine.enqueue(Reply(n_prompt=9, n_cached=0), Reply(n_prompt=20, n_cached=11))
    async with serving(engine) as wire:
        load = KvLoad(wire.url)
        await load.talk(conversation, 1, 3, replies=replies)
        (second,) = await load.talk(conversation, 1, 3, replies=replies)
    first_prompt, second_prompt = asked(engine)
    assert second_prompt == [*first_prompt, ("assistant", kept), ("user", "Turn 1: say something about stone.")]
    assert (second.text, second.n_prompt, second.n_cached, second.n_tokens) == ("Hello, world", 20, 11, 3)
    assert conversation.turns[1] is second
    assert later_turns(conversation) == [TurnTokens(n_computed=9, n_new=8)]
    assert conversation.n_cells == 22


async def test_others_have_contexts_of_their_own_and_come_so_many_at_a_time() -> None:
    engine, holds = FakeEngineClient(), [gate() for _ in range(4)]
    engine.enqueue(*(Reply(end_gate=hold) for hold in holds))
    async with serving(engine) as wire:
        task = asyncio.create_task(KvLoad(wire.url).others(4, 5, 3, 1, at_once=2))
        await until(lambda: len(engine.submits) == 2)
        holds[0].set()
        await asyncio.sleep(0.05)
        assert len(engine.submits) == 2
        holds[1].set()
        await until(lambda: len(engine.submits) == 4)
        for hold in holds:
            hold.set()
        assert [len(one.turns) for one in await task] == [1] * 4
    assert len({messages[0] for messages in asked(engine)}) == 4


async def test_conversation_is_kept_where_its_cells_are_not_computed_again() -> None:
    engine = FakeEngineClient()
    async with serving(engine) as wire:
        load = KvLoad(wire.url)
        engine.default = Reply(n_prompt=98)
        sessions = await load.others(4, 5, 3, 1)
        assert {one.n_cells for one in sessions} == {100}
        engine.enqueue(*(Reply(n_prompt=120, n_cached=n_cached) for n_cached in (100, 0, 90, 89)))
        assert await load.share_kept(sessions) == 0.5


async def test_fork_is_asked_for_while_the_first_answer_runs() -> None:
    engine, text, end, second = FakeEngineClient(), gate(), gate(), gate()
    engine.enqueue(Reply(text_gate=text, end_gate=end), Reply(text_gate=second))
    async with serving(engine) as wire:
        task = asyncio.create_task(KvLoad(wire.url).fork(20, 64, 1))
        await asyncio.sleep(0.5)
        assert len(engine.submits) == 1
        text.set()
        await until(lambda: len(engine.submits) == 2)
        second.set()
        await until(lambda: engine.n_live == 1)
        await asyncio.sleep(0.05)
        end.set()
        second_s, first_s = await task
    assert 0 < second_s < 0.5 <= first_s
    first_messages, second_messages = asked(engine)
    assert first_messages[0] == second_messages[0]
    assert first_messages[1] != second_messages[1]


async def test_fork_is_no_figure_where_the_first_answer_is_over() -> None:
    engine, second = FakeEngineClient(), gate()
    engine.enqueue(Reply(), Reply(text_gate=second))
    async with serving(engine) as wire:
        task = asyncio.create_task(KvLoad(wire.url).fork(20, 64, 1))
        await until(lambda: len(engine.submits) == 2 and engine.n_live == 1)
        await asyncio.sleep(0.05)
        second.set()
        with pytest.raises(RuntimeError, match="was over before the second one"):
            await task


async def test_fork_whose_first_question_is_refused_ends() -> None:
    engine = FakeEngineClient()
    engine.enqueue(Reply(refuse=Overloaded("Full", retry_after_s=1)))
    async with serving(engine) as wire:
        with pytest.raises(aiohttp.ClientResponseError):
            await KvLoad(wire.url).fork(20, 64, 1)


def test_figures_are_medians_of_rounds_that_take_turns() -> None:
    ours, peer, order = KvLoad("ours"), KvLoad("peer"), []

    def measure(load: KvLoad, number: int) -> tuple[float, float]:
        order.append((load, number))
        return (float(number), 10.0) if load is ours else (number + 0.5, 20.0)

    assert bench_kv.in_turn(measure, ours, peer, 3) == [(1.0, 1.5), (10.0, 20.0)]
    assert order == [(load, number) for number in range(3) for load in (ours, peer)]


@pytest.mark.parametrize(("share", "mib"), [(1.0, 20.0), (0.5, 40.0), (0.0, math.inf)])
def test_memory_is_counted_for_sessions_that_are_kept(monkeypatch: pytest.MonkeyPatch, share: float, mib: float) -> None:
    class Scripted(KvLoad):
        async def others(self, n_others: int, n_words: int, n_tokens: int, seed: int, *, at_once: int = 1) -> list[Conversation]:
            return [Conversation([], [Stream(0.0, n_prompt=997, n_tokens=4)]) for _ in range(n_others)]

        async def share_kept(self, conversations: Sequence[Conversation]) -> float:
            return share

    sizes = iter([100 * bench_kv.MIB, 1100 * bench_kv.MIB])
    monkeypatch.setattr(bench_kv, "_resident_bytes", lambda _: next(sizes))
    grown, own = bench_kv.parked_mib(Scripted("ours"), 1, bench_kv.MIB // 100)
    assert grown == mib
    assert own == pytest.approx(10.0, rel=1e-4)


def test_bytes_of_a_cell_are_those_of_the_model(smollm2_path: Path) -> None:
    assert bench_kv.cell_bytes(smollm2_path) == 30 * 3 * (64 + 64) * 2
