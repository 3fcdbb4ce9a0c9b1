"""Context shift on real models: the text goes on, cells stay in order, and where it cannot be done that is said at the start."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from runner.engine.kv import Shift, Swap
from runner.engine.sampling import SamplingParams
from runner.engine.sequence import Sequence
from runner.errors import ConfigError
from runner.serving.load import Engine, load_engine
from runner.serving.loop import EngineLoop
from runner.serving.protocol import StepEvents, Submit, TextPrompt
from tests.conftest import engine_config

N_CTX = 128
WORDS = ("river", "stone", "copper", "garden", "window", "silver", "market")
PATTERN = ", ".join(WORDS * 6)


def load(path: Path, *, n_ctx: int = N_CTX, n_batch: int = 64, swa_full: bool = False) -> Engine:
    """An engine whose slots are shifted."""
    config = engine_config(path, n_slots=2, n_ctx_slot=n_ctx, n_batch=n_batch)
    config = msgspec.structs.replace(config, context_shift=True, swa_full=swa_full, n_threads=1, kv_host_mib=64)
    return load_engine(config, clock=time.monotonic, progress=lambda fraction: None)


class Rig:
    """An engine in this process that looks at its cells after each step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = EngineLoop(
            engine.scheduler,
            engine.backend,
            clock=time.monotonic,
            emit=self.hear,
            native=engine.native_seconds,
            first_guess_s=1.0,
            checks_each_step=True,
        )
        self.texts: dict[str, str] = {}
        self._ids = map(str, itertools.count())

    def hear(self, events: StepEvents) -> None:
        """Nothing may fail."""
        for delta in events.deltas:
            self.texts[delta.request_id] = self.texts.get(delta.request_id, "") + delta.text
        assert events.failed == []

    def ask(self, text: str, max_tokens: int | None) -> Sequence:
        """Submit; greedy."""
        submit = Submit(
            request_id=next(self._ids),
            prompt=TextPrompt(text),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        prepared = self.engine.preparer.prepare(submit, 0.0, 0.0)
        self.loop.inbox.put(prepared)
        return prepared.sequence

    def finish(self, *sequences: Sequence) -> None:
        """Step until all have ended."""
        while not all(sequence.is_finished for sequence in sequences):
            self.loop.step()

    def answer(self, text: str, max_tokens: int | None) -> str:
        """One request, to its end."""
        sequence = self.ask(text, max_tokens)
        self.finish(sequence)
        return self.texts[sequence.request_id]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Rig]:
    rig = Rig(load(smollm2_path))
    yield rig
    rig.engine.backend.close()


def assert_goes_on(text: str) -> None:
    """The words come in their order, over and over, from first to last."""
    said = text.removeprefix(", ").split(", ")[:-1]
    assert len(said) > 90
    assert said == [word for _, word in zip(said, itertools.cycle(WORDS), strict=False)]


def test_a_pattern_goes_on_over_several_shifts(smollm2: Rig) -> None:
    n_shifts = smollm2.loop.totals.n_shifts
    asked = smollm2.ask(PATTERN, 200)
    smollm2.finish(asked)
    assert (asked.n_generated, asked.n_keep) == (200, 16)
    assert smollm2.loop.totals.n_shifts - n_shifts >= 3
    assert_goes_on(smollm2.texts[asked.request_id])
    assert smollm2.loop.totals.n_violations == 0


def test_it_goes_on_after_it_was_parked(smollm2: Rig) -> None:
    n_shifts = smollm2.loop.totals.n_shifts
    asked = smollm2.ask(PATTERN, 200)
    while smollm2.loop.totals.n_shifts == n_shifts:
        smollm2.loop.step()
    smollm2.engine.scheduler.park(asked.request_id)
    smollm2.finish(asked)
    assert (asked.n_parks, asked.n_generated) == (1, 200)
    assert_goes_on(smollm2.texts[asked.request_id])


