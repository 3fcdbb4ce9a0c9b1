"""Slots and context that fit the memory there is."""

import pytest

from runner.engine.capacity import Wanted, choose_capacity, padded
from runner.errors import ConfigError

GIB = 1024**3
SMOL = {"n_ctx_train": 8192, "cell_bytes": 23_040, "weights_bytes": 140_000_000}


def test_the_default_is_four_slots_of_4096() -> None:
    chosen = choose_capacity(Wanted(None, None), memory_bytes=16 * GIB, **SMOL)
    assert (chosen.n_slots, chosen.n_ctx_slot, chosen.kv_bytes) == (4, 4096, 4 * 4096 * 23_040)


def test_the_training_context_is_never_taken_whole_by_default() -> None:
    assert choose_capacity(Wanted(None, None), n_ctx_train=32_768, cell_bytes=1, weights_bytes=1, memory_bytes=16 * GIB).n_ctx_slot == 4096


def test_a_small_training_context_bounds_the_default() -> None:
    assert choose_capacity(Wanted(None, None), n_ctx_train=2048, cell_bytes=1, weights_bytes=1, memory_bytes=16 * GIB).n_ctx_slot == 2048


def test_little_memory_gets_a_smaller_context_before_fewer_slots() -> None:
    chosen = choose_capacity(Wanted(None, None), memory_bytes=600_000_000, **SMOL)
    assert (chosen.n_slots, chosen.n_ctx_slot) == (4, 1024)
    assert "memory holds no more" in " ".join(chosen.notes)


def test_what_was_asked_for_is_exact() -> None:
    chosen = choose_capacity(Wanted(3, 1000), memory_bytes=16 * GIB, **SMOL)
    assert (chosen.n_slots, chosen.n_ctx_slot, chosen.kv_bytes) == (3, 1000, 3 * 1024 * 23_040)


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_capacity(Wanted(16, 32_768), memory_bytes=GIB, **SMOL)
    assert str(caught.value) == (
        "16 slots of 32,768 tokens need 11,520 MiB for the KV cache beside 133 MiB of weights, and 1,024 MiB of memory are free"
    )


@pytest.mark.parametrize(("n_slots", "n_ctx"), [(16, 32_768), (1, 50_000_000), (256, 1024)])
def test_the_hint_names_options_that_fit(n_slots: int, n_ctx: int) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_capacity(Wanted(n_slots, n_ctx), memory_bytes=GIB, **SMOL)
    assert caught.value.hint is not None
    _, slots, _, ctx = caught.value.hint.split()
    choose_capacity(Wanted(int(slots), int(ctx)), memory_bytes=GIB, **SMOL)


def test_there_is_no_hint_where_nothing_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_capacity(Wanted(1, 512), memory_bytes=GIB // 4, **SMOL)
    assert caught.value.hint is None


@pytest.mark.parametrize(("n_ctx", "cells"), [(1, 256), (256, 256), (257, 512), (1000, 1024), (4096, 4096)])
def test_cells_come_in_multiples_of_256(n_ctx: int, cells: int) -> None:
    assert padded(n_ctx) == cells
