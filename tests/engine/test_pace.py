"""When the next slots become free: the course of a machine whose steps cost what the test says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engine.pace import Pace, Work

STEP_S, ROW_S, GAP_S = 0.02, 0.001, 0.22
WORKS = st.builds(Work, st.integers(0, 3000), st.integers(1, 500))


def learned(**options: int) -> Pace:
    """A pace that has seen steps of `STEP_S` and rows of `ROW_S`."""
    pace = Pace(target_gap_s=GAP_S, **options)
    for n_rows in (0, 400, 0, 250) * 50:
        pace.learn_steps(10, n_rows, 10 * STEP_S + n_rows * ROW_S)
    return pace


PACE = learned()


def starts(running: list[Work], waiting: list[Work], n_slots: int) -> list[float]:
    return list(PACE.starts(running, waiting, n_slots))


def test_costs_of_steps_and_rows_are_told_apart() -> None:
    assert PACE.has_learned
    assert not Pace(target_gap_s=GAP_S).has_learned
    assert PACE.step_s == pytest.approx(STEP_S, rel=0.03)
    assert PACE.row_s == pytest.approx(ROW_S, rel=0.03)
    assert PACE.chunk_s == pytest.approx(GAP_S - STEP_S, rel=0.01)
    assert learned(chunk_rows=64).chunk_s == pytest.approx(64 * ROW_S, rel=0.03)


def test_free_slots_are_there_at_once() -> None:
    assert starts([Work(0, 10)], [Work(5, 5)] * 3, 3)[:2] == [0.0, 0.0]


def test_each_takes_the_slot_that_is_free_next() -> None:
    assert starts([Work(0, 10), Work(0, 40)], [Work(0, 10), Work(0, 10), Work(0, 10)], 2) == [
        pytest.approx(n * STEP_S, rel=0.03) for n in (10, 20, 30)
    ]


def test_a_prompt_takes_its_chunks_between_the_tokens_of_those_that_decode() -> None:
    # 400 rows are two chunks of 0.2 s, each beside a step: of 10 steps two take longer.
    (start,) = starts([Work(0, 10), Work(400, 100)], [Work(0, 1)], 2)
    assert start == pytest.approx(10 * STEP_S + 0.4, rel=0.03)
    # A prompt that is not done when the slot is free has taken part of its time.
    (start,) = starts([Work(0, 10), Work(4000, 100)], [Work(0, 1)], 2)
    assert start == pytest.approx(10 * GAP_S, rel=0.03)


def test_a_prompt_that_is_alone_costs_its_rows() -> None:
    (start,) = starts([Work(1000, 5)], [Work(0, 1)], 1)
    assert start == pytest.approx(1000 * ROW_S + 5 * STEP_S, rel=0.03)


@given(st.lists(WORKS, max_size=8), st.lists(WORKS, min_size=1, max_size=30))
def test_starts_are_in_order_and_none_is_later_than_all_the_work_before_it(running: list[Work], waiting: list[Work]) -> None:
    n_slots = max(1, len(running))
    found = starts(running, waiting, n_slots)
    assert found == sorted(found)
    alone_s = 0.0
    for work, start in zip([*running, *waiting], [0.0] * len(running) + found, strict=True):
        assert 0.0 <= start <= alone_s * 1.001 + 1e-9
        alone_s += work.n_prompt * PACE.row_s + work.n_new * PACE.step_s


def test_an_answer_is_as_long_as_those_that_were_allowed_about_as_much() -> None:
    pace = learned()
    for _ in range(300):
        pace.learn_end(n_prompt=100, n_cached=40, n_generated=30, max_tokens=30)
        pace.learn_end(n_prompt=100, n_cached=40, n_generated=200, max_tokens=4000)
    exact, open_ended = pace.new(n_prompt=50, max_tokens=20), pace.new(n_prompt=50, max_tokens=3000)
    assert exact.n_prompt == pytest.approx(30, rel=0.05)
    assert exact.n_new == pytest.approx(20, rel=0.05)
    assert open_ended.n_new == pytest.approx(150, rel=0.05)
    # Of what was asked for exactly the rest is left; of an open end about as much as ever.
    begun = pace.begun(n_prompt=50, max_tokens=20, n_cells=62, n_generated=12)
    assert begun.n_prompt == 0
    assert begun.n_new == pytest.approx(8, rel=0.05)
    assert pace.begun(n_prompt=50, max_tokens=3000, n_cells=250, n_generated=200).n_new == pytest.approx(140, rel=0.05)
    assert pace.begun(n_prompt=50, max_tokens=20, n_cells=35, n_generated=0).n_prompt == 15


def test_before_anything_has_ended_an_answer_without_a_limit_is_no_slot_full() -> None:
    assert learned().new(n_prompt=10, max_tokens=100_000).n_new == pytest.approx(128)
    assert learned().new(n_prompt=10, max_tokens=16).n_new == 16
