"""All slots take their cells from one pool: what is shared, who waits, who is parked, and that nobody ends for want of another's cells."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.engine.batch import BatchPlan, Chunk, Split, count_passes, passes
from runner.engine.cell_pool import CellPool
from runner.engine.kv import Copy, Fork, Load, Park, Save, Swap, Trim
from runner.engine.lifecycle import Reason, State
from runner.engine.memory_kind import MemoryKind
from runner.engine.order import Tier
from runner.engine.preempt import MAX_PARKS
from runner.engine.reservations import HEADROOM
from runner.engine.sequence import Times
from tests.engine.cells import Rig, answer
from tests.engine.test_memory import SYSTEM, ask, assert_all_answered, n_prompt_rows
from tests.engine.test_scheduler import prompt


def pool_of(n_cells: int) -> MemoryKind:
    """All layers attend to all."""
    return MemoryKind(1, slot_cells=1024, pool_cells=n_cells)


def parks(rig: Rig) -> list[str]:
    """Who was parked."""
    return [op.ticket for op in rig.backend.ops if isinstance(op, Park)]


# -- case 5 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_bytes", [0, 10_000])
def test_four_that_do_not_fit_one_pool_together_all_end_as_they_asked(host_bytes: int) -> None:
    rig = Rig(4, kind=pool_of(1024), n_ctx=1024, kv_host_bytes=host_bytes)
    asked = [rig.add(prompt(300, seed), max_tokens=600) for seed in range(4)]
    rig.run(limit=10_000)
    assert_all_answered(rig)
    assert [sequence.reason for sequence in asked] == [Reason.LENGTH] * 4
    assert [sequence.n_generated for sequence in asked] == [600] * 4
    assert max(sequence.n_parks for sequence in asked) <= MAX_PARKS
    assert "r0" not in parks(rig)


def test_with_room_for_every_slot_to_be_full_nobody_is_parked_and_no_idle_slot_loses_anything() -> None:
    rig = Rig(4, kind=pool_of(4 * 128), n_ctx=128)
    for seed in range(12):
        rig.add(prompt(60, seed), max_tokens=60)
    rig.run(limit=10_000)
    assert_all_answered(rig)
    assert parks(rig) == []
    assert not any(isinstance(op, Trim) and not rig.pool[op.slot_id].tokens for op in rig.backend.ops)


# -- sharing -----------------------------------------------------------------------------------------------------------


def test_what_many_begin_with_is_in_the_pool_once_and_no_byte_is_moved() -> None:
    rig = Rig(8, kind=pool_of(len(SYSTEM) + 8 * (20 + 6)))
    asked = [rig.add([*SYSTEM, *prompt(20, seed)], max_tokens=6) for seed in range(8)]
    rig.run()
    assert n_prompt_rows(rig) == len(SYSTEM) + 8 * 20
    assert [sequence.n_cached for sequence in asked] == [0, *[len(SYSTEM)] * 7]
    assert {type(op) for op in rig.backend.ops} == {Fork}
    assert rig.memory.n_used_cells == len(SYSTEM) + 8 * (20 + 5)
    assert_all_answered(rig)


def test_shared_cells_outlive_the_slot_that_computed_them() -> None:
    rig = Rig(2, kind=pool_of(400))
    first = rig.add([*SYSTEM, *prompt(20, 1)], max_tokens=3)
    second = rig.add([*SYSTEM, *prompt(20, 2)], max_tokens=40)
    while not first.is_finished:
        rig.step()
    ask(rig, prompt(150, 3))
    assert second.n_generated == 40
    assert_all_answered(rig)


def test_cells_of_a_window_are_copied_and_never_shared() -> None:
    rig = Rig(2, kind=MemoryKind(1, slot_cells=512, window_cell_bytes=2, n_swa=24, pool_cells=1024))
    for seed in range(2):
        rig.add([*SYSTEM, *prompt(20, seed)], max_tokens=6)
    rig.run()
    assert [type(op) for op in rig.backend.ops if isinstance(op, Fork | Copy)] == [Copy]
    assert_all_answered(rig)


def test_nothing_is_shared_between_trust_domains() -> None:
    rig = Rig(2, kind=pool_of(500))
    asked = [rig.add(SYSTEM, max_tokens=6, domain=domain) for domain in "xy"]
    rig.run()
    assert [sequence.n_cached for sequence in asked] == [0, 0]
    assert rig.memory.n_used_cells == 2 * (len(SYSTEM) + 5)


# -- who waits, who is parked ------------------------------------------------------------------------------------------


def test_idle_slots_lose_their_cells_before_anybody_waits_or_is_parked() -> None:
    rig = Rig(4, kind=pool_of(400))
    for seed in range(3):
        ask(rig, prompt(100, seed))
    long = rig.add(prompt(100, 9), max_tokens=250)
    rig.run()
    assert parks(rig) == []
    assert long.n_generated == 250
    assert sum(isinstance(op, Save) for op in rig.backend.ops) >= 2
    again = ask(rig, prompt(100, 0))
    assert again.n_cached == 99
    assert_all_answered(rig)


def test_a_prompt_waits_until_it_fits_with_headroom_and_is_not_overtaken() -> None:
    rig = Rig(4, kind=pool_of(300))
    first = rig.add(prompt(200, 1), max_tokens=20)
    large = rig.add(prompt(100, 2), max_tokens=50)
    small = rig.add(prompt(10, 3), max_tokens=5)
    while not first.is_finished:
        assert (large.state, small.state) == (State.QUEUED, State.QUEUED)
        rig.step()
    rig.run()
    assert large.times.admitted_at <= small.times.admitted_at
    assert parks(rig) == []
    assert_all_answered(rig)


def test_the_last_to_come_of_the_lowest_tier_is_parked_and_the_first_never() -> None:
    rig = Rig(3, kind=pool_of(300))
    low = rig.add(prompt(50, 1), max_tokens=200, tier=Tier.LOW)
    rig.step()
    older, newer = (rig.add(prompt(50, seed), max_tokens=200) for seed in (2, 3))
    while not parks(rig):
        rig.step()
    assert parks(rig) == [low.request_id]
    rig.run()
    assert older.request_id not in parks(rig)
    assert newer.request_id in parks(rig)
    assert_all_answered(rig)


def test_a_better_tier_gets_the_cells_of_lower_ones_though_slots_are_free() -> None:
    rig = Rig(4, kind=pool_of(300))
    low = [rig.add(prompt(100, seed), max_tokens=60, tier=Tier.LOW) for seed in range(2)]
    for _ in range(8):
        rig.step()
    high = rig.add(prompt(120, 9), max_tokens=30, tier=Tier.HIGH)
    rig.step()
    assert high.state is State.PREFILL
    assert [sequence.state for sequence in low].count(State.PARKED) == 1
    rig.run()
    assert_all_answered(rig)


def test_nobody_is_parked_for_one_that_would_not_fit_all_the_same() -> None:
    rig = Rig(4, kind=pool_of(300))
    rig.add(prompt(150, 1), max_tokens=60)
    low = rig.add(prompt(60, 2), max_tokens=40, tier=Tier.LOW)
    for _ in range(6):
        rig.step()
    better = rig.add(prompt(200, 9), max_tokens=30)
    for _ in range(10):
        rig.step()
        assert low.state is State.DECODE
        assert better.state is State.QUEUED
    rig.run()
    assert_all_answered(rig)


def test_one_that_outgrows_the_whole_pool_ends_with_length() -> None:
    rig = Rig(2, kind=pool_of(100))
    alone = rig.add(prompt(50, 1), max_tokens=200)
    rig.run()
    assert alone.reason is Reason.LENGTH
    assert alone.n_generated == 51  # the last token of an answer needs no cell
    assert rig.ended == [alone]
    assert rig.tokens["r0"] == answer(alone.prompt, 51)


def test_text_that_a_stop_string_held_back_is_not_lost_where_the_pool_ends() -> None:
    text = "".join(chr(ord("a") + token % 26) for token in answer(prompt(50, 1), 60))
    rig = Rig(1, kind=pool_of(100))
    rig.add(prompt(50, 1), max_tokens=200, stop=(text[49:60],))
    rig.run()
    assert rig.texts["r0"] == text[:51]


def test_between_a_return_and_the_next_park_the_headroom_is_filled() -> None:
    rig = Rig(4, kind=pool_of(600), n_ctx=600)
    for seed in range(12):
        rig.add(prompt(40, seed), max_tokens=400)
    rig.run(limit=20_000)
    assert_all_answered(rig)
    assert len(parks(rig)) <= 12 * 400 / HEADROOM
    assert all(sequence.n_parks <= MAX_PARKS for sequence in rig.ended)


def test_what_was_parked_comes_back_from_host_memory() -> None:
    rig = Rig(2, kind=pool_of(300), n_ctx=300)
    for seed in range(2):
        rig.add(prompt(100, seed), max_tokens=150)
    rig.run()
    assert parks(rig) == ["r1"]
    assert [type(op) for op in rig.backend.ops if isinstance(op, Save | Load)] == [Save, Save, Load]
    assert n_prompt_rows(rig) == 200
    assert_all_answered(rig)


class SlowRig(Rig):
    """A step takes long."""

    def cost(self, plan: BatchPlan) -> float:
        """Seconds."""
        return 0.2


class Flood:
    """Requests of a better tier without end: so many at a time."""

    def __init__(self, rig: Rig, n_at_once: int) -> None:
        self.rig, self.n_at_once, self.n = rig, n_at_once, 0

    def refill(self) -> None:
        """Up to the number."""
        while len(self.rig.scheduler.waiting) + len(self.rig.scheduler.running) < self.n_at_once:
            self.n += 1
            self.rig.add(prompt(30, 1_000 + self.n), max_tokens=80, times=Times(arrived_at=self.rig.now))


@pytest.mark.parametrize("tier", [Tier.NORMAL, Tier.LOW])
def test_a_large_one_is_served_under_a_flood_of_small_ones(tier: Tier) -> None:
    rig = SlowRig(4, kind=pool_of(400), n_ctx=400)
    flood = Flood(rig, 6)
    flood.refill()
    rig.step()
    large = rig.add(prompt(150, 1), max_tokens=220, tier=tier)
    for _ in range(6_000):
        if large.is_finished:
            break
        rig.step()
        flood.refill()
    assert large.n_generated == 220
    assert rig.failed == []


# -- property ----------------------------------------------------------------------------------------------------------

REQUESTS = st.lists(
    st.tuples(st.integers(1, 120), st.integers(0, 3), st.integers(1, 80), st.integers(0, 3), st.integers(0, 4)), max_size=14
)
POOLS = {
    "full attention": MemoryKind(1, slot_cells=256, pool_cells=200),
    "window": MemoryKind(1, slot_cells=256, window_cell_bytes=2, n_swa=24, pool_cells=230),
    "hybrid": MemoryKind(1, slot_cells=16, fixed_bytes=7, can_be_cut=False, pool_cells=230),
}


@settings(max_examples=300, deadline=None)
@given(
    requests=REQUESTS,
    n_slots=st.integers(1, 8),
    kind=st.sampled_from(sorted(POOLS)),
    host_bytes=st.sampled_from([0, 100, 5_000]),
    policy=st.sampled_from(["fair", "priority", "fcfs"]),
)
def test_every_request_ends_as_it_asked_whatever_comes_and_however_small_the_pool(
    requests: list[tuple[int, int, int, int, int]], n_slots: int, kind: str, host_bytes: int, policy: str
) -> None:
    """`Rig.check` sees after each step that no batch had no room, that the books are right, and that domains are apart."""
    rig = Rig(n_slots, n_batch=32, kind=POOLS[kind], kv_host_bytes=host_bytes, policy=policy)
    for n_prompt, seed, n_answer, tier, n_steps in requests:
        rig.add(prompt(120, seed)[:n_prompt], max_tokens=n_answer, tier=Tier(tier), domain="xy"[seed % 2])
        for _ in range(n_steps):
            rig.step()
    rig.run(limit=20_000)
    assert rig.failed == []
    assert len(rig.ended) == len(requests)
    for sequence in rig.ended:
        assert rig.tokens[sequence.request_id] == answer(sequence.prompt, sequence.max_tokens)


# -- the books ---------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["extend", "cut", "share"]), st.integers(0, 3), st.integers(0, 3), st.integers(0, 12)), max_size=40)
)
def test_used_cells_are_those_that_somebody_holds(ops: list[tuple[str, int, int, int]]) -> None:
    """Against a model in which each cell is an object."""
    pool, model = CellPool(4, 1_000), [list[object]() for _ in range(4)]
    for op, a, b, n in ops:
        if op == "extend":
            pool.extend(a, n)
            model[a] += [object() for _ in range(n)]
        elif op == "cut":
            pool.cut(a, n)
            del model[a][n:]
        elif a != b:
            keep = min(n, len(model[a]))
            pool.share(a, b, keep)
            model[b] = model[a][:keep]
        assert pool.n_used == len({id(cell) for cells in model for cell in cells})
        kept = {0: 5, 2: 100}
        assert pool.n_held(kept) == len({id(cell) for slot_id, keep in kept.items() for cell in model[slot_id][:keep]})


# -- passes ------------------------------------------------------------------------------------------------------------


def test_rows_of_any_slots_share_a_pass_and_none_is_moved_to_close_a_gap() -> None:
    rig = Rig(8, kind=pool_of(4096))
    for seed in range(8):
        rig.add(prompt(10, seed), max_tokens=4 if seed % 2 else 60)
    rig.run()
    assert {plan.n_passes for plan in rig.backend.plans} == {1}
    assert not any(isinstance(op, Swap) for op in rig.backend.ops)
    assert_all_answered(rig)


def test_prompts_in_slots_that_are_not_adjacent_share_a_step() -> None:
    rig = Rig(4, kind=pool_of(4096))
    for seed in range(4):
        rig.add(prompt(10, seed), max_tokens=1 if seed in (0, 2) else 40)
    rig.step()
    for seed in (5, 6):
        rig.add(prompt(10, seed), max_tokens=3)
    rig.run()
    assert max(len(plan.chunks) for plan in rig.backend.plans if plan.n_prompt_rows and plan.chunks[0].slot_id == 0) >= 2
    assert_all_answered(rig)


@pytest.mark.parametrize(("split", "expected"), [(Split.ADJACENT, 4), (Split.EQUAL, 2), (Split.SIMPLE, 1)])
def test_passes_by_the_kind_of_memory(split: Split, expected: int) -> None:
    rows = [(0, 1), (2, 1), (4, 7), (6, 1)]
    assert count_passes(rows, split) == expected
    chunks = [Chunk(slot_id, 5, range(n), has_logits=False) for slot_id, n in rows]
    found = list(passes(chunks, split, n_attended=500))
    assert len(found) == expected
    assert sum(n_rows for n_rows, _, _ in found) == 10
    assert {longest for _, _, longest in found} == {500}


@given(st.sampled_from(Split), st.integers(0, 10_000))
def test_passes_are_counted_as_they_are_made(split: Split, seed: int) -> None:
    random_ = random.Random(seed)
    rows = [(slot_id, random_.choice([1, 1, 2, 5, 30])) for slot_id in sorted(random_.sample(range(12), random_.randint(1, 8)))]
    chunks = [Chunk(slot_id, random_.randint(0, 50), range(n), has_logits=False) for slot_id, n in rows]
    assert len(list(passes(chunks, split))) == count_passes(rows, split)
