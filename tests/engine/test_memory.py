"""Cells that are shared, saved and brought back: what a sequence that comes does not compute again, and where that comes from."""

import pytest

from runner.engine.kv import Checkpoint, Copy, Forget, Fork, KvOp, Load, Rewind, Save
from runner.engine.lifecycle import State
from runner.engine.memory import LEAST_BETWEEN_MARKS
from runner.engine.memory_kind import MemoryKind
from runner.engine.order import Tier
from runner.engine.sequence import Sequence
from tests.engine.cells import Rig, answer
from tests.engine.test_scheduler import prompt

LARGE_SLOTS = MemoryKind(1, slot_cells=100_000)
SMALL_SLOTS = MemoryKind(1, slot_cells=64)
WINDOW = MemoryKind(1, slot_cells=512, window_cell_bytes=2, n_swa=24)
RECURRENT = MemoryKind(0, slot_cells=512, fixed_bytes=7, can_be_cut=False)
SYSTEM = prompt(200, 77)


def moved(rig: Rig) -> list[KvOp]:
    """What was copied."""
    return [op for op in rig.backend.ops if isinstance(op, Fork | Copy | Save | Load)]


def n_prompt_rows(rig: Rig) -> int:
    """Prompt tokens that were computed."""
    return sum(plan.n_prompt_rows for plan in rig.backend.plans)


def assert_all_answered(rig: Rig) -> None:
    assert rig.failed == []
    assert rig.ended
    for sequence in rig.ended:
        assert rig.tokens[sequence.request_id] == answer(sequence.prompt, sequence.max_tokens)


def ask(rig: Rig, tokens: list[int], n: int = 3, **options: object) -> Sequence:
    """One request, to its end."""
    sequence = rig.add(tokens, max_tokens=n, **options)
    rig.run()
    return sequence


# -- many at once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LARGE_SLOTS, SMALL_SLOTS, WINDOW, RECURRENT], ids=["copied", "forked", "window", "recurrent"])
def test_what_many_begin_with_is_computed_once(kind: MemoryKind) -> None:
    rig = Rig(8, kind=kind)
    asked = [rig.add([*SYSTEM, *prompt(20, seed)], max_tokens=6) for seed in range(8)]
    rig.run()
    assert n_prompt_rows(rig) == len(SYSTEM) + 8 * 20
    assert [sequence.n_cached for sequence in asked] == [0, *[len(SYSTEM)] * 7]
    assert_all_answered(rig)


def test_equal_prompts_compute_their_last_token_each() -> None:
    rig = Rig(4)
    asked = [rig.add(SYSTEM, max_tokens=6) for _ in range(4)]
    rig.run()
    assert n_prompt_rows(rig) == len(SYSTEM) + 3
    assert [sequence.n_cached for sequence in asked] == [0, 199, 199, 199]
    assert_all_answered(rig)


def test_more_than_there_are_slots_compute_it_once_too() -> None:
    rig = Rig(2)
    for seed in range(10):
        rig.add([*SYSTEM, *prompt(20, seed)], max_tokens=6)
    rig.run()
    assert n_prompt_rows(rig) == len(SYSTEM) + 10 * 20
    assert_all_answered(rig)


def test_a_busy_slot_is_a_source_too() -> None:
    rig = Rig(2)
    first = rig.add([*SYSTEM, *prompt(20, 1)], max_tokens=60)
    while first.n_generated < 10:
        rig.step()
    second = rig.add([*SYSTEM, *prompt(20, 2)], max_tokens=6)
    rig.step()
    assert second.n_cached == len(SYSTEM)
    assert first.state is State.DECODE
    rig.run()
    assert_all_answered(rig)


