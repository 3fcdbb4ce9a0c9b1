"""The scheduler over a backend that models the cells: what each step computes, and that nothing is ever mixed up."""

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.config import PolicyName
from runner.engine.batch import BatchPlan, Outcome
from runner.engine.kv import Swap, Trim
from runner.engine.lifecycle import Reason, State
from runner.engine.memory_kind import MemoryKind
from runner.engine.order import Owner, Tier
from tests.engine.cells import Rig, answer


def prompt(n: int, seed: int = 0) -> list[int]:
    """`n` tokens that share no prefix with another seed's."""
    return random.Random(seed).choices(range(8, 500), k=n)


def test_a_prompt_is_computed_in_chunks_and_answered() -> None:
    rig = Rig(n_batch=32)
    rig.add(prompt(70), max_tokens=5)
    rig.run()
    assert [plan.n_rows for plan in rig.backend.plans] == [32, 32, 6, 1, 1, 1, 1]
    assert rig.tokens["r0"] == answer(prompt(70), 5)
    assert rig.ended[0].reason is Reason.LENGTH


def test_decoding_sequences_share_one_step() -> None:
    rig = Rig(n_slots=4)
    for seed in range(4):
        rig.add(prompt(10, seed), max_tokens=20)
    rig.run()
    assert max(plan.n_rows for plan in rig.backend.plans if not plan.n_prompt_rows) == 4
    assert dict(rig.tokens.items()) == {f"r{seed}": answer(prompt(10, seed), 20) for seed in range(4)}


def test_a_prompt_chunk_never_shares_a_step_with_decoding_rows() -> None:
    rig = Rig(n_slots=2, n_batch=32)
    rig.add(prompt(4), max_tokens=30)
    rig.step()
    rig.add(prompt(200, 1), max_tokens=2)
    rig.run()
    for plan in rig.backend.plans:
        assert len(plan.chunks) == 1 or all(len(chunk.tokens) == 1 for chunk in plan.chunks)


class PassRig(Rig):
    """A machine on which a pass over the weights is what costs most."""

    def cost(self, plan: BatchPlan) -> float:
        """10 ms a pass and 0.1 ms a row."""
        return 0.01 * plan.n_passes + 0.0001 * plan.n_rows


def test_a_prompt_between_two_streams_shares_their_step_because_that_saves_a_pass() -> None:
    rig = PassRig(n_slots=3, n_batch=64)
    rig.add(prompt(64), max_tokens=60)
    rig.add(prompt(64, 1), max_tokens=4)
    rig.add(prompt(64, 2), max_tokens=60)
    while not rig.ended:
        rig.step()
    rig.add(prompt(200, 3), max_tokens=5)
    rig.run()
    joined = [plan for plan in rig.backend.plans if len(plan.chunks) == 3 and plan.n_rows > 3]
    assert joined
    assert all(plan.n_passes == 2 for plan in joined)
    assert dict(rig.tokens.items()) == {
        "r0": answer(prompt(64), 60),
        "r1": answer(prompt(64, 1), 4),
        "r2": answer(prompt(64, 2), 60),
        "r3": answer(prompt(200, 3), 5),
    }


def test_it_does_not_where_the_streams_would_pay_more_for_its_context() -> None:
    rig = PassRig(n_slots=3, n_batch=64, n_ctx=4096)
    for seed in range(3):
        rig.add(prompt(8, seed), max_tokens=4 if seed == 1 else 600)
    while not rig.ended:
        rig.step()
    rig.add(prompt(3000, 3), max_tokens=5)
    rig.run()
    far = [plan for plan in rig.backend.plans if any(chunk.is_prompt and chunk.pos > 1000 for chunk in plan.chunks)]
    assert far
    assert all(len(plan.chunks) == 1 for plan in far)


@pytest.mark.parametrize("outcome", [Outcome.NO_ROOM, Outcome.INVALID])
def test_a_chunk_that_is_refused_is_tried_again_in_smaller_ones(outcome: Outcome) -> None:
    rig = Rig(n_slots=2, n_batch=64)
    rig.backend.outcome = lambda plan: outcome if plan.n_rows > 32 else Outcome.DONE
    rig.add(prompt(64), max_tokens=5)
    rig.run()
    assert rig.failed == []
    assert rig.tokens["r0"] == answer(prompt(64), 5)


def test_short_prompts_in_adjacent_slots_share_a_step() -> None:
    rig = Rig(n_slots=4, n_batch=64)
    for seed, n in enumerate((10, 12, 10, 50)):
        rig.add(prompt(n, seed), max_tokens=2)
    rig.run()
    first = rig.backend.plans[0]
    assert [len(chunk.tokens) for chunk in first.chunks] == [10, 12, 10, 32]
    assert [rig.tokens[f"r{seed}"] for seed in range(3)] == [answer(prompt(n, seed), 2) for seed, n in enumerate((10, 12, 10))]


