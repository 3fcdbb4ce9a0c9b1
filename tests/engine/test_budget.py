"""How large a prompt chunk may be."""

from runner.engine.budget import PromptBudget


def test_nobody_decoding_takes_the_whole_batch() -> None:
    assert PromptBudget(max_rows=512, target_gap_s=0.25).n_rows(others_decode=False) == 512


def test_the_first_chunk_beside_streams_is_small() -> None:
    assert PromptBudget(max_rows=512, target_gap_s=0.25).n_rows(others_decode=True) == 64


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