@pytest.mark.parametrize("kind", [SMALL_SLOTS, LARGE_SLOTS])
def test_what_copies_fewer_bytes_is_chosen(kind: MemoryKind) -> None:
    rig = Rig(2, kind=kind)
    first = rig.add([*SYSTEM, *prompt(20, 1)], max_tokens=60)
    while first.n_generated < 10:
        rig.step()
    rig.add([*SYSTEM, *prompt(20, 2)], max_tokens=6)
    rig.step()
    assert [type(op) for op in moved(rig)] == [Fork if kind is SMALL_SLOTS else Copy]


def test_a_prefix_that_costs_more_to_copy_than_to_compute_is_computed() -> None:
    rig = Rig(2, kind=MemoryKind(1, slot_cells=1_000_000_000))
    first = rig.add([*SYSTEM, *prompt(200, 1)], max_tokens=60)
    while first.n_generated < 1:
        rig.step()
    # To copy a cell takes as long as to compute ten tokens.
    rig.scheduler.costs.learn_move(1, 0.1)
    second = rig.add([*SYSTEM, *prompt(20, 2)], max_tokens=6)
    rig.step()
    assert second.n_cached == 0
    assert moved(rig) == []


def test_a_follower_computes_nothing_before_its_leader_has() -> None:
    rig = Rig(2, n_batch=32)
    rig.add(prompt(200, 1), max_tokens=6)
    follower = rig.add(prompt(200, 1), max_tokens=6)
    for _ in range(4):
        rig.step()
        assert follower.state is State.PREFILL
        assert [chunk.slot_id for chunk in rig.backend.plans[-1].chunks] == [0]
    rig.run()
    assert_all_answered(rig)


def test_a_leader_that_is_cancelled_leaves_its_cells_to_its_followers() -> None:
    rig = Rig(3, n_batch=32)
    rig.add(prompt(200, 1), max_tokens=6)
    followers = [rig.add(prompt(200, 1), max_tokens=6) for _ in range(2)]
    for _ in range(3):
        rig.step()
    n_left = len(rig.pool[0].tokens)
    assert 0 < n_left < 200
    rig.scheduler.cancel("r0", rig.now)
    rig.run()
    assert [sequence.n_cached for sequence in followers] == [n_left, 199]
    assert n_prompt_rows(rig) == 201
    assert_all_answered(rig)


def test_a_leader_that_is_parked_leaves_its_cells_to_its_followers() -> None:
    rig = Rig(2, n_batch=32)
    rig.add(prompt(200, 1), max_tokens=6, tier=Tier.LOW)
    rig.add(prompt(200, 1), max_tokens=6, tier=Tier.LOW)
    for _ in range(3):
        rig.step()
    rig.scheduler.park("r0")
    rig.run()
    assert n_prompt_rows(rig) <= 202
    assert_all_answered(rig)


def test_a_leader_goes_in_the_order_of_its_best_follower() -> None:
    rig = Rig(3, n_batch=32)
    low = rig.add(prompt(400, 1), max_tokens=6, tier=Tier.BATCH)
    rig.step()
    other = rig.add(prompt(400, 2), max_tokens=6, tier=Tier.NORMAL)
    high = rig.add([*prompt(400, 1), 9, 9], max_tokens=6, tier=Tier.HIGH)
    rig.step()
    while low.state is State.PREFILL:
        assert other.n_generated == 0
        assert len(rig.pool[1].tokens) == 0
        rig.step()
    assert high.slot_id is not None
    rig.run()
    assert_all_answered(rig)


def test_a_leader_keeps_its_slot_while_a_better_tier_follows() -> None:
    rig = Rig(2, n_batch=32)
    rig.add(prompt(400, 1), max_tokens=6, tier=Tier.LOW)
    rig.step()
    rig.add([*prompt(400, 1), 9, 9], max_tokens=6, tier=Tier.HIGH)
    rig.step()
    waiting = rig.add(prompt(20, 3), max_tokens=6, tier=Tier.HIGH)
    rig.step()
    assert waiting.state is State.QUEUED
    rig.run()
    assert_all_answered(rig)


