"""Context shift: a full slot loses the older half of what lies behind its beginning, and its sequence goes on."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.engine.batch import Outcome
from runner.engine.kv import Copy, Fork, KvOp, Load, Save, Shift, Trim
from runner.engine.lifecycle import Reason, State
from runner.engine.memory_kind import MemoryKind
from runner.engine.order import Tier
from runner.engine.sequence import Sequence
from tests.engine.cells import Rig, answer, next_token
from tests.engine.test_scheduler import prompt

N_CTX = 32
N_KEEP = 8
KINDS = {
    "all attend to all": MemoryKind(1, slot_cells=N_CTX),
    "large slots": MemoryKind(1, slot_cells=100_000),
    "small slots": MemoryKind(1, slot_cells=1),
    "a window": MemoryKind(1, slot_cells=N_CTX, window_cell_bytes=2, n_swa=6),
}


def shift_rig(n_slots: int = 2, **options: Any) -> Rig:
    """Slots of 32 tokens that are shifted."""
    return Rig(n_slots, n_ctx=N_CTX, shift_at=N_CTX, **options)


def shifted_answer(tokens: list[int], n: int, keep: int = N_KEEP, n_ctx: int = N_CTX) -> list[int]:
    """What follows a prompt where the model sees what is left after each shift."""
    cells, said = list(tokens), [next_token(tokens)]
    while len(said) < n:
        if len(cells) == n_ctx:
            del cells[keep : keep + (n_ctx - keep) // 2]
        cells.append(said[-1])
        said.append(next_token(cells))
    return said


def shifts(rig: Rig) -> list[KvOp]:
    """Those that were made."""
    return [op for op in rig.backend.ops if isinstance(op, Shift)]


def long(rig: Rig, tokens: list[int], n: int, **options: object) -> Sequence:
    """Ask for more than a slot holds."""
    return rig.add(tokens, max_tokens=n, n_keep=N_KEEP, **options)


def assert_answered(rig: Rig) -> None:
    assert rig.failed == []
    for sequence in rig.ended:
        assert (sequence.reason, sequence.n_generated) == (Reason.LENGTH, sequence.max_tokens)
        assert rig.tokens[sequence.request_id] == shifted_answer(sequence.prompt, sequence.max_tokens)


@pytest.mark.parametrize("n_prompt", [1, N_KEEP, 20, N_CTX - 2, N_CTX - 1])
def test_an_answer_goes_on_beyond_the_slots_end_for_as_many_tokens_as_were_asked_for(n_prompt: int) -> None:
    rig = shift_rig()
    asked = long(rig, prompt(n_prompt), 200)
    rig.run()
    assert asked.n_generated == 200
    assert_answered(rig)
    # Half of what is behind the beginning each time, and none before the slot is full.
    assert set(shifts(rig)) == {Shift(0, N_KEEP, 12)}
    assert len(shifts(rig)) == (n_prompt + 199 - N_CTX - 1) // 12 + 1


@pytest.mark.parametrize(("n_tokens", "n_shifts"), [(N_CTX - 20, 0), (N_CTX - 19, 0), (N_CTX - 18, 1)])
def test_an_answer_that_fits_is_not_shifted(n_tokens: int, n_shifts: int) -> None:
    """The last token needs no cell."""
    rig = shift_rig()
    long(rig, prompt(20), n_tokens)
    rig.run()
    assert len(shifts(rig)) == n_shifts
    assert_answered(rig)


def test_without_the_option_nothing_is_shifted() -> None:
    rig = Rig(1, n_ctx=N_CTX)
    rig.add(prompt(20), max_tokens=N_CTX - 20)
    rig.run()
    assert shifts(rig) == []
    assert rig.tokens["r0"] == answer(prompt(20), 12)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_shifted_slot_is_found_by_nobody_and_left_empty(kind: str) -> None:
    """Not even by who brings the very tokens that it has."""
    rig = shift_rig(kind=KINDS[kind])
    first = long(rig, prompt(20), 60)
    while first.n_generated < 20:
        rig.step()
    assert shifts(rig)
    assert rig.pool[0].marks == []
    again = long(rig, [*rig.pool[0].tokens, 9], 2)
    rig.step()
    assert (again.n_cached, again.slot_id) == (0, 1)
    while not first.is_finished:
        rig.step()
    assert again.is_finished
    rig.scheduler.plan(rig.now)
    assert rig.pool[0].tokens == []
    assert not rig.pool[0].is_shifted
    assert not any(isinstance(op, Fork | Copy | Save | Load) for op in rig.backend.ops)
    assert_answered(rig)


def test_what_others_got_from_the_slot_before_it_was_shifted_stays_theirs() -> None:
    rig = shift_rig(n_slots=3)
    first = long(rig, prompt(24), 80)
    while first.n_generated < 2:
        rig.step()
    second = long(rig, prompt(24), 4)
    third = long(rig, [*prompt(24)[:20], 9, 9], 4)
    rig.run()
    assert (second.n_cached, third.n_cached) == (23, 20)
    assert_answered(rig)


def test_a_fork_and_a_shift_of_its_source_come_one_after_the_other() -> None:
    """A newcomer finds the slot's tokens in the very step in which it is full."""
    for n_before in range(14):
        rig = shift_rig(kind=KINDS["small slots"])
        first = long(rig, prompt(20), 60)
        while first.n_generated < n_before:
            rig.step()
        long(rig, [*prompt(20), 9], 3)
        rig.run()
        assert_answered(rig)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("n_steps", range(1, 45, 3))
