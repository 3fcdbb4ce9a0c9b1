"""What llama.cpp does where all slots take their cells from one pool, as far as the engine rests on it.

The small models have weights of 32 bits: what is right differs by rounding (below SAME), a single cell too few by far more.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.llama.context import ContextSize, Kernels
from runner.llama.library import Library
from tests.llama.raw_slots import LoadedModel, Logits, Slots, distance

SAME = 0.02
N_POOL = 512
NO_ROOM = 1


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(lambda _level, _text: None)


@pytest.fixture(scope="module")
def full(library: Library, smollm2_path: Path) -> Iterator[LoadedModel]:
    """All layers attend to all."""
    loaded = LoadedModel(library, smollm2_path)
    yield loaded
    loaded.model.close()


@pytest.fixture(scope="module")
def window(library: Library, window_path: Path) -> Iterator[LoadedModel]:
    """Layers with a window of 32 tokens."""
    loaded = LoadedModel(library, window_path)
    yield loaded
    loaded.model.close()


class Pool(Slots):
    """Slots that share 512 cells."""

    def __init__(self, loaded: LoadedModel, n_slots: int = 3, n_batch: int = 512) -> None:
        super().__init__(loaded, ContextSize(n_slots, N_POOL, n_batch, 2, 2, N_POOL), Kernels())

    def __enter__(self) -> "Pool":
        return self

    def share(self, source: int, target: int, keep: int) -> None:
        """seq_cp of the first `keep` cells."""
        self.api.llama_memory_seq_cp(self._context.memory, source, target, 0, keep)


def truth(loaded: LoadedModel, tokens: list[int], question: list[int]) -> Logits:
    """The logits behind both, from nothing, in a slot with cells of its own."""
    with loaded.slots(1) as slots:
        slots.feed(0, tokens)
        return slots.feed(0, question, len(tokens))


def test_a_part_is_shared_at_once_and_outlives_its_source(full: LoadedModel) -> None:
    tokens, question = full.tokens(300), full.tokens(340)[300:]
    with Pool(full) as slots:
        slots.feed(0, tokens)
        slots.share(0, 1, 200)
        assert slots.span(1) == (0, 199)
        slots.remove(0)
        assert distance(slots.feed(1, question, 200), truth(full, tokens[:200], question)) < SAME


def test_a_shared_cell_is_one_cell(full: LoadedModel) -> None:
    tokens = full.tokens(400)
    with Pool(full) as slots:
        slots.feed(0, tokens)
        slots.share(0, 1, 400)
        slots.share(0, 2, 400)
        for slot, n in ((0, 40), (1, 40), (2, 32)):
            assert slots.decode(slot, full.tokens(n), 400) == 0
        assert slots.decode(0, tokens[:1], 440) == NO_ROOM


def test_a_batch_without_room_changes_nothing_and_one_that_just_fits_is_computed(full: LoadedModel) -> None:
    tokens, question = full.tokens(300), full.tokens(340)[300:]
    with Pool(full) as slots:
        slots.feed(0, tokens)
        assert slots.decode(1, full.tokens(N_POOL - 300 + 1), 0) == NO_ROOM
        assert (slots.span(0), slots.span(1)) == ((0, 299), (-1, -1))
        assert slots.decode(1, full.tokens(N_POOL - 300), 0) == 0
        slots.remove(1)
        assert distance(slots.feed(0, question, 300), truth(full, tokens, question)) < SAME


def test_holes_are_filled(full: LoadedModel) -> None:
    """Every second cell is another slot's; when that one is gone, a prompt fits into its holes."""
    tokens = full.tokens(256)
    with Pool(full) as slots:
        for pos in range(0, 256, 8):
            for slot in (0, 1):
                assert slots.decode(slot, tokens[pos : pos + 8], pos) == 0
        slots.remove(0)
        slots.feed(2, tokens[:216])
        found = slots.feed(2, tokens[216:], 216)
        # Cells in another order are summed in another order, which SmolLM2's quantised weights make more of.
        right, wrong = truth(full, tokens[:216], tokens[216:]), truth(full, tokens[8:216], tokens[216:])
        assert distance(found, right) < 0.3 < 0.6 < distance(found, wrong)


def test_a_shared_slot_is_saved_whole_and_brought_back_into_cells_of_its_own(full: LoadedModel) -> None:
    tokens, question = full.tokens(150), full.tokens(190)[150:]
    with Pool(full) as slots:
        slots.feed(0, tokens)
        slots.share(0, 1, 150)
        state = slots.save(1)
        assert slots.load(2, state)
        assert distance(slots.feed(2, question, 150), truth(full, tokens, question)) < SAME
        # 150 shared cells and 190 of the copy: of 172 cells none are left for another copy of more.
        slots.feed(0, full.tokens(100), 150)
        slots.remove(1)
        assert not slots.load(1, state)
        assert slots.span(1) == (-1, -1)
        assert slots.span(0) == (0, 249)


def test_window_cells_of_two_slots_are_never_free_again(window: LoadedModel) -> None:
    """Why slots of models with windows get copies: after a share the next tokens have no room, though the pool has."""
    tokens = window.tokens(250)
    with Pool(window, n_slots=2, n_batch=64) as slots:
        for pos in range(0, 250, 50):
            slots.feed(0, tokens[pos : pos + 50], pos)
        slots.share(0, 1, 250)
        status = 0
        for pos in range(250, 350, 10):
            status = status or slots.decode(0, window.tokens(10), pos)
        assert status == NO_ROOM


def test_a_window_is_copied_by_its_state(window: LoadedModel) -> None:
    tokens, question = window.tokens(150), window.tokens(190)[150:]
    with Pool(window) as slots:
        slots.feed(0, tokens)
        assert slots.load(1, slots.save(0))
        assert distance(slots.feed(1, question, 150), truth(window, tokens, question)) < SAME