def test_a_prompt_away_from_the_oldest_has_a_step_of_its_own() -> None:
    rig = Rig(n_slots=4, n_batch=64)
    for seed in range(3):
        rig.add(prompt(10, seed), max_tokens=1 if seed == 1 else 30)
    rig.step()
    rig.scheduler.cancel("r0", rig.now)
    for seed in (5, 6):
        rig.add(prompt(10, seed), max_tokens=2)
    rig.run()
    assert rig.tokens["r4"] == answer(prompt(10, 6), 2)
    assert all(plan.n_passes <= 2 for plan in rig.backend.plans if plan.n_prompt_rows)


def test_a_stream_waits_for_one_chunk_at_most() -> None:
    rig = Rig(n_slots=2, n_batch=32)
    rig.add(prompt(4), max_tokens=30)
    rig.step()
    rig.add(prompt(200, 1), max_tokens=2)
    rig.run()
    prompt_steps = [len(plan.chunks[0].tokens) > 1 for plan in rig.backend.plans]
    assert not any(a and b for a, b in itertools.pairwise(prompt_steps))


def test_a_returning_conversation_computes_only_what_is_new() -> None:
    rig = Rig()
    first = rig.add(prompt(40), max_tokens=5)
    rig.run()
    second = rig.add(first.prompt + rig.tokens["r0"] + prompt(6, 9), max_tokens=3)
    rig.run()
    # The last sampled token was never decoded: its cell does not exist.
    assert second.n_cached == 40 + 4
    assert rig.tokens["r1"] == answer(second.prompt, 3)


def test_the_last_prompt_token_is_always_decoded_again() -> None:
    rig = Rig(n_slots=1)
    rig.add([*prompt(20), 9, 9, 9], max_tokens=4)
    rig.run()
    for name in ("r1", "r2"):
        again = rig.add(prompt(20), max_tokens=4)
        rig.run()
        assert again.n_cached == 19
        assert rig.tokens[name] == answer(prompt(20), 4)


def test_cache_prompt_false_computes_everything() -> None:
    rig = Rig(n_slots=1)
    rig.add(prompt(20), max_tokens=2)
    rig.run()
    again = rig.add(prompt(20), max_tokens=2, cache_prompt=False)
    rig.run()
    assert again.n_cached == 0
    assert rig.tokens["r1"] == answer(prompt(20), 2)


def test_a_newcomer_takes_the_slot_that_loses_least() -> None:
    rig = Rig(n_slots=3, kv_host_bytes=0)
    for seed, n in ((0, 100), (1, 20), (2, 60)):
        rig.add(prompt(n, seed), max_tokens=1)
    rig.run()
    before = [list(slot.tokens) for slot in rig.pool.slots]
    rig.add(prompt(30, 5), max_tokens=1)
    rig.run()
    lost = [slot_id for slot_id, tokens in enumerate(before) if rig.pool[slot_id].tokens != tokens]
    assert [len(before[slot_id]) for slot_id in lost] == [20]


def test_waiting_sequences_are_placed_in_order_of_arrival() -> None:
    rig = Rig(n_slots=1)
    for seed in range(4):
        rig.add(prompt(5, seed), max_tokens=3)
    rig.run()
    assert [sequence.request_id for sequence in rig.ended] == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("n_steps", [0, 1, 2, 3, 5, 8])
def test_a_cancel_at_any_stage_frees_the_slot_and_leaves_the_others_alone(n_steps: int) -> None:
    rig = Rig(n_slots=2, n_batch=32)
    for seed in range(3):
        rig.add(prompt(70, seed), max_tokens=6)
    for _ in range(n_steps):
        rig.step()
    cancelled = rig.scheduler.cancel("r1", rig.now)
    assert cancelled is not None
    assert (cancelled.state, cancelled.reason, cancelled.slot_id) == (State.FINISHED, Reason.CANCELLED, None)
    rig.run()
    assert [rig.tokens[name] for name in ("r0", "r2")] == [answer(prompt(70, seed), 6) for seed in (0, 2)]


def test_a_cancelled_waiter_never_runs_and_the_next_one_is_not_delayed() -> None:
    rig = Rig(n_slots=1)
    for seed in range(12):
        rig.add(prompt(5, seed), max_tokens=4)
    rig.step()
    for name in [f"r{i}" for i in range(1, 11)]:
        rig.scheduler.cancel(name, rig.now)
    rig.run()
    assert [sequence.request_id for sequence in rig.ended] == ["r0", "r11"]
    assert set(rig.tokens) == {"r0", "r11"}


