"""What llama.cpp's memory does and does not do, as far as the engine rests on it: trims, copies, states, checkpoints, shifts.

The small models have weights of 32 bits: what is right differs by rounding (below SAME), a single cell too few by far more.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from runner.config import FlashAttn
from runner.llama.library import Library
from tests.llama.raw_slots import PARTIAL, WHOLE, LoadedModel, Logits, Slots, distance
from tests.llama.recurrent import D_CONV, D_INNER, D_STATE, N_EMBD, N_HEAD, N_HEAD_KV

SAME = 0.02
OTHER = 0.1

N = 300
KINDS = ["full", "window", "recurrent", "hybrid"]
WITH_CELLS = ["full", "window", "hybrid"]
CUTTABLE = ["full", "window"]

Load = Callable[[str], LoadedModel]


@pytest.fixture(scope="module")
def load(smollm2_path: Path, window_path: Path, recurrent_path: Path, hybrid_path: Path) -> Iterator[Load]:
    paths = {"full": smollm2_path, "window": window_path, "recurrent": recurrent_path, "hybrid": hybrid_path}
    library = Library(lambda _level, _text: None)
    loaded: dict[str, LoadedModel] = {}

    def load(kind: str) -> LoadedModel:
        if kind not in loaded:
            loaded[kind] = LoadedModel(library, paths[kind])
        return loaded[kind]

    yield load
    for model in loaded.values():
        model.model.close()


class Story:
    """Tokens of one model, and the right answers to them, each from a context of its own."""

    def __init__(self, loaded: LoadedModel) -> None:
        tokens = loaded.tokens(2 * N + 40)
        self.loaded = loaded
        self.first, self.second, self.question = tokens[:N], tokens[N : 2 * N], tokens[2 * N :]

    def truth(self, prompt: list[int], n_batch: int = 512) -> Logits:
        """The logits behind `prompt` and the question, from nothing."""
        with self.loaded.slots(1, n_batch=n_batch) as slots:
            slots.feed(0, prompt)
            return self.ask(slots, 0, len(prompt))

    def ask(self, slots: Slots, slot: int, pos: int) -> Logits:
        """The logits behind the question, put at `pos`."""
        return slots.feed(slot, self.question, pos)


@pytest.mark.parametrize(("kind", "can_be_cut"), [("full", True), ("window", True), ("recurrent", False), ("hybrid", False)])
def test_which_memories_can_be_cut(load: Load, kind: str, can_be_cut: bool) -> None:
    model = load(kind)
    assert model.model.can_be_cut == can_be_cut
    with model.slots() as slots:
        slots.feed(0, model.tokens(100))
        assert slots.remove(0, 50, -1) == can_be_cut
        assert slots.span(0)[1] == (49 if can_be_cut else 99)


@pytest.mark.parametrize("n_batch", [16, 64, 512])
@pytest.mark.parametrize("how", ["live", "copied", "restored"])
def test_a_window_can_be_continued_where_the_next_tokens_window_begins(load: Load, n_batch: int, how: str) -> None:
    """pos_min <= max(0, keep - n_swa + 1), and not one token less."""
    story = Story(load("window"))
    n_swa = story.loaded.model.n_swa

    def trimmed(keep: int | None) -> tuple[int, Logits | None]:
        with story.loaded.slots(n_batch=n_batch) as slots:
            slots.feed(0, story.first)
            if how == "copied":
                slots.copy(0, 1)
            if how == "restored":
                slots.load(1, slots.save(0))
            slot = int(how != "live")
            oldest = slots.span(slot)[0]
            if keep is None:
                return oldest, None
            assert slots.remove(slot, keep, -1)
            return oldest, slots.feed(slot, story.question[:1], keep)

    def right(keep: int) -> bool:
        answer = trimmed(keep)[1]
        assert answer is not None
        with story.loaded.slots(1, n_batch=n_batch) as slots:
            slots.feed(0, story.first[:keep])
            apart = distance(slots.feed(0, story.question[:1], keep), answer)
        assert apart < SAME or apart > OTHER
        return apart < SAME

    oldest = trimmed(None)[0]
    bound = oldest + n_swa - 1
    assert right(bound)
    if oldest > 0:
        assert not right(bound - 1)
    if how == "restored":
        assert bound == N - 1


@pytest.mark.parametrize("how", ["live", "copied"])
def test_swa_full_makes_every_trim_right(load: Load, how: str) -> None:
    story = Story(load("window"))
    for keep in (2, 40, 200, N - 1):
        with story.loaded.slots(swa_full=True) as slots:
            slots.feed(0, story.first)
            if how == "copied":
                slots.copy(0, 1)
            slot = int(how == "copied")
            assert slots.span(slot) == (0, N - 1)
            slots.remove(slot, keep, -1)
            assert distance(story.truth(story.first[:keep]), story.ask(slots, slot, keep)) < SAME


def test_a_state_holds_one_window_also_with_swa_full(load: Load) -> None:
    story = Story(load("window"))
    with story.loaded.slots(swa_full=True) as slots:
        slots.feed(0, story.first)
        slots.load(1, slots.save(0))
        assert slots.span(1) == (N - story.loaded.model.n_swa, N - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_continues_at_its_end_in_any_slot(load: Load, kind: str) -> None:
    story = Story(load(kind))
    with story.loaded.slots() as slots:
        slots.feed(0, story.first)
        slots.feed(1, story.second)
        assert slots.load(1, slots.save(0))
        assert distance(story.truth(story.first), story.ask(slots, 1, N)) < SAME


@pytest.mark.parametrize("kind", ["window", "recurrent", "hybrid"])
@pytest.mark.parametrize("through_state", [False, True])
def test_a_checkpoint_takes_a_slot_back(load: Load, kind: str, through_state: bool) -> None:
    """Partial state set, then trimmed: in the slot it was taken from, and in one that got its cells through a state."""
    story = Story(load(kind))
    with story.loaded.slots(n_batch=64) as slots:
        slots.feed(0, story.first)
        mark = slots.save(0, PARTIAL)
        slots.feed(0, story.second, N)
        slot = int(through_state)
        if through_state:
            slots.load(1, slots.save(0))
        assert slots.load(slot, mark, PARTIAL)
        assert slots.remove(slot, N, -1)
        assert slots.span(slot)[1] == N - 1
        assert distance(story.truth(story.first, 64), story.ask(slots, slot, N)) < SAME


def test_a_hybrid_trimmed_before_its_checkpoint_keeps_foreign_cells(load: Load) -> None:
    """Why the order is set, then trim: the other way seq_rm refuses, and nothing shows it later."""
    story = Story(load("hybrid"))
    with story.loaded.slots() as slots:
        slots.feed(0, story.first)
        mark, n_bytes = slots.save(0, PARTIAL), slots.size(0)
        slots.feed(0, story.second, N)
        assert not slots.remove(0, N, -1)
        assert slots.load(0, mark, PARTIAL)
        assert slots.span(0) == (N - 1, N - 1)
        assert slots.size(0) > n_bytes


@pytest.mark.parametrize("kind", WITH_CELLS)
def test_a_copy_is_queued_until_the_next_decode(load: Load, kind: str) -> None:
    """The target's positions are there at once, its bytes are not: whatever touches them in between reads or leaves wrong ones."""
    story = Story(load(kind))
    truth = {0: story.truth(story.first), 1: story.truth(story.second)}
    with story.loaded.slots(3) as slots:
        slots.feed(0, story.first)
        slots.feed(2, story.second)
        first, second = slots.save(0), slots.save(2)

        slots.copy(0, 1)
        assert slots.span(1) == slots.span(0)
        early = slots.save(1)
        slots.load(2, early)
        assert distance(truth[0], story.ask(slots, 2, N)) > OTHER

        slots.load(2, slots.save(1))
        assert distance(truth[0], story.ask(slots, 2, N)) < SAME

        slots.copy(0, 1)
        slots.remove(1)
        slots.load(1, second)
        assert distance(truth[1], story.ask(slots, 1, N)) > OTHER

        slots.load(0, first)
        slots.copy(0, 1)
        slots.load(0, second)
        assert distance(truth[0], story.ask(slots, 1, N)) > OTHER


