"""Shared, saved and restored cells on real memories: what a slot continues from is what a fresh one would have computed.

The small models with random weights (tests/llama/recurrent.py) have each kind of memory in 32 bits: one wrong cell shows in the next token,
rounding hardly ever does.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from runner.engine.kv import Checkpoint, Copy, Fork, KvOp, Load, Rewind, Save
from runner.engine.sampling import SamplingParams
from runner.engine.sequence import Sequence
from runner.serving.load import Engine, load_engine
from runner.serving.loop import EngineLoop
from runner.serving.prepare import Prepared
from runner.serving.protocol import StepEvents
from tests.conftest import engine_config

N_CTX = 512
KEEPS = (120, 119, 118, 100, 89, 88, 87, 86, 60, 33, 32, 31, 16, 1)
MEMORIES = ("smollm2_path", "window_path", "recurrent_path", "hybrid_path")


class Rig:
    """An engine in this process that is stepped by the test and looks at its cells after each step."""

    def __init__(
        self, path: Path, *, n_slots: int, n_ctx: int = N_CTX, n_batch: int = 64, host_mib: int = 64, pool: int | None = None
    ) -> None:
        """With a `pool` all slots share the cells of so many tokens."""
        config = engine_config(path, n_slots=n_slots, n_ctx_slot=n_ctx, n_batch=n_batch)
        config = msgspec.structs.replace(config, n_threads=1, kv_host_mib=host_mib, kv_pool=pool, kv="unified" if pool else "partitioned")
        self.engine: Engine = load_engine(config, clock=time.monotonic, progress=lambda fraction: None)
        self.loop = EngineLoop(
            self.engine.scheduler,
            self.engine.backend,
            clock=time.monotonic,
            emit=self.hear,
            native=self.engine.native_seconds,
            first_guess_s=1.0,
            checks_each_step=True,
        )
        # These models compute a token as quickly as they copy it; one that is of use does not.
        self.engine.scheduler.costs.learn_move = lambda n_bytes, seconds: None  # type: ignore[method-assign]
        self.engine.scheduler.memory.placer.least_saved_s = 0.0
        self.ops: list[KvOp] = []
        apply = self.engine.backend.apply
        self.engine.backend.apply = lambda ops: (self.ops.extend(ops := list(ops)), apply(ops))[1]  # type: ignore[method-assign, func-returns-value]
        self.tokens: dict[str, list[int]] = {}
        self._n = 0

    def hear(self, events: StepEvents) -> None:
        """Nothing may fail."""
        assert events.failed == []

    def ask(self, prompt: list[int], n: int = 3, *, reuse: bool = True, stop: tuple[str, ...] = ()) -> Sequence:
        """Submit; greedy."""
        self._n += 1
        sampling = SamplingParams(temperature=0.0, seed=0)
        sequence = Sequence(f"s{self._n}", list(prompt), sampling, n, stop=stop, ignore_eos=True, cache_prompt=reuse)
        self.loop.inbox.put(Prepared(sequence, ""))
        return sequence

    def answer(self, sequence: Sequence) -> list[int]:
        """Step until it has ended; its tokens."""
        tokens: list[int] = []
        while not sequence.is_finished:
            n_before = sequence.n_generated
            self.loop.step()
            if sequence.n_generated > n_before:
                assert sequence.pending is not None
                tokens.append(sequence.pending)
        return tokens

    def run(self, *sequences: Sequence) -> None:
        """Step until all have ended."""
        while not all(sequence.is_finished for sequence in sequences):
            self.loop.step()

    def used(self, *kinds: type[KvOp]) -> bool:
        """Whether there was an operation of each kind."""
        return all(any(isinstance(op, kind) for op in self.ops) for kind in kinds)


@pytest.fixture(autouse=True, scope="module")
def quick_idle() -> Iterator[None]:
    """A loop without work waits for a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.serving.loop._IDLE_WAIT_S", 0.0001)
        yield


@pytest.fixture(params=MEMORIES, scope="module")
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def fresh(path: Path) -> Iterator[Rig]:
    """An engine that reuses nothing."""
    rig = Rig(path, n_slots=1)
    yield rig
    rig.engine.backend.close()


def prompt(n: int, seed: int) -> list[int]:
    """Ordinary tokens."""
    return random.Random(seed).choices(range(500, 20_000), k=n)


def is_small(path: Path) -> bool:
    """Whether it is one of random weights."""
    return path.stat().st_size < 1 << 25


@dataclass
class Tally:
    """How many answers were those of a fresh slot. A rounding that decides a tie is rare; a wrong cell is seen at once."""

    n: int = 0
    n_same: int = 0

    def compare(self, got: list[int], expected: list[int]) -> None:
        """One answer."""
        self.n += 1
        self.n_same += got == expected

    def check(self) -> None:
        """Nearly all."""
        assert self.n_same >= 0.9 * self.n, f"{self.n_same} of {self.n} answers are those of a fresh slot"


def test_conversations_that_come_back_go_on_from_their_own_cells(path: Path, fresh: Rig) -> None:
    """More conversations than slots, with one system prompt, some edited, in any order; host memory holds some of them."""
    rig, tally, draw = Rig(path, n_slots=2, host_mib=2 if is_small(path) else 16), Tally(), random.Random(5)
    system = prompt(80, 1)
    histories = [[*system, *prompt(20, 10 + i)] for i in range(6)]
    n_cached = 0
    for turn in range(30 if is_small(path) else 8):
        i = draw.randrange(len(histories))
        if draw.random() < 0.25:
            del histories[i][draw.randrange(90, len(histories[i]) + 1) :]
        asked = rig.ask(histories[i])
        got = rig.answer(asked)
        tally.compare(got, fresh.answer(fresh.ask(histories[i], reuse=False)))
        n_cached += asked.n_cached
        histories[i] += [*got, *prompt(draw.randrange(5, 30), 1000 + turn)]
        if len(histories[i]) > N_CTX - 80:
            del histories[i][100:]
    tally.check()
    assert n_cached > (1000 if is_small(path) else 300)
    assert rig.used(Save, Load)
    assert rig.loop.totals.n_violations == 0
    rig.engine.backend.close()