def test_cancelling_a_waiter_does_not_touch_the_running_one() -> None:
    rig = Rig(n_slots=1)
    rig.add(prompt(5), max_tokens=10)
    rig.add(prompt(5, 1), max_tokens=10)
    rig.step()
    rig.scheduler.cancel("r1", rig.now)
    rig.run()
    assert rig.tokens == {"r0": answer(prompt(5), 10)}


def test_cancelling_an_unknown_request_is_nothing() -> None:
    assert Rig().scheduler.cancel("nobody", 0.0) is None


@pytest.mark.parametrize("k", range(4))
def test_a_prompt_aborted_after_chunk_k_and_sent_again_answers_as_on_a_fresh_slot(k: int) -> None:
    rig = Rig(n_slots=1, n_batch=32)
    rig.add(prompt(100), max_tokens=5)
    for _ in range(k):
        rig.step()
    rig.scheduler.cancel("r0", rig.now)
    again = rig.add(prompt(100), max_tokens=5)
    rig.run()
    assert again.n_cached == min(99, 32 * k)
    assert rig.tokens["r1"] == answer(prompt(100), 5)


def test_a_refused_trim_means_computing_from_the_start() -> None:
    rig = Rig(n_slots=1)
    rig.add(prompt(40), max_tokens=3)
    rig.run()
    rig.backend.refuse = lambda op: isinstance(op, Trim) and op.keep > 0
    again = rig.add(prompt(20), max_tokens=3)
    rig.run()
    assert again.n_cached == 0
    assert rig.tokens["r1"] == answer(prompt(20), 3)


def test_gaps_between_decoding_slots_are_closed_and_the_answers_stay_the_same() -> None:
    rig = Rig(n_slots=8)
    for seed in range(8):
        rig.add(prompt(6, seed), max_tokens=4 if seed in (1, 3, 4, 6) else 40)
    rig.run()
    swaps = [op for plan in rig.backend.plans for op in plan.kv_ops if isinstance(op, Swap)]
    assert swaps
    assert [plan.n_passes for plan in rig.backend.plans if len(plan.chunks) == 4][-1] == 1
    assert [rig.tokens[f"r{seed}"] for seed in (0, 2, 5, 7)] == [answer(prompt(6, seed), 40) for seed in (0, 2, 5, 7)]


def test_a_sequence_that_loses_its_cells_in_a_refused_swap_computes_them_again() -> None:
    rig = Rig(n_slots=4)
    rig.backend.refuse = lambda op: isinstance(op, Swap)
    for seed in range(4):
        rig.add(prompt(6, seed), max_tokens=4 if seed in (1, 2) else 30)
    rig.run()
    assert rig.failed == []
    assert [rig.tokens[name] for name in ("r0", "r3")] == [answer(prompt(6, seed), 30) for seed in (0, 3)]


def test_an_invalid_batch_ends_only_the_sequence_whose_row_is_at_fault() -> None:
    rig = Rig(n_slots=4)
    for seed in range(4):
        rig.add(prompt(6, seed), max_tokens=12)
    for _ in range(10):
        rig.step()
    poisoned = rig.pool.slots[2].sequence
    assert poisoned is not None
    rig.backend.outcome = lambda plan: (
        Outcome.INVALID if any(rig.pool[chunk.slot_id].sequence is poisoned for chunk in plan.chunks) else Outcome.DONE
    )
    rig.run()
    assert [sequence for sequence, _ in rig.failed] == [poisoned]
    others = [f"r{seed}" for seed in range(4) if f"r{seed}" != poisoned.request_id]
    assert [rig.tokens[name] for name in others] == [answer(prompt(6, int(name[1])), 12) for name in others]


def test_a_broken_batch_is_tried_again_once() -> None:
    rig = Rig(n_slots=2)
    broken = iter([False] * 5 + [True])
    rig.backend.outcome = lambda plan: Outcome.BROKEN if next(broken, False) else Outcome.DONE
    for seed in range(2):
        rig.add(prompt(6, seed), max_tokens=12)
    rig.run()
    assert rig.failed == []
    assert [rig.tokens[f"r{seed}"] for seed in range(2)] == [answer(prompt(6, seed), 12) for seed in range(2)]


def test_a_batch_that_stays_broken_ends_its_sequences_and_not_the_scheduler() -> None:
    rig = Rig(n_slots=2)
    rig.backend.outcome = lambda plan: Outcome.BROKEN
    rig.add(prompt(6), max_tokens=12)
    rig.run()
    assert [why for _, why in rig.failed] == ["llama.cpp could not compute the batch"]
    rig.backend.outcome = lambda plan: Outcome.DONE
    rig.add(prompt(6), max_tokens=3)
    rig.run()
    assert rig.tokens["r1"] == answer(prompt(6), 3)