def test_a_parked_one_that_follows_computes_the_last_of_its_tokens_itself() -> None:
    """It has a token to go on with, so all that it needs may be another's prompt."""
    rig = Rig(2, n_batch=32, kv_host_bytes=0)
    parked = rig.add(prompt(100, 1), max_tokens=30, tier=Tier.LOW)
    while parked.n_generated < 5:
        rig.step()
    leader = rig.add([*prompt(100, 1), *answer(prompt(100, 1), 5), *prompt(100, 2)], max_tokens=5, cache_prompt=False)
    rig.add(prompt(3, 4), max_tokens=1, tier=Tier.HIGH)
    while not rig.memory.following.is_waiting(parked):
        rig.step()
    assert (parked.n_parks, leader.state) == (1, State.PREFILL)
    rig.run()
    assert_all_answered(rig)


def test_two_that_would_follow_each_other_do_not_wait_for_ever() -> None:
    """The first one's cells are lost while the second follows it; what the first begins with is the second's by then."""
    rig = Rig(3, n_batch=32)
    rig.add(prompt(300, 1), max_tokens=6)
    for _ in range(2):
        rig.step()
    rig.add([*prompt(300, 1)[:200], *prompt(50, 2)], max_tokens=6)
    rig.step()
    rig.add([*prompt(300, 1)[:250], *prompt(50, 3)], max_tokens=6)
    rig.step()
    rig.memory.cut(rig.pool[0], 0)
    rig.run()
    assert_all_answered(rig)


# -- who comes back ----------------------------------------------------------------------------------------------------


def test_a_conversation_comes_back_after_others_had_all_slots() -> None:
    rig = Rig(2)
    first = ask(rig, prompt(100, 1))
    for seed in range(2, 12):
        ask(rig, prompt(100, seed))
    history = [*first.prompt, *answer(first.prompt, 3), *prompt(10, 50)]
    again = ask(rig, history)
    assert again.n_cached == 102  # the last token of an answer has no cell
    assert isinstance(moved(rig)[-1], Load)
    assert_all_answered(rig)


def test_two_conversations_take_turns_in_one_slot() -> None:
    rig = Rig(1)
    histories = {seed: prompt(100, seed) for seed in (1, 2)}
    for turn in range(5):
        for history in histories.values():
            asked = ask(rig, history)
            assert asked.n_cached == (len(history) - 11 if turn else 0)
            history += [*answer(history, 3), *prompt(10, 100 + turn)]
    assert len(rig.memory.host) <= 2  # older states of a conversation are given up
    assert_all_answered(rig)


def test_what_is_continued_whole_is_in_one_place() -> None:
    rig = Rig(1)
    first = ask(rig, prompt(100, 1))
    ask(rig, prompt(100, 2))
    assert len(rig.memory.host) == 1
    ask(rig, [*first.prompt, *answer(first.prompt, 3), 9, 9])
    assert [cells.tokens[0] for cells in rig.memory.host] == [prompt(1, 2)[0]]


def test_what_others_begin_with_stays_in_host_memory_when_it_is_loaded() -> None:
    rig = Rig(1)
    ask(rig, [*SYSTEM, *prompt(50, 1)])
    ask(rig, prompt(100, 2))
    loaded = ask(rig, [*SYSTEM, *prompt(50, 3)])
    assert loaded.n_cached == len(SYSTEM)
    assert len(rig.memory.host) == 2
    assert_all_answered(rig)


def test_host_memory_gives_up_the_oldest_first_and_those_with_a_name_later() -> None:
    rig = Rig(1, kv_host_bytes=320)
    ask(rig, prompt(100, 1), session="anna")
    for seed in range(2, 7):
        ask(rig, prompt(100, seed))
    kept = {cells.tokens[0] for cells in rig.memory.host}
    assert kept == {prompt(1, seed)[0] for seed in (1, 4, 5)}
    assert rig.memory.host.used_bytes <= 320


