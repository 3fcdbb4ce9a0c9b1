"""Slots that change hands: who gives one up, and that whoever did goes on as if nothing had been."""

import itertools
from collections.abc import Sequence

import pytest

from runner.engine.kv import Drop, KvOp, Load, Park, Save, Unpark
from runner.engine.lifecycle import State
from runner.engine.order import SLACK_S, Owner, Tier
from runner.engine.preempt import MAX_PARKS
from runner.engine.sequence import Times
from tests.engine.cells import Rig, answer
from tests.engine.test_scheduler import prompt

N_ANSWER = 30


def ops(rig: Rig) -> list[KvOp]:
    """All that was asked of the cells."""
    return rig.backend.ops


def saturated(n_slots: int = 2, tier: Tier = Tier.LOW, **options: object) -> Rig:
    """All slots decode for somebody of this tier."""
    rig = Rig(n_slots, **options)  # type: ignore[arg-type]
    for seed in range(n_slots):
        rig.add(prompt(20 + 10 * seed, seed), max_tokens=N_ANSWER, tier=tier)
    for _ in range(6):
        rig.step()
    return rig


def assert_all_answered(rig: Rig) -> None:
    assert rig.failed == []
    for sequence in rig.ended:
        assert rig.tokens[sequence.request_id] == answer(sequence.prompt, sequence.max_tokens)


def test_a_better_tier_gets_a_slot_in_the_next_step() -> None:
    rig = saturated()
    urgent = rig.add(prompt(10, 9), max_tokens=3, tier=Tier.HIGH)
    rig.step()
    assert urgent.state is not State.QUEUED
    assert [s.state for s in (rig.scheduler._by_id["r0"], rig.scheduler._by_id["r1"])] == [State.PARKED, State.DECODE]
    rig.run()
    assert [s.request_id for s in rig.ended] == ["r2", "r1", "r0"]
    assert_all_answered(rig)


def test_the_lowest_tier_with_the_fewest_cells_gives_way() -> None:
    rig = Rig(3)
    for seed, (n, tier) in enumerate([(10, Tier.LOW), (50, Tier.BATCH), (40, Tier.BATCH)]):
        rig.add(prompt(n, seed), max_tokens=N_ANSWER, tier=tier)
    for _ in range(6):
        rig.step()
    rig.add(prompt(10, 9), max_tokens=2, tier=Tier.NORMAL)
    rig.step()
    assert [op.ticket for op in ops(rig) if isinstance(op, Park)] == ["r2"]
    rig.run()
    assert_all_answered(rig)


@pytest.mark.parametrize("tier", [Tier.LOW, Tier.BATCH])
def test_nobody_gives_way_to_an_equal_or_lower_tier(tier: Tier) -> None:
    rig = saturated(share_grace_s=1e9)
    rig.add(prompt(10, 9), max_tokens=2, tier=tier)
    rig.run()
    assert not any(isinstance(op, Park) for op in ops(rig))
    assert_all_answered(rig)


@pytest.mark.parametrize("n_steps", range(1, 45))
@pytest.mark.parametrize("host_bytes", [0, 1 << 20], ids=["computed again", "kept"])
def test_parked_at_any_step_the_answer_is_the_same(n_steps: int, host_bytes: int) -> None:
    rig = Rig(2, n_batch=32, kv_host_bytes=host_bytes)
    rig.add(prompt(100), max_tokens=N_ANSWER)
    rig.add(prompt(30, 1), max_tokens=N_ANSWER, tier=Tier.LOW)
    for _ in range(n_steps):
        rig.step()
    rig.scheduler.park("r0")
    rig.add(prompt(50, 2), max_tokens=5, tier=Tier.HIGH)  # takes the slot, and with it the cells
    rig.add(prompt(60, 3), max_tokens=5, tier=Tier.HIGH)
    rig.run()
    assert_all_answered(rig)
    assert rig.scheduler.parked_bytes == 0


def test_a_sequence_keeps_its_sampler_its_text_buffers_and_its_place() -> None:
    rig = saturated(1)
    victim = rig.scheduler._by_id["r0"]
    before = (victim.place, victim._stops, victim._utf8, rig.backend.samplers[0])
    rig.add(prompt(10, 9), max_tokens=3, tier=Tier.HIGH)
    rig.step()
    assert victim.n_parks == 1
    while victim.slot_id is None:
        rig.step()
    assert victim.slot_id is not None
    after = (victim.place, victim._stops, victim._utf8, rig.backend.samplers[victim.slot_id])
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert victim.times.parked_s > 0
    rig.run()
    assert_all_answered(rig)