def test_a_stop_string_ends_the_generation_and_frees_the_slot() -> None:
    rig = Rig()
    text = "".join(chr(ord("a") + token % 26) for token in answer(prompt(6), 12))
    rig.add(prompt(6), max_tokens=12, stop=(text[5:8],))
    rig.run()
    assert rig.texts["r0"] == text[: text.find(text[5:8])]
    assert rig.ended[0].reason is Reason.STOP


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 90), st.integers(0, 4), st.integers(1, 20)),
        st.tuples(st.just("add uncached"), st.integers(1, 90), st.integers(0, 4), st.integers(1, 20)),
        st.tuples(st.just("add tier"), st.integers(1, 90), st.integers(0, 4), st.integers(1, 20)),
        st.tuples(st.just("add domain"), st.integers(1, 90), st.integers(0, 2), st.integers(1, 20)),
        st.tuples(st.just("park"), st.integers(0, 30), st.just(0), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0), st.just(0)),
        st.tuples(st.just("break"), st.integers(0, 2), st.just(0), st.just(0)),
        st.tuples(st.just("refuse"), st.integers(0, 1), st.just(0), st.just(0)),
    ),
    max_size=60,
)


KINDS = {
    "all attend to all": MemoryKind(1, slot_cells=512),
    "large slots": MemoryKind(1, slot_cells=100_000),
    "small slots": MemoryKind(1, slot_cells=16),
    "a window": MemoryKind(1, slot_cells=512, window_cell_bytes=2, n_swa=24),
    "a recurrent state": MemoryKind(0, slot_cells=512, fixed_bytes=7, can_be_cut=False),
    "a hybrid": MemoryKind(1, slot_cells=16, fixed_bytes=7, can_be_cut=False),
    "one pool": MemoryKind(1, slot_cells=512, pool_cells=130),
    "one large pool": MemoryKind(1, slot_cells=512, pool_cells=400),
    "one pool for windows": MemoryKind(1, slot_cells=512, window_cell_bytes=2, n_swa=24, pool_cells=150),
    "one pool for hybrids": MemoryKind(1, slot_cells=16, fixed_bytes=7, can_be_cut=False, pool_cells=150),
}


@settings(max_examples=600, deadline=None)
@given(
    events=EVENTS,
    n_slots=st.integers(1, 9),
    policy=st.sampled_from(["fair", "priority", "fcfs"]),
    host_cells=st.sampled_from([0, 60, 400, 10_000]),
    kind=st.sampled_from(sorted(KINDS)),
    slack=st.sampled_from([0, 1, 20]),
)
def test_whatever_arrives_leaves_or_breaks_every_request_ends_and_no_answer_is_another_ones(
    events: list[tuple[str, int, int, int]], n_slots: int, policy: PolicyName, host_cells: int, kind: str, slack: int
) -> None:
    options: dict[str, Any] = {"policy": policy, "share_grace_s": 0.05, "kv_host_bytes": host_cells}
    rig = Rig(n_slots=n_slots, n_batch=32, kind=KINDS[kind], slack=slack, max_running_per_client=n_slots // 2, **options)
    added = []
    cancelled: set[str] = set()
    for event, a, b, c in events:
        match event:
            case "add domain":
                domain = "xy"[a % 2]
                added.append(rig.add(prompt(90, b)[:a], max_tokens=c, domain=domain, session="s" * (c % 2), is_stateless=c == 5))
            case "add" | "add uncached":
                # Few seeds, so that prompts share prefixes with what lies in the slots.
                added.append(rig.add(prompt(90, b)[:a], max_tokens=c, cache_prompt=event == "add"))
            case "add tier":
                added.append(rig.add(prompt(90, b)[:a], max_tokens=c, tier=Tier(b % 4), owner=Owner(f"c{a % 3}", f"p{c % 2}")))
            case "park":
                rig.scheduler.park(f"r{a}")
            case "cancel":
                ended = rig.scheduler.cancel(f"r{a}", rig.now)
                cancelled |= {ended.request_id} if ended else set()
            case "step":
                for _ in range(a):
                    rig.step()
            case "break":
                once = iter([(Outcome.BROKEN, Outcome.INVALID, Outcome.NO_ROOM)[a]])
                rig.backend.outcome = lambda plan, once=once: next(once, Outcome.DONE)  # type: ignore[misc]
            case "refuse":
                first = iter([True])
                rig.backend.refuse = lambda op, first=first: next(first, False)  # type: ignore[misc]
    rig.run(limit=20_000)
    failed = {sequence.request_id for sequence, _ in rig.failed}
    for sequence in added:
        assert sequence.is_finished
        if sequence.request_id not in cancelled | failed:
            assert rig.tokens[sequence.request_id] == answer(sequence.prompt, sequence.max_tokens)