def test_a_parked_sequence_is_never_given_up_for_a_conversation() -> None:
    rig = Rig(1, kv_host_bytes=150)
    slow = rig.add(prompt(100, 1), max_tokens=30, tier=Tier.LOW)
    while slow.n_generated < 5:
        rig.step()
    for seed in range(2, 6):
        rig.add(prompt(100, seed), max_tokens=3, tier=Tier.HIGH)
    rig.run()
    assert [op.state_id for op in rig.backend.ops if isinstance(op, Load)] == [1]
    assert_all_answered(rig)


def test_a_few_tokens_are_not_worth_a_copy() -> None:
    rig = Rig(1)
    ask(rig, prompt(20, 1))
    ask(rig, prompt(100, 2))
    assert moved(rig) == []


def test_what_others_have_too_is_not_saved() -> None:
    rig = Rig(2)
    for _ in range(2):
        rig.add(SYSTEM, max_tokens=3)
    rig.run()
    ask(rig, prompt(100, 2))
    assert not any(isinstance(op, Save) for op in rig.backend.ops)


def test_without_host_memory_nothing_is_saved() -> None:
    rig = Rig(1, kv_host_bytes=0)
    ask(rig, prompt(100, 1))
    ask(rig, prompt(100, 2))
    assert moved(rig) == []


def test_the_state_that_is_about_to_be_loaded_is_not_given_up_to_save_another() -> None:
    rig = Rig(1, kv_host_bytes=110)
    first = ask(rig, prompt(100, 1))
    ask(rig, prompt(100, 2))
    again = ask(rig, [*first.prompt, *answer(first.prompt, 3), 9, 9])
    assert again.n_cached == 102
    assert_all_answered(rig)


# -- trust domains -----------------------------------------------------------------------------------------------------


def test_nothing_is_shared_between_trust_domains() -> None:
    """Where the cells come from is checked after every step: `Rig.check`."""
    rig = Rig(2)
    for domain in ("x", "y", "", "x"):
        rig.add(SYSTEM, max_tokens=6, domain=domain)
    rig.run()
    assert [sequence.n_cached for sequence in sorted(rig.ended, key=lambda s: s.request_id)] == [0, 0, 0, 199]
    assert_all_answered(rig)


def test_what_a_request_computes_does_not_depend_on_what_another_domain_asked() -> None:
    """The same requests of one domain beside ones of another with the same prompts, and with prompts of their own: the same steps."""
    plans = []
    for other_seed in (1, 2):
        rig = Rig(2)
        for turn in range(6):
            rig.add(prompt(100, other_seed), max_tokens=5, domain="theirs")
            rig.add([*prompt(100, 1), *prompt(10, 60 + turn)], max_tokens=5, domain="ours")
            rig.run()
        steps = [(chunk.slot_id, chunk.pos, len(chunk.tokens)) for plan in rig.backend.plans for chunk in plan.chunks]
        plans.append((steps, [type(op) for op in rig.backend.ops], [sequence.n_cached for sequence in rig.ended]))
    assert plans[0] == plans[1]


def test_a_stateless_request_leaves_nothing() -> None:
    rig = Rig(2)
    for name in "ab":
        rig.add(SYSTEM, max_tokens=6, domain=name, is_stateless=True)
    rig.run()
    rig.scheduler.plan(rig.now)
    assert [slot.tokens for slot in rig.pool.slots] == [[], []]
    assert len(rig.memory.host) == 0


def test_the_choices_of_a_stateless_request_share_its_prompt() -> None:
    rig = Rig(2)
    for _ in range(2):
        rig.add(SYSTEM, max_tokens=6, domain="one request", is_stateless=True)
    rig.run()
    assert n_prompt_rows(rig) == len(SYSTEM) + 1
    assert_all_answered(rig)


