"""Slots that change hands on real models: who was parked goes on exactly where it was."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.engine.kv import Forget, Load, Park, Save, Trim, Unpark
from runner.engine.lifecycle import State
from runner.engine.order import Tier
from runner.engine.sampling import SamplingParams
from runner.engine.sequence import Sequence
from runner.serving.load import Engine, load_engine
from runner.serving.loop import EngineLoop
from runner.serving.prepare import Prepared
from runner.serving.protocol import StepEvents
from tests.conftest import engine_config

N_TOKENS = 16


class Table:
    """An engine in this process, stepped by the test."""

    def __init__(self, path: Path, *, n_ctx_slot: int, n_slots: int = 1) -> None:
        config = engine_config(path, n_slots=n_slots, n_ctx_slot=n_ctx_slot, n_batch=64)
        self.engine: Engine = load_engine(config, clock=time.monotonic, progress=lambda fraction: None)
        self.texts: dict[str, str] = {}
        self.loop: EngineLoop = self.engine.make_loop(self.hear)
        self._n = 0

    def hear(self, events: StepEvents) -> None:
        """Gather texts."""
        for delta in events.deltas:
            self.texts[delta.request_id] = self.texts.get(delta.request_id, "") + delta.text
        assert events.failed == []

    def ask(self, prompt: list[int], n_tokens: int, *, seed: int = 0, tier: Tier = Tier.NORMAL, temperature: float = 0.8) -> Sequence:
        """Hand a prompt to the scheduler; no cell is shared, so that equal prompts are computed in equal chunks."""
        self._n += 1
        sampling = SamplingParams(temperature=temperature, seed=seed, repeat_penalty=1.1 if temperature else 1.0)
        sequence = Sequence(f"t{self._n}", list(prompt), sampling, n_tokens, ignore_eos=True, cache_prompt=False, tier=tier)
        self.loop.inbox.put(Prepared(sequence, ""))
        return sequence

    def finish(self, *sequences: Sequence) -> None:
        """Step until they have ended."""
        while not all(sequence.is_finished for sequence in sequences):
            self.loop.step()

    def undisturbed(self, prompt: list[int], seed: int, *, temperature: float = 0.8) -> str:
        """The answer of a sequence that is alone from first to last."""
        alone = self.ask(prompt, N_TOKENS, seed=seed, temperature=temperature)
        self.finish(alone)
        return self.texts[alone.request_id]


@pytest.fixture(autouse=True, scope="module")
def quick_idle() -> Iterator[None]:
    """A loop without work waits for a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.serving.loop._IDLE_WAIT_S", 0.0001)
        yield


@pytest.fixture(scope="module")
def smollm2_table(smollm2_path: Path) -> Iterator[Table]:
    table = Table(smollm2_path, n_ctx_slot=256)
    yield table
    table.engine.backend.close()


@pytest.fixture(scope="module")
def gemma3_table(gemma3_path: Path) -> Iterator[Table]:
    table = Table(gemma3_path, n_ctx_slot=1024)
    yield table
    table.engine.backend.close()


def tokens(n: int, seed: int) -> list[int]:
    """Ordinary token ids, no two seeds alike from the first on."""
    return [1000 + seed] + [(seed * 7919 + i * 104729) % 20_000 + 500 for i in range(n - 1)]


def interrupted(table: Table, prompt: list[int], seed: int, *, temperature: float = 0.8) -> str:
    """The same sequence, alone in every batch, but parked after each of its tokens for one of a better tier that takes its cells."""
    slow = table.ask(prompt, N_TOKENS, seed=seed, tier=Tier.LOW, temperature=temperature)
    n_parks = 0
    while not slow.is_finished:
        urgent = table.ask(tokens(6, 900 + n_parks), 1, tier=Tier.HIGH)
        table.finish(urgent)
        while not slow.is_finished and slow.state in (State.PARKED, State.PREFILL, State.QUEUED):
            table.loop.step()
        n_parks = slow.n_parks
    assert n_parks >= N_TOKENS - 2
    return table.texts[slow.request_id]


@pytest.mark.parametrize("seed", range(20))
def test_parked_after_every_token_the_text_is_the_same(smollm2_table: Table, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.engine.preempt.MAX_PARKS", 1000)
    prompt = tokens(20 + seed, seed)
    assert interrupted(smollm2_table, prompt, seed) == smollm2_table.undisturbed(prompt, seed)


def test_a_short_context_of_a_sliding_window_comes_back_whole(gemma3_table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.engine.preempt.MAX_PARKS", 1000)
    prompt = tokens(40, 3)
    assert interrupted(gemma3_table, prompt, 5) == gemma3_table.undisturbed(prompt, 5)


def test_a_window_that_has_moved_on_comes_back_whole(gemma3_table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of 512 has left the first tokens behind: there is nothing to compute it from.

    llama.cpp lays the cells in another order when it restores them, so sums differ in their last bits: a text is asked for whose
    next token is never in doubt.
    """
    monkeypatch.setattr("runner.engine.preempt.MAX_PARKS", 1000)
    vocabulary = gemma3_table.engine.preparer._vocabulary
    counted = ", ".join(map(str, range(100, 260))) + ","
    prompt = vocabulary.with_bos(vocabulary.tokenize(counted, parse_special=False))
    assert len(prompt) > 700
    text = interrupted(gemma3_table, prompt, 0, temperature=0.0)
    assert text.startswith(" 260, 261, 262")
    assert text == gemma3_table.undisturbed(prompt, 0, temperature=0.0)


def test_the_cells_that_come_back_are_those_that_were_saved(smollm2_table: Table) -> None:
    backend = smollm2_table.engine.backend
    slow = smollm2_table.ask(tokens(100, 50), 40, tier=Tier.LOW)
    while slow.n_generated < 5:
        smollm2_table.loop.step()
    n_cells = backend.n_cells(0)
    states = backend._states
    saved = states.read(0)
    chain = backend._chains[0]
    assert saved is not None
    assert backend.apply([Save(0, 1_000_000), Park(0, "x"), Trim(0, 0)]) == []
    assert backend.n_cells(0) == 0
    assert backend.apply([Load(1_000_000, 0), Unpark("x", 0), Forget(1_000_000)]) == []
    assert backend.n_cells(0) == n_cells
    assert bytes(states.read(0) or b"") == bytes(saved)
    assert backend._chains[0] == chain
    assert backend.apply([Load(1_000_000, 0)]) == [Load(1_000_000, 0)]
    assert backend.n_cells(0) == 0
    assert states.write(0, saved)
    smollm2_table.finish(slow)


def test_without_room_in_host_memory_the_answer_is_computed_again_and_goes_on(smollm2_table: Table) -> None:
    """Cells computed in other chunks differ in their last bits: greedy, and the beginning of what follows, is what must agree."""
    scheduler = smollm2_table.engine.scheduler
    prompt = tokens(60, 70)
    alone = smollm2_table.ask(prompt, 12, temperature=0.0)
    smollm2_table.finish(alone)
    before, scheduler.memory.host.limit_bytes = scheduler.memory.host.limit_bytes, 0
    try:
        slow = smollm2_table.ask(prompt, 12, tier=Tier.LOW, temperature=0.0)
        while slow.n_generated < 6:
            smollm2_table.loop.step()
        urgent = smollm2_table.ask(tokens(6, 80), 2, tier=Tier.HIGH)
        smollm2_table.finish(urgent, slow)
    finally:
        scheduler.memory.host.limit_bytes = before
    assert slow.n_parks == 1
    assert smollm2_table.texts[slow.request_id][:30] == smollm2_table.texts[alone.request_id][:30]