@pytest.mark.parametrize("kind", KINDS)
def test_a_queued_copy_survives_its_source(load: Load, kind: str) -> None:
    """The source may be cleared and refilled by the very batch that carries the copy out; copies of copies are done in order."""
    story = Story(load(kind))
    with story.loaded.slots(3) as slots:
        slots.feed(0, story.first)
        slots.copy(0, 1)
        slots.copy(1, 2)
        slots.remove(0)
        slots.feed(0, story.second)
        for slot in (1, 2):
            assert distance(story.truth(story.first), story.ask(slots, slot, N)) < SAME
        assert distance(story.truth(story.second), story.ask(slots, 0, N)) < SAME


@pytest.mark.parametrize("kind", CUTTABLE)
def test_a_copy_is_trimmed_before_it_is_done(load: Load, kind: str) -> None:
    story = Story(load(kind))
    keep = N - 20
    with story.loaded.slots() as slots:
        slots.feed(0, story.first)
        slots.copy(0, 1)
        assert slots.remove(1, keep, -1)
        assert slots.span(0)[1] == N - 1
        assert distance(story.truth(story.first[:keep]), story.ask(slots, 1, keep)) < SAME
        assert distance(story.truth(story.first), story.ask(slots, 0, N)) < SAME


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_slots", [2, 5])
@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_what_a_state_weighs(load: Load, kind: str, n_slots: int, flash_attn: str) -> None:
    """Header + tokens x bytes a cell, to the byte: llama_kv_cache::state_write and llama_memory_recurrent::state_write."""
    loaded = load(kind)
    row_bytes, state_bytes = 2 * N_EMBD // N_HEAD * N_HEAD_KV * 2, 4 * ((D_CONV - 1) * D_INNER + D_STATE * D_INNER)

    def cells(n_layers: int, layer_bytes: int, n: int) -> int:
        return 4 + 4 * n_slots + (8 + 24 * n_layers if n else 0) + n * (12 + n_layers * layer_bytes)

    def fixed(n_layers: int, n: int) -> int:
        return 12 + 24 * n_layers + (8 + n_layers * state_bytes if n else 0)

    def expected(n: int) -> tuple[int, int]:
        match kind:
            case "full":
                return (8 + cells(30, 2 * 3 * 64 * 2, n),) * 2
            case "window":
                window = cells(3, row_bytes, min(n, loaded.model.n_swa))
                return 8 + cells(1, row_bytes, n) + window, 8 + window
            case "recurrent":
                return (8 + fixed(3, n),) * 2
            case _:
                return 8 + cells(2, row_bytes, n) + fixed(2, n), 8 + fixed(2, n)

    with loaded.slots(n_slots, n_ctx_slot=512, n_batch=256, flash_attn=cast("FlashAttn", flash_attn)) as slots:
        for n in (0, 1, 31, 33, 150):
            slots.remove(1)
            if n:
                slots.feed(1, loaded.tokens(n))
            assert (slots.size(1, WHOLE), slots.size(1, PARTIAL)) == expected(n)