# -- memories that cannot be cut ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [WINDOW, RECURRENT], ids=["window", "recurrent"])
class TestWithoutACut:
    """A window that has moved on, and a state without a past."""

    def test_the_same_prompt_again_computes_its_last_token(self, kind: MemoryKind) -> None:
        rig = Rig(1, kind=kind)
        ask(rig, prompt(200, 1), 100)
        again = ask(rig, prompt(200, 1), 5)
        assert again.n_cached == 199
        assert_all_answered(rig)

    def test_an_edited_turn_goes_back_to_the_turn_before(self, kind: MemoryKind) -> None:
        rig = Rig(1, kind=kind, n_ctx=1024)
        history, ends = prompt(150, 1), []
        for turn in range(4):
            ask(rig, history, 40)
            history = [*history, *answer(history, 40)]
            ends.append(len(history))
            history += prompt(70, 100 + turn)
        edited = ask(rig, [*history[: ends[1] + 5], *prompt(70, 999)], 5)
        assert 0 <= ends[1] - 1 - edited.n_cached <= LEAST_BETWEEN_MARKS
        assert_all_answered(rig)

    def test_the_checkpoints_come_back_from_host_memory(self, kind: MemoryKind) -> None:
        rig = Rig(1, kind=kind)
        first = ask(rig, prompt(200, 1), 100)
        ask(rig, prompt(100, 2))
        again = ask(rig, first.prompt, 5)
        assert again.n_cached == 199
        assert [type(op) for op in rig.backend.ops if isinstance(op, Load | Rewind)] == [Load, Rewind]
        assert_all_answered(rig)

    def test_without_room_for_checkpoints_all_is_computed_again(self, kind: MemoryKind) -> None:
        rig = Rig(1, kind=kind, kv_host_bytes=0)
        ask(rig, prompt(200, 1), 100)
        again = ask(rig, prompt(200, 1), 5)
        assert again.n_cached == 0
        assert not any(isinstance(op, Checkpoint) for op in rig.backend.ops)
        assert_all_answered(rig)

    def test_a_checkpoint_is_forgotten_with_the_last_that_needs_it(self, kind: MemoryKind) -> None:
        rig = Rig(1, kind=kind)
        for seed in range(6):
            ask(rig, prompt(200, seed), 3, is_stateless=True, domain=str(seed))
        rig.run()
        made = [op.state_id for op in rig.backend.ops if isinstance(op, Checkpoint)]
        assert len(made) == 6
        assert set(made) == {op.state_id for op in rig.backend.ops if isinstance(op, Forget)}


@pytest.mark.parametrize("refused", [Fork, Copy, Save, Load, Checkpoint, Rewind])
@pytest.mark.parametrize("kind", [LARGE_SLOTS, SMALL_SLOTS, WINDOW, RECURRENT], ids=["copied", "forked", "window", "recurrent"])
def test_whatever_is_refused_is_computed_again(kind: MemoryKind, refused: type[KvOp]) -> None:
    rig = Rig(2, kind=kind)
    rig.backend.refuse = lambda op: isinstance(op, refused)
    for seed in range(8):
        rig.add([*SYSTEM, *prompt(40, seed % 3)], max_tokens=20)
        rig.step()
    rig.run()
    assert_all_answered(rig)


def test_what_a_stop_string_hid_is_cut_while_it_can_be() -> None:
    """A saved window can be cut by one token; what the client brings back ends before the stop string."""
    rig = Rig(1, kind=WINDOW, slack=20)
    first = prompt(200, 1)
    letters = "".join(chr(ord("a") + token % 26) for token in answer(first, 60))
    stop = letters[40:48]
    n_shown = letters.index(stop)
    ask(rig, first, 60, stop=(stop,))
    ask(rig, prompt(100, 2))
    again = ask(rig, [*first, *answer(first, n_shown), 9, 9, 9])
    assert again.n_cached == 200 + n_shown
    assert rig.failed == []


def test_what_is_computed_again_in_no_time_is_not_saved() -> None:
    rig = Rig(1)
    rig.memory.placer.least_saved_s = 0.2
    ask(rig, prompt(100, 1))
    ask(rig, prompt(100, 2))
    assert moved(rig) == []
