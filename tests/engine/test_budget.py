"""How large a prompt chunk may be."""

import pytest

from runner.engine.budget import PromptBudget


def test_nobody_decoding_takes_the_whole_batch() -> None:
    budget = PromptBudget(max_rows=512, target_gap_s=0.25)
    budget.learn_prompt(64, 0.064)
    assert budget.n_rows(others_decode=False) == 512


@pytest.mark.parametrize("others_decode", [True, False])
def test_the_first_chunk_of_all_is_small_because_nobody_knows_how_slow_the_model_is(others_decode: bool) -> None:
    budget = PromptBudget(max_rows=512, target_gap_s=0.25)
    budget.learn_decode(2.0)
    budget.learn_prompt(13, 5.0)
    assert budget.n_rows(others_decode=others_decode) == 64
    assert budget.longest_step_s is None


def test_chunks_fill_the_gap_that_the_decode_step_leaves() -> None:
    budget = PromptBudget(max_rows=512, target_gap_s=0.25)
    budget.learn_prompt(64, 64 * 0.001)
    budget.learn_decode(0.05)
    assert budget.n_rows(others_decode=True) == 192


def test_a_slow_machine_still_makes_progress() -> None:
    budget = PromptBudget(max_rows=512, target_gap_s=0.25)
    budget.learn_prompt(64, 64 * 0.5)
    assert budget.n_rows(others_decode=True) == 32


def test_a_batch_smaller_than_the_least_chunk_is_respected() -> None:
    budget = PromptBudget(max_rows=16, target_gap_s=0.25)
    budget.learn_prompt(64, 64 * 0.5)
    assert budget.n_rows(others_decode=True) == 16


def test_the_longest_step_is_a_full_chunk() -> None:
    budget = PromptBudget(max_rows=512, target_gap_s=0.25)
    assert budget.longest_step_s is None
    budget.learn_prompt(64, 0.64)
    assert budget.longest_step_s == 512 * 0.01