def test_a_shift_is_queued_and_a_state_must_wait_for_it(load: Load) -> None:
    story = Story(load("window"))
    keep, gone = 20, 100
    with story.loaded.slots(3, swa_full=True) as slots:
        assert slots.can_shift()
        slots.feed(0, story.first)
        slots.remove(0, keep, keep + gone)
        slots.shift(0, keep + gone, -gone)
        assert slots.span(0) == (0, N - gone - 1)
        early = slots.save(0)
        slots.feed(2, story.second[:1])
        late = slots.save(0)
        answer = story.ask(slots, 0, N - gone)
        slots.load(1, late)
        assert distance(answer, story.ask(slots, 1, N - gone)) < SAME
        slots.load(1, early)
        assert distance(answer, story.ask(slots, 1, N - gone)) > OTHER


def test_a_window_smaller_than_the_slot_cannot_be_shifted(load: Load) -> None:
    with load("window").slots(n_ctx_slot=1024, n_batch=64) as slots:
        assert not slots.can_shift()
    with load("window").slots(n_ctx_slot=1024, n_batch=64, swa_full=True) as slots:
        assert slots.can_shift()


@pytest.mark.parametrize("kind", WITH_CELLS)
def test_no_room_changes_nothing(load: Load, kind: str) -> None:
    story = Story(load(kind))
    with story.loaded.slots(n_ctx_slot=512) as slots:
        slots.feed(0, story.first)
        before = slots.span(0)
        assert slots.decode(0, story.loaded.tokens(512 - N + 1), N) == 1
        assert slots.span(0) == before
        assert distance(story.truth(story.first), story.ask(slots, 0, N)) < SAME
