"""What an engine learns of its steps."""

import pytest

from runner.engine.batch import BatchPlan, Chunk
from runner.engine.costs import Rows, StepCosts
from runner.simulate.costs import Costs, StepCost

MACHINE = StepCost(Costs())


def decoding(*slots: int, at: int = 200) -> BatchPlan:
    """A row each."""
    return BatchPlan(chunks=tuple(Chunk(slot_id, at, (1,), has_logits=True) for slot_id in slots))


def prompt(n: int, at: int = 0, slot_id: int = 0) -> BatchPlan:
    """A chunk after so many tokens."""
    return BatchPlan(chunks=(Chunk(slot_id, at, [1] * n, has_logits=False, is_prompt=True),))


def taught() -> StepCosts:
    """By a prompt of 4,000 tokens in chunks, beside 1 to 8 streams that grow as long."""
    costs = StepCosts()
    for at, n in zip(range(0, 3840, 192), [192, 128, 64, 192, 256] * 4, strict=True):
        costs.learn(prompt(n, at), MACHINE.seconds(prompt(n, at)))
        for n_streams in range(1, 9):
            streams = decoding(*range(n_streams), at=100 + at)
            costs.learn(streams, MACHINE.seconds(streams))
    return costs


def test_nothing_is_known_before_there_was_a_step() -> None:
    costs = StepCosts()
    assert costs.decode_s(Rows(1, 1, 1)) is None
    assert costs.prompt_s(Rows(1, 1, 1)) is None
    assert costs.move_s(1) is None
    assert costs.prompt_rows(1.0, 0) is None
    assert costs.longest_step_s(512) is None


@pytest.mark.parametrize(("n", "at"), [(64, 0), (128, 1000), (256, 3000), (192, 3800)])
def test_prompt_chunks_are_foretold_at_every_context(n: int, at: int) -> None:
    assert taught().prompt_s(Rows(n, 1, at + n)) == pytest.approx(MACHINE.seconds(prompt(n, at)), rel=0.1)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_decode_steps_are_foretold_for_every_number_of_streams(n: int) -> None:
    plan = decoding(*range(n), at=3500)
    assert taught().decode_s(Rows(n, 1, 3501)) == pytest.approx(MACHINE.seconds(plan), rel=0.2)


@pytest.mark.parametrize("at", [0, 700, 3000])
@pytest.mark.parametrize("seconds", [0.1, 0.2, 0.4])
def test_the_rows_that_fit_a_time_take_it(seconds: float, at: int) -> None:
    n = taught().prompt_rows(seconds, at)
    assert n is not None
    assert MACHINE.seconds(prompt(int(n), at)) == pytest.approx(seconds, rel=0.15)


def test_few_rows_behind_a_long_context_are_taken_to_be_slow_until_they_were_measured() -> None:
    costs = taught()
    costs.learn(prompt(40), 0.04)
    n = costs.prompt_rows(0.2, 3000)
    guess = costs.prompt_rows(0.2, 3000, few=True)
    assert n is not None
    assert guess is not None
    assert guess < 0.5 * n
    for _ in range(20):
        costs.learn(prompt(40, 2000), 0.04)
    measured = costs.prompt_rows(0.2, 3000, few=True)
    assert measured is not None
    assert measured > 100


def test_no_row_fits_a_time_that_the_pass_alone_takes() -> None:
    assert taught().prompt_rows(0.001, 0) == 0.0


def test_a_step_of_both_kinds_teaches_what_the_prompt_took() -> None:
    costs = taught()
    before = costs.prompt_s(Rows(128, 1, 256))
    joined = BatchPlan(chunks=tuple(sorted([*decoding(0, 1, 3).chunks, *prompt(128, 0, 2).chunks])))
    for _ in range(12):
        costs.learn(joined, MACHINE.seconds(joined))
    assert costs.prompt_s(Rows(128, 1, 256)) == pytest.approx(before, rel=0.15)


def test_a_short_chunk_says_nothing_about_a_row() -> None:
    costs = taught()
    before = costs.prompt_s(Rows(128, 1, 256))
    for _ in range(20):
        costs.learn(prompt(5), 3.0)
    assert costs.prompt_s(Rows(128, 1, 256)) == before


def test_a_clock_that_stood_still_teaches_nothing() -> None:
    costs = StepCosts()
    costs.learn(prompt(64), 0.0)
    costs.learn(decoding(0), 0.0)
    costs.learn_move(1, 0.0)
    assert costs.decode_s(Rows(1, 1, 1)) is costs.prompt_s(Rows(1, 1, 1)) is costs.move_s(1) is None


def test_bytes_moved_cost_what_they_took() -> None:
    costs = StepCosts()
    costs.learn_move(0, 0.5)
    assert costs.move_s(1) is None
    costs.learn_move(20_000_000, 0.01)
    assert costs.move_s(40_000_000) == pytest.approx(0.02)


def test_the_longest_step_is_a_whole_batch_behind_the_longest_context() -> None:
    costs = taught()
    assert costs.longest_step_s(512) == pytest.approx(MACHINE.seconds(prompt(512, 3328)), rel=0.15)
