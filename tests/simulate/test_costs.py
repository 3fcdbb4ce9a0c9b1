"""The cost of a step: the figures it was fitted to, and the passes it counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engine.batch import BatchPlan, Chunk, count_passes, passes
from runner.errors import ConfigError
from runner.simulate.costs import Costs, StepCost

COST = StepCost(Costs())


def decoding(slots: list[int], context: int) -> BatchPlan:
    """One row each."""
    return BatchPlan(chunks=tuple(Chunk(slot_id, context - 1, (1,), True) for slot_id in slots))


def prompt(n: int, context: int) -> BatchPlan:
    """A chunk after so many tokens."""
    return BatchPlan(chunks=(Chunk(0, context, [1] * n, has_logits=False, is_prompt=True),))


@pytest.mark.parametrize(("n_rows", "milliseconds"), [(1, 6.1), (2, 15.9), (4, 22.0), (8, 25.8)])
def test_decode_steps_cost_what_was_measured(n_rows: int, milliseconds: float) -> None:
    assert COST.seconds(decoding(list(range(n_rows)), 200)) * 1000 == pytest.approx(milliseconds, rel=0.02)


@pytest.mark.parametrize(("context", "tokens_s"), [(0, 178), (1024, 123), (3000, 84)])
def test_a_long_context_costs_a_decoding_row_what_was_measured(context: int, tokens_s: float) -> None:
    assert 1 / COST.seconds(decoding([0], max(1, context))) == pytest.approx(tokens_s, rel=0.1)


@pytest.mark.parametrize(("context", "tokens_s"), [(0, 1102), (1024, 762), (3000, 478)])
def test_prompt_chunks_cost_what_was_measured(context: int, tokens_s: float) -> None:
    assert 512 / COST.seconds(prompt(512, context)) == pytest.approx(tokens_s, rel=0.03)


def test_slots_that_are_not_adjacent_cost_a_pass_each() -> None:
    assert COST.seconds(decoding([0, 2, 5, 7], 200)) == pytest.approx(4 * COST.seconds(decoding([0], 200)))


def test_bytes_that_are_moved_cost() -> None:
    assert COST.moved_s(1000) == pytest.approx(1000 * 23_040 * 0.5e-9)


def test_no_row_costs_more_than_the_worst() -> None:
    assert all(COST.pass_s(n) <= n * COST.worst_row_s for n in range(1, 3000))


@given(st.dictionaries(st.integers(0, 12), st.integers(1, 40), max_size=9))
def test_passes_are_those_of_the_engine_and_hold_every_row(lengths: dict[int, int]) -> None:
    chunks = [Chunk(slot_id, 10 * slot_id, [1] * n, False) for slot_id, n in sorted(lengths.items())]
    found = list(passes(chunks))
    assert len(found) == count_passes([(chunk.slot_id, len(chunk.tokens)) for chunk in chunks])
    assert sum(n for n, _, _ in found) == sum(lengths.values())
    assert max((longest for _, _, longest in found), default=0) == max((chunk.pos + len(chunk.tokens) for chunk in chunks), default=0)


def test_costs_are_the_defaults_with_what_is_given() -> None:
    assert Costs.from_json('{"byte_s": 1e-9}') == Costs(byte_s=1e-9)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"tokens": 1}',
        '{"pass_s": [[1, 0.1]]}',
        '{"pass_s": [[2, 0.1], [1, 0.2]]}',
        '{"pass_s": [[1, 0], [2, 1]]}',
        '{"byte_s": -1}',
    ],
)
def test_costs_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Costs.from_json(text)
