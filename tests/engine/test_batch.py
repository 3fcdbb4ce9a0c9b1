"""How many passes over the weights a batch costs."""

import pytest

from runner.engine.batch import BatchPlan, Chunk, count_passes


@pytest.mark.parametrize(
    ("rows", "passes"),
    [
        ([], 0),
        ([(0, 1), (1, 1), (2, 1), (3, 1)], 1),
        ([(0, 1), (2, 1), (4, 1), (6, 1)], 4),
        ([(3, 1), (2, 1), (1, 1), (0, 1)], 4),
        ([(0, 1), (2, 1), (5, 1), (7, 1)], 4),
        ([(0, 10), (1, 20), (2, 30)], 3),
        ([(0, 1), (1, 1), (2, 64)], 2),
        ([(0, 8), (1, 8), (4, 8), (5, 8)], 2),
    ],
)
def test_passes_follow_the_rule_of_split_equal(rows: list[tuple[int, int]], passes: int) -> None:
    assert count_passes(rows) == passes


def test_a_plan_counts_its_rows_outputs_and_passes() -> None:
    plan = BatchPlan(chunks=(Chunk(0, 5, (1,), has_logits=True), Chunk(2, 0, (1, 2, 3), has_logits=False)))
    assert (plan.n_rows, plan.n_outputs, plan.n_passes) == (4, 1, 2)
