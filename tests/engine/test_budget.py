"""How large a prompt chunk may be."""

import pytest

from runner.engine.batch import BatchPlan, Chunk
from runner.engine.budget import PromptBudget
from runner.engine.costs import Rows, StepCosts

STREAMS = Rows(3, 1, 100)


def costs_of(*, row_s: float, decode_s: float = 0.0, pass_s: float = 0.0) -> StepCosts:
    """Of a machine whose rows cost the same everywhere."""
    costs = StepCosts()
    for n in (64, 128, 192, 256) * 8:
        costs.learn(BatchPlan(chunks=(Chunk(0, 0, [1] * n, has_logits=False, is_prompt=True),)), pass_s + n * row_s)
    if decode_s:
        streams = tuple(Chunk(slot_id, 99, (1,), has_logits=True) for slot_id in range(3))
        costs.learn(BatchPlan(chunks=streams), decode_s)
    return costs


def test_nobody_decoding_takes_the_whole_batch() -> None:
    assert PromptBudget(costs_of(row_s=0.001), max_rows=512, target_gap_s=0.25).n_rows(0, None) == 512


@pytest.mark.parametrize("decode", [STREAMS, None])
def test_the_first_chunk_of_all_is_small_because_nobody_knows_how_slow_the_model_is(decode: Rows | None) -> None:
    budget = PromptBudget(StepCosts(), max_rows=512, target_gap_s=0.25)
    assert budget.n_rows(0, decode) == 64
    assert budget.longest_step_s is None


def test_chunks_fill_the_gap_that_the_decode_step_leaves() -> None:
    budget = PromptBudget(costs_of(row_s=0.001, decode_s=0.05), max_rows=512, target_gap_s=0.25)
    assert budget.n_rows(0, STREAMS) in (176, 192)


def test_a_slow_machine_still_makes_progress() -> None:
    assert PromptBudget(costs_of(row_s=0.5), max_rows=512, target_gap_s=0.25).n_rows(0, STREAMS) == 32


def test_behind_a_long_context_fewer_rows_than_64_cost_as_much_as_64() -> None:
    budget = PromptBudget(costs_of(row_s=0.5), max_rows=512, target_gap_s=0.25)
    assert budget.n_rows(1024, STREAMS) == 64
    budget = PromptBudget(costs_of(row_s=0.001), max_rows=512, target_gap_s=0.25)
    assert all(budget.n_rows(at, STREAMS) >= 64 for at in range(1024, 4096, 100))


def test_a_chunk_is_never_mostly_the_cost_of_its_pass() -> None:
    """Where going over the weights takes half a second a chunk of 32 rows would double what a prompt costs."""
    budget = PromptBudget(costs_of(row_s=0.002, pass_s=0.5), max_rows=512, target_gap_s=0.25)
    assert 192 <= budget.n_rows(0, STREAMS) <= 256


def test_where_rows_cost_nothing_beside_their_pass_a_chunk_is_as_large_as_a_batch() -> None:
    """A GPU takes no longer for 512 rows of a small model than for 64."""
    costs = StepCosts()
    for n in (64, 512) * 16:
        costs.learn(BatchPlan(chunks=(Chunk(0, 0, [1] * n, has_logits=False, is_prompt=True),)), 0.03 - n * 1e-5)
    assert PromptBudget(costs, max_rows=500, target_gap_s=0.25).n_rows(0, STREAMS) == 496
    assert PromptBudget(costs, max_rows=512, target_gap_s=0.001).n_rows(0, STREAMS) == 512


def test_a_fixed_size_is_taken_whatever_it_costs() -> None:
    budget = PromptBudget(costs_of(row_s=0.5), max_rows=512, target_gap_s=0.25, fixed_rows=100)
    assert budget.n_rows(0, STREAMS) == 100
    assert budget.n_rows(0, None) == 512


def test_a_batch_smaller_than_the_least_chunk_is_respected() -> None:
    assert PromptBudget(costs_of(row_s=0.5), max_rows=16, target_gap_s=0.25).n_rows(0, STREAMS) == 16


@pytest.mark.parametrize(
    ("n_left", "at", "n"),
    [(200, 0, 100), (193, 0, 100), (192, 0, 192), (10, 0, 10), (400, 2000, 136), (200, 2000, 100), (10, 2000, 10), (250, 2000, 128)],
)
def test_the_last_chunks_of_a_prompt_are_of_one_size(n_left: int, at: int, n: int) -> None:
    assert PromptBudget(StepCosts(), max_rows=512, target_gap_s=0.25).chunk_rows(n_left, 192, at, STREAMS) == n


@pytest.mark.parametrize("n_left", range(64, 700))
def test_behind_a_long_context_no_chunk_is_just_too_small_for_the_fast_kernel_unless_there_is_no_way(n_left: int) -> None:
    budget = PromptBudget(StepCosts(), max_rows=512, target_gap_s=0.25)
    chunks = []
    while n_left:
        chunks.append(budget.chunk_rows(n_left, 96, 2000, STREAMS))
        n_left -= chunks[-1]
    assert all(64 <= n <= 96 for n in chunks[:-1])
    assert chunks[-1] >= 64 or sum(chunks[-2:]) < 128


def test_behind_a_long_context_a_chunk_that_is_too_small_is_as_small_as_its_cost_demands() -> None:
    costs = costs_of(row_s=0.001)
    for n in (60, 40, 20) * 8:
        costs.learn(BatchPlan(chunks=(Chunk(0, 2000, [1] * n, has_logits=False, is_prompt=True),)), n * 0.005)
    budget = PromptBudget(costs, max_rows=512, target_gap_s=0.15)
    assert 25 <= budget.chunk_rows(60, 192, 2000, STREAMS) <= 32
    assert budget.chunk_rows(60, 192, 2000, None) == 60
    assert budget.chunk_rows(60, 192, 0, STREAMS) == 60
    fixed = PromptBudget(costs, max_rows=512, target_gap_s=0.15, fixed_rows=192)
    assert fixed.chunk_rows(60, 192, 2000, STREAMS) == 60


def test_the_longest_step_is_a_full_chunk() -> None:
    assert PromptBudget(costs_of(row_s=0.001), max_rows=512, target_gap_s=0.25).longest_step_s == pytest.approx(0.512, rel=0.05)