@pytest.mark.parametrize("n_batch", [32, 256])
def test_many_with_one_beginning_compute_it_once(path: Path, fresh: Rig, n_batch: int) -> None:
    rig, tally = Rig(path, n_slots=4, n_batch=n_batch), Tally()
    system = prompt(150, 2)
    asked = [rig.ask([*system, *prompt(10, 50 + i)], 1) for i in range(12)]
    rig.run(*asked)
    assert rig.loop.totals.n_prompt_rows == len(system) + 12 * 10
    for sequence in asked:
        tally.compare([sequence.pending or 0], fresh.answer(fresh.ask(sequence.prompt, 1, reuse=False)))
    tally.check()
    assert any(isinstance(op, Fork | Copy) for op in rig.ops)
    rig.engine.backend.close()


def test_sharing_from_busy_slots_disturbs_nobody(path: Path, fresh: Rig) -> None:
    rig, tally = Rig(path, n_slots=3), Tally()
    system = prompt(100, 3)
    first = rig.ask([*system, *prompt(8, 90)], 40)
    while first.n_generated < 3:
        rig.loop.step()
    others = [rig.ask([*system, *prompt(8, 91 + i)], 4) for i in range(6)]
    rig.run(first, *others)
    for sequence in (first, *others):
        last = fresh.ask(sequence.prompt, sequence.max_tokens, reuse=False)
        fresh.run(last)
        tally.compare([sequence.pending or 0], [last.pending or 0])
    tally.check()
    rig.engine.backend.close()


def test_a_prompt_that_is_sent_again_shorter_or_other_at_its_end(path: Path, fresh: Rig) -> None:
    """Equal to, shorter than, and diverging from what is cached, at every place around the window's edge and the last token."""
    rig, tally = Rig(path, n_slots=1), Tally()
    whole = prompt(120, 4)
    for keep in KEEPS if is_small(path) else KEEPS[::4]:
        rig.run(rig.ask(whole, 6))
        for other in (whole[:keep], [*whole[:keep], *prompt(12, keep)]):
            asked = rig.ask(other)
            got = rig.answer(asked)
            assert asked.n_cached <= min(keep, len(other) - 1)
            tally.compare(got, fresh.answer(fresh.ask(other, reuse=False)))
    tally.check()
    if not rig.engine.scheduler.memory.kind.can_be_cut:
        assert rig.used(Checkpoint, Rewind)
    rig.engine.backend.close()


class TolerantRig(Rig):
    """One that keeps what fails."""

    def hear(self, events: StepEvents) -> None:
        """Also what may not happen."""
        self.failed = [*getattr(self, "failed", []), *events.failed]


def test_cells_that_are_not_what_they_should_be_cost_one_request(window_path: Path) -> None:
    """Somebody has taken cells of one slot away: its request ends with an error, the other's answer is that of a fresh slot."""
    rig = TolerantRig(window_path, n_slots=2)
    asked = [rig.ask(prompt(40, seed), 12) for seed in (1, 2)]
    while not all(sequence.n_generated > 3 for sequence in asked):
        rig.loop.step()
    victim, other = asked
    assert victim.slot_id is not None
    backend = rig.engine.backend
    backend._remove(backend._context.memory, victim.slot_id, 20, -1)
    rig.loop.step()
    assert [failed.request_id for failed in rig.failed] == [victim.request_id]
    assert rig.loop.totals.n_violations == 1
    rig.run(other)
    fresh = rig.ask(other.prompt, 12, reuse=False)
    rig.run(fresh)
    assert fresh.pending == other.pending
    again = rig.ask(victim.prompt, 12)
    rig.run(again)
    assert again.n_cached == 0
    rig.engine.backend.close()


def counting(rig: Rig, text: str) -> list[int]:
    """Tokens of a text that a model goes on with in only one way."""
    vocabulary = rig.engine.preparer._vocabulary
    return vocabulary.with_bos(vocabulary.tokenize(text, parse_special=False))


@pytest.mark.parametrize("away", [False, True], ids=["in its slot", "from host memory"])
def test_a_gemma_chat_that_was_cut_by_a_stop_string_computes_few_tokens(gemma3_path: Path, *, away: bool) -> None:
    """Longer than the window of 512, and cut by more than the one token that a saved window can be cut by."""
    rig = Rig(gemma3_path, n_slots=1, n_ctx=2048, n_batch=256, host_mib=512)
    text = ", ".join(map(str, range(100, 260))) + ","
    asked = rig.ask(counting(rig, text), 60, stop=(" 268, 269, 270",))
    rig.run(asked)
    if away:
        rig.run(rig.ask(counting(rig, "One two three. " * 20), 2))
    again = rig.ask(counting(rig, f"{text} 260, 261, 262, 263, 264, 265, 266, 267, 268, 269, 270, 271,"), 8)
    rig.run(again)
    assert len(again.prompt) > 700
    assert len(again.prompt) - again.n_cached < 100
    assert rig.used(Load) == away
    fresh = rig.ask(again.prompt, 8, reuse=False)
    rig.run(fresh)
    assert fresh.pending == again.pending
    rig.engine.backend.close()