def test_parked_at_any_step_it_goes_on_from_what_was_left(n_steps: int, kind: str) -> None:
    rig = shift_rig(n_slots=1, kind=KINDS[kind])
    slow = long(rig, prompt(20), 90, tier=Tier.LOW)
    for _ in range(n_steps):
        rig.step()
    long(rig, prompt(10, 1), 5, tier=Tier.HIGH)
    rig.run()
    assert slow.n_parks == 1
    assert_answered(rig)


def test_cells_of_a_shifted_sequence_are_not_kept_while_it_is_parked() -> None:
    rig = shift_rig(n_slots=1)
    slow = long(rig, prompt(20), 90, tier=Tier.LOW)
    while not shifts(rig):
        rig.step()
    rig.scheduler.park("r0")
    long(rig, prompt(30, 1), 5, tier=Tier.HIGH)
    rig.step()
    assert (slow.state, slow.n_kept, rig.scheduler.parked_bytes) == (State.PARKED, 0, 0)
    rig.run()
    assert_answered(rig)


@pytest.mark.parametrize("n_steps", range(10, 40, 2))
def test_cancelled_before_or_after_a_shift_it_leaves_a_slot_that_answers_as_a_fresh_one(n_steps: int) -> None:
    rig = shift_rig(n_slots=1)
    long(rig, prompt(20), 90)
    for _ in range(n_steps):
        rig.step()
    rig.scheduler.cancel("r0", rig.now)
    long(rig, prompt(20), 20)
    rig.run()
    assert_answered(rig)


def test_a_shift_that_is_refused_leaves_tokens_that_are_computed_again() -> None:
    rig = shift_rig()
    rig.backend.refuse = lambda op: isinstance(op, Shift)
    asked = long(rig, prompt(20), 100)
    other = long(rig, prompt(3, 1), 20)
    rig.run()
    assert asked.n_generated == 100
    assert len(other.prompt) + other.n_generated < N_CTX
    assert_answered(rig)


def test_a_shifted_slot_changes_places_with_a_free_one() -> None:
    rig = shift_rig(n_slots=4)
    for seed, n in enumerate((60, 13, 13, 400)):
        long(rig, prompt(20, seed), n)
    rig.run()
    last = next(sequence for sequence in rig.ended if sequence.request_id == "r3")
    assert last.n_generated == 400
    assert any(type(op).__name__ == "Swap" for op in rig.backend.ops)
    assert_answered(rig)


def test_a_batch_that_broke_costs_a_shifted_sequence_no_cell_that_is_there() -> None:
    rig = shift_rig(n_slots=1)
    long(rig, prompt(20), 60)
    while not shifts(rig):
        rig.step()
    once = iter([Outcome.BROKEN])
    rig.backend.outcome = lambda plan: next(once, Outcome.DONE)
    rig.run()
    assert Trim(0, N_CTX - 12 + 1) in rig.backend.ops
    assert_answered(rig)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add tier", "park", "cancel", "step", "step", "break", "refuse"]),
        st.integers(1, N_CTX - 1),
        st.integers(0, 2),
        st.integers(1, 120),
    ),
    max_size=25,
)


@settings(max_examples=400, deadline=None)
@given(
    events=EVENTS,
    n_slots=st.integers(1, 5),
    keep=st.integers(1, N_CTX // 4),
    host_cells=st.sampled_from([0, 60, 10_000]),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_whatever_happens_every_answer_has_its_length_and_is_nobody_elses(
    events: list[tuple[str, int, int, int]], n_slots: int, keep: int, host_cells: int, kind: str
) -> None:
    """Slots never hold more than they can (the fake asserts it), and no shifted cell is ever used again."""
    rig = shift_rig(n_slots, n_batch=32, kind=KINDS[kind], kv_host_bytes=host_cells)
    added, cancelled = [], set()
    for event, a, b, c in events:
        match event:
            case "add" | "add tier":
                tier = Tier.NORMAL if event == "add" else Tier(c % 4)
                added.append(rig.add(prompt(N_CTX, b)[:a], max_tokens=c, n_keep=keep, tier=tier, is_stateless=c % 5 == 0))
            case "park":
                rig.scheduler.park(f"r{a % 8}")
            case "cancel":
                ended = rig.scheduler.cancel(f"r{a % 8}", rig.now)
                cancelled |= {ended.request_id} if ended else set()
            case "step":
                for _ in range(a):
                    rig.step()
            case "break":
                once = iter([(Outcome.BROKEN, Outcome.INVALID, Outcome.NO_ROOM)[b]])
                rig.backend.outcome = lambda plan, once=once: next(once, Outcome.DONE)  # type: ignore[misc]
            case "refuse":
                first = iter([True])
                rig.backend.refuse = lambda op, first=first: next(first, False)  # type: ignore[misc]
    rig.run(limit=20_000)
    failed = {sequence.request_id for sequence, _ in rig.failed}
    for sequence in added:
        assert sequence.is_finished
        if sequence.request_id not in cancelled | failed:
            assert rig.tokens[sequence.request_id] == shifted_answer(sequence.prompt, sequence.max_tokens, keep)


@settings(max_examples=100, deadline=None)
@given(n_ctx=st.integers(16, 40), data=st.data())
def test_every_size_of_a_slot_makes_progress(n_ctx: int, data: st.DataObject) -> None:
    keep, n_prompt = data.draw(st.integers(1, n_ctx // 4)), data.draw(st.integers(1, n_ctx - 1))
    rig = Rig(1, n_ctx=n_ctx, shift_at=n_ctx)
    asked = rig.add(prompt(n_prompt), max_tokens=300, n_keep=keep)
    rig.run()
    assert rig.tokens[asked.request_id] == shifted_answer(asked.prompt, 300, keep, n_ctx)