def test_cells_that_are_still_in_a_slot_are_not_moved() -> None:
    rig = saturated(2)
    rig.scheduler.park("r0")
    rig.step()
    rig.run()
    assert sum(isinstance(op, Unpark) for op in ops(rig)) == 1
    assert not any(isinstance(op, Load) for op in ops(rig))
    assert_all_answered(rig)


def test_host_memory_is_bounded_and_what_is_beyond_it_is_computed_again() -> None:
    rig = Rig(4, kv_host_bytes=100, share_grace_s=1e9)
    for seed in range(4):
        rig.add(prompt(60, seed), max_tokens=N_ANSWER, tier=Tier.LOW)
    for _ in range(8):
        rig.step()
    for seed in range(4):
        rig.add(prompt(60, 10 + seed), max_tokens=8, tier=Tier.HIGH)
        rig.step()
        assert rig.scheduler.parked_bytes <= 100
    rig.run()
    assert sum(isinstance(op, Park) for op in ops(rig)) == 4
    assert_all_answered(rig)


@pytest.mark.parametrize("kind", [Save, Load])
def test_cells_that_cannot_be_saved_or_brought_back_are_computed_again(kind: type[KvOp]) -> None:
    rig = saturated(1)
    rig.backend.refuse = lambda op: isinstance(op, kind)
    rig.add(prompt(10, 9), max_tokens=3, tier=Tier.HIGH)
    rig.run()
    assert any(isinstance(op, kind) for op in ops(rig))
    assert rig.scheduler.parked_bytes == 0
    assert_all_answered(rig)


def test_one_that_is_cancelled_while_parked_leaves_nothing() -> None:
    rig = saturated(1)
    rig.add(prompt(10, 9), max_tokens=3, tier=Tier.HIGH)
    rig.step()
    cancelled = rig.scheduler.cancel("r0", rig.now)
    assert cancelled is not None
    assert rig.scheduler.has_work
    rig.run()
    assert rig.backend.chains == {}
    assert rig.scheduler.parked_bytes == 0
    assert Drop("r0") in ops(rig)


def test_a_request_is_parked_a_bounded_number_of_times() -> None:
    rig = saturated(1)
    for seed in range(3 * MAX_PARKS):
        rig.add(prompt(10, 20 + seed), max_tokens=2, tier=Tier.HIGH)
        for _ in range(8):
            rig.step()
    rig.run()
    assert sum(isinstance(op, Park) and op.ticket == "r0" for op in ops(rig)) == MAX_PARKS
    assert_all_answered(rig)


def test_at_most_one_sequences_cells_are_moved_in_a_step() -> None:
    rig = saturated(4, share_grace_s=1e9)
    for seed in range(4):
        rig.add(prompt(10, 9 + seed), max_tokens=3, tier=Tier.HIGH)
    rig.run()
    for plan in rig.backend.plans:
        assert sum(isinstance(op, Save | Load) for op in plan.kv_ops) <= 2  # what a newcomer's slot had, and the sequence that came for it
    assert_all_answered(rig)


def test_a_client_over_its_share_gives_a_slot_back_after_the_grace() -> None:
    rig = Rig(4, share_grace_s=0.1)
    for seed in range(4):
        rig.add(prompt(10, seed), max_tokens=200, owner=Owner("greedy"))
    for _ in range(6):
        rig.step()
    late = [rig.add(prompt(10, 10 + seed), max_tokens=200, owner=Owner(name)) for seed, name in enumerate("ab")]
    for sequence in late:
        sequence.times.prepared_at = rig.now
    steps = next(n for n in itertools.count() if rig.step() is not None and all(s.slot_id is not None for s in late))
    assert 8 <= steps <= 14
    held = [s.owner.client for s in rig.scheduler.running]
    assert sorted(held) == ["a", "b", "greedy", "greedy"]
    for _ in range(40):  # and nobody takes them back
        rig.step()
        assert sorted(s.owner.client for s in rig.scheduler.running) == ["a", "b", "greedy", "greedy"]
    rig.run()
    assert_all_answered(rig)


