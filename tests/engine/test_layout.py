"""Which swap closes a gap, and when it is not worth it."""

import pytest

from runner.engine.kv import Swap
from runner.engine.layout import Mover, Weights, closing_swap

CHEAP = Weights(model_bytes=100_000_000, cell_bytes=23_040)


def movers(*ids: int, n_cells: int = 100, n_steps_left: int = 100) -> dict[int, Mover]:
    """Movers of one kind at the given slots."""
    return {slot_id: Mover(n_cells, n_steps_left) for slot_id in ids}


def runs(ids: set[int]) -> int:
    """Runs of consecutive numbers."""
    return sum(i - 1 not in ids for i in ids)


@pytest.mark.parametrize("busy", [{0, 2, 5, 7}, {0, 2, 4, 6}, {1, 3, 5, 7}, {0, 7}, {0, 1, 6, 7}, {0, 3, 4, 7}])
def test_swaps_join_all_decoding_slots_into_one_run(busy: set[int]) -> None:
    ids = set(busy)
    for _ in range(8):
        swap = closing_swap(movers(*ids), ids, dict.fromkeys(set(range(8)) - ids, 0), CHEAP)
        if swap is None:
            break
        before = runs(ids)
        ids = ids - {swap.source} | {swap.target}
        assert runs(ids) <= before
    assert runs(ids) == 1


def test_adjacent_slots_are_left_alone() -> None:
    assert closing_swap(movers(2, 3, 4), {2, 3, 4}, dict.fromkeys((0, 1, 5, 6, 7), 0), CHEAP) is None


def test_a_sequence_that_is_nearly_done_is_not_moved() -> None:
    assert closing_swap(movers(0, 2, n_cells=3000, n_steps_left=2), {0, 2}, {1: 0, 3: 0}, CHEAP) is None


def test_a_long_context_of_a_small_model_is_not_moved() -> None:
    tiny = Weights(model_bytes=1_000_000, cell_bytes=23_040)
    assert closing_swap(movers(0, 2, n_cells=4000), {0, 2}, {1: 0, 3: 0}, tiny) is None


def test_the_target_with_the_fewest_cached_cells_is_taken() -> None:
    assert closing_swap(movers(0, 4), {0, 4}, {1: 900, 2: 0, 3: 50, 5: 900}, CHEAP) == Swap(0, 3)


def test_only_decoding_slots_move_but_prefilling_ones_count_as_busy() -> None:
    assert closing_swap(movers(4), {0, 4}, {1: 0, 2: 0, 3: 0}, CHEAP) == Swap(4, 1)
