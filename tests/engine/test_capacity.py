"""Slots and context that fit the memory there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engine.capacity import MOST_CELLS, Capacity, SlotMemory, Wanted, choose_capacity, padded
from runner.errors import ConfigError

GIB = 1024**3
SMOL = SlotMemory(23_040)
# Gemma 3 270M: 3 of 18 layers keep all, the others 512 tokens and a batch.
WINDOWS = SlotMemory(3072, 15_360, 1024)


def fitted(wanted: Wanted, memory_bytes: int) -> Capacity:
    """SmolLM2 135M."""
    return choose_capacity(wanted, n_ctx_train=8192, slot=SMOL, weights_bytes=140_000_000, memory_bytes=memory_bytes)


def test_the_default_is_four_slots_of_4096() -> None:
    chosen = fitted(Wanted(None, None), 16 * GIB)
    assert (chosen.n_slots, chosen.n_ctx_slot, chosen.kv_bytes) == (4, 4096, 4 * 4096 * 23_040)


def test_the_training_context_is_never_taken_whole_by_default() -> None:
    assert (
        choose_capacity(Wanted(None, None), n_ctx_train=32_768, slot=SlotMemory(1), weights_bytes=1, memory_bytes=16 * GIB).n_ctx_slot
        == 4096
    )


def test_a_small_training_context_bounds_the_default() -> None:
    assert (
        choose_capacity(Wanted(None, None), n_ctx_train=2048, slot=SlotMemory(1), weights_bytes=1, memory_bytes=16 * GIB).n_ctx_slot == 2048
    )


def test_little_memory_gets_a_smaller_context_before_fewer_slots() -> None:
    chosen = fitted(Wanted(None, None), 600_000_000)
    assert (chosen.n_slots, chosen.n_ctx_slot) == (4, 1024)
    assert "memory holds no more" in " ".join(chosen.notes)


def test_what_was_asked_for_is_exact() -> None:
    chosen = fitted(Wanted(3, 1000), 16 * GIB)
    assert (chosen.n_slots, chosen.n_ctx_slot, chosen.kv_bytes) == (3, 1000, 3 * 1024 * 23_040)


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        fitted(Wanted(16, 32_768), GIB)
    assert str(caught.value) == (
        "16 slots of 32,768 tokens need 11,520 MiB for the KV cache beside 133 MiB of weights, and 1,024 MiB of memory are free"
    )


@pytest.mark.parametrize(("n_slots", "n_ctx"), [(16, 32_768), (1, 50_000_000), (256, 1024)])
def test_the_hint_names_options_that_fit(n_slots: int, n_ctx: int) -> None:
    with pytest.raises(ConfigError) as caught:
        fitted(Wanted(n_slots, n_ctx), GIB)
    assert caught.value.hint is not None
    _, slots, _, ctx = caught.value.hint.split()
    fitted(Wanted(int(slots), int(ctx)), GIB)


def test_there_is_no_hint_where_nothing_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        fitted(Wanted(1, 512), GIB // 4)
    assert caught.value.hint is None


@pytest.mark.parametrize(("n_ctx", "cells"), [(1, 256), (256, 256), (257, 512), (1000, 1024), (4096, 4096)])
def test_cells_come_in_multiples_of_256(n_ctx: int, cells: int) -> None:
    assert padded(n_ctx) == cells


def test_layers_with_a_window_take_no_more_than_it() -> None:
    assert WINDOWS.n_bytes(1000) == 1024 * (3072 + 15_360)
    assert WINDOWS.n_bytes(4096) == 4096 * 3072 + 1024 * 15_360
    chosen = choose_capacity(Wanted(8, 4096), n_ctx_train=32_768, slot=WINDOWS, weights_bytes=1, memory_bytes=GIB // 2)
    assert chosen.kv_bytes == 8 * WINDOWS.n_bytes(4096)


SLOTS = st.builds(SlotMemory, st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(0, 40).map(lambda n: 256 * n))


@given(SLOTS, st.integers(0, 1 << 40))
def test_most_tokens_are_the_most_that_fit(slot: SlotMemory, n_bytes: int) -> None:
    n_tokens = slot.most_tokens(n_bytes)
    assert n_tokens % 256 == 0
    assert slot.n_bytes(n_tokens) <= n_bytes
    assert slot.n_bytes(n_tokens + 1) > n_bytes or n_tokens + 256 == MOST_CELLS