@pytest.mark.parametrize(("n_more", "n_steps"), [(1, (1, 8)), (0, (20, 30))], ids=["with a backlog", "without"])
def test_a_client_with_more_requests_waiting_gives_a_slot_back_at_once(n_more: int, n_steps: tuple[int, int]) -> None:
    """It loses nothing: only the order of its own requests changes. One that has no more waits out the grace."""
    rig = Rig(4, share_grace_s=0.2)
    for seed in range(4 + n_more):
        rig.add(prompt(10, seed), max_tokens=200, owner=Owner("greedy"))
    for _ in range(6):
        rig.step()
    late = rig.add(prompt(10, 10), max_tokens=200, owner=Owner("a"), times=Times(prepared_at=rig.now))
    steps = next(n for n in itertools.count() if rig.step() is not None and late.slot_id is not None)
    assert n_steps[0] <= steps <= n_steps[1]
    rig.run()
    assert_all_answered(rig)


def test_a_parked_request_is_no_backlog() -> None:
    """A second newcomer does not find its client in debt for what the first one took."""
    rig = Rig(3, share_grace_s=0.2)
    for seed in range(3):
        rig.add(prompt(10, seed), max_tokens=200, owner=Owner("two"))
    for _ in range(6):
        rig.step()
    first = rig.add(prompt(10, 10), max_tokens=200, owner=Owner("a"), times=Times(prepared_at=rig.now))
    while first.slot_id is None:
        rig.step()
    parked_at = rig.now
    second = rig.add(prompt(10, 11), max_tokens=200, owner=Owner("b"), times=Times(prepared_at=rig.now))
    while second.slot_id is None:
        rig.step()
    assert rig.now - parked_at >= 0.2
    rig.run()
    assert_all_answered(rig)


class QuickRig(Rig):
    """A machine that copies a cell in a microsecond."""

    def moved_s(self, ops: Sequence[KvOp]) -> float:
        """About: 20 cells a sequence."""
        return 20e-6 * sum(isinstance(op, Save | Load) for op in ops)


def test_several_are_moved_in_a_step_where_that_takes_no_time_to_speak_of() -> None:
    rig = QuickRig(5, share_grace_s=1e9)
    for seed in range(5):
        rig.add(prompt(20, seed), max_tokens=60, tier=Tier.LOW)
    for _ in range(6):
        rig.step()
    urgent = [rig.add(prompt(10, 9), max_tokens=3, tier=Tier.HIGH)]
    rig.step()  # nothing was ever copied: only one, and it teaches what that costs
    urgent += [rig.add(prompt(10, 10 + seed), max_tokens=3, tier=Tier.HIGH) for seed in range(3)]
    rig.step()
    assert all(sequence.slot_id is not None for sequence in urgent)
    rig.run()
    assert_all_answered(rig)


def test_equal_shares_are_left_alone_however_long_others_wait() -> None:
    rig = Rig(2, share_grace_s=0.05)
    for seed, name in enumerate("abcd"):
        rig.add(prompt(10, seed), max_tokens=60, owner=Owner(name))
    rig.run()
    assert not any(isinstance(op, Park) for op in ops(rig))
    assert_all_answered(rig)


def test_a_prompt_of_a_better_tier_is_computed_first() -> None:
    rig = Rig(3, n_batch=32)
    rig.add(prompt(200), max_tokens=5, tier=Tier.LOW)
    rig.step()
    rig.add(prompt(60, 1), max_tokens=5, tier=Tier.HIGH)
    rig.run()
    assert [sequence.request_id for sequence in rig.ended] == ["r1", "r0"]
    assert_all_answered(rig)


def test_a_prompt_that_has_waited_out_its_slack_is_not_overtaken() -> None:
    rig = Rig(3, n_batch=32)
    rig.add(prompt(200), max_tokens=5, tier=Tier.LOW)
    rig.step()
    rig.now = SLACK_S[Tier.LOW] + 1.0
    rig.add(prompt(60, 1), max_tokens=5, tier=Tier.HIGH, times=Times(arrived_at=rig.now))
    rig.run()
    assert [sequence.request_id for sequence in rig.ended] == ["r0", "r1"]
    assert_all_answered(rig)