def test_others_answer_as_without_it(smollm2: Rig) -> None:
    prompt = "Alpha 1, Alpha 2, Alpha 3, Alpha"
    alone = smollm2.answer(prompt, 30)
    n_shifts = smollm2.loop.totals.n_shifts
    shifted = smollm2.ask(PATTERN, 200)
    while smollm2.loop.totals.n_shifts < n_shifts + 1:
        smollm2.loop.step()
    assert smollm2.answer(prompt, 30)[:20] == alone[:20]
    smollm2.finish(shifted)
    assert smollm2.answer(prompt, 30)[:20] == alone[:20]


def test_cancelled_in_a_shift_it_leaves_a_slot_like_a_fresh_one(smollm2: Rig) -> None:
    """Between the order and the decode that turns the keys, and right behind that."""
    fresh = smollm2.answer(PATTERN, 20)
    for n_more in (0, 1, 2):
        asked = smollm2.ask(PATTERN, 200)
        while not any(isinstance(op, Shift) for op in smollm2.engine.scheduler.memory.orders):
            smollm2.loop.step()
        for _ in range(n_more):
            smollm2.loop.step()
        smollm2.engine.scheduler.cancel(asked.request_id, time.monotonic())
        assert smollm2.answer(PATTERN, 20) == fresh
    assert smollm2.loop.totals.n_violations == 0


def test_without_a_limit_an_answer_ends_where_its_slot_does(smollm2: Rig) -> None:
    n_shifts = smollm2.loop.totals.n_shifts
    asked = smollm2.ask(PATTERN, None)
    smollm2.finish(asked)
    assert len(asked.prompt) + asked.n_generated == N_CTX
    assert smollm2.loop.totals.n_shifts == n_shifts


@pytest.mark.parametrize(("n_ctx", "swa_full"), [(512, True), (64, True), (64, False)])
def test_windows_are_shifted_too(window_path: Path, n_ctx: int, swa_full: bool) -> None:
    """One of random weights: what it says means nothing, that its cells are counted right after each step does."""
    rig = Rig(load(window_path, n_ctx=n_ctx, swa_full=swa_full))
    before = rig.answer("garden stone", 3)
    asked = [rig.ask("river " * 60, 2 * n_ctx), rig.ask("stone " * 5, 2 * n_ctx)]
    rig.finish(*asked)
    assert [sequence.n_generated for sequence in asked] == [2 * n_ctx] * 2
    assert rig.loop.totals.n_shifts >= 4
    assert rig.loop.totals.n_violations == 0
    assert rig.answer("garden stone", 3) == before
    rig.engine.backend.close()


def test_shifted_cells_may_change_places(window_path: Path) -> None:
    rig = Rig(load(window_path, n_ctx=64))
    memory = rig.engine.scheduler.memory
    asked = rig.ask("river " * 60, 150)
    while rig.loop.totals.n_shifts < 2 or memory.has_orders:
        rig.loop.step()
    source = asked.slot_id
    assert source is not None
    memory.exchange(Swap(source, 1 - source))
    for _ in range(3):
        rig.loop.step()
    assert asked.slot_id == 1 - source
    rig.finish(asked)
    assert (asked.n_generated, rig.loop.totals.n_swaps, rig.loop.totals.n_violations) == (150, 1, 0)
    rig.engine.backend.close()


@pytest.mark.parametrize(
    ("fixture", "why", "hint"),
    [
        ("window_path", "(gemma3) has layers that keep only the last 32 tokens of a slot", "--swa-full, or no --context-shift"),
        ("recurrent_path", "(mamba) has one state a slot, which no token can be taken out of", "no --context-shift"),
        ("hybrid_path", "(jamba) has one state a slot, which no token can be taken out of", "no --context-shift"),
    ],
    ids=["window", "recurrent", "hybrid"],
)
def test_where_it_cannot_be_done_the_start_says_so(request: pytest.FixtureRequest, fixture: str, why: str, hint: str) -> None:
    path: Path = request.getfixturevalue(fixture)
    with pytest.raises(ConfigError) as caught:
        load(path, n_ctx=1024)
    assert (caught.value.message, caught.value.hint) == (f"--context-shift cannot be used: the model {path.stem} {why}", hint)
