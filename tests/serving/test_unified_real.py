"""One pool of cells for all slots, on real memories: who shares it ends as if alone, and what is shared is what would be computed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.engine.kv import Copy, Fork, Load, Park, Save
from runner.engine.lifecycle import Reason
from tests.serving.test_memory_real import Rig, prompt

# SmolLM2 goes on with each of them for as long as a slot holds.
PATTERNS = (" 3 1 4 1 5 9 2", " 10 20 30 40 50", " tick tock bang", " 7 6 5 4 3 2 1")


@pytest.fixture(autouse=True, scope="module")
def quick_idle() -> Iterator[None]:
    """A loop without work waits for a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.serving.loop._IDLE_WAIT_S", 0.0001)
        yield


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Rig]:
    """Four slots of 1,024 tokens that share 1,024 cells."""
    rig = Rig(smollm2_path, n_slots=4, n_ctx=1024, n_batch=512, host_mib=256, pool=1024)
    yield rig
    rig.engine.backend.close()


def patterned(rig: Rig, pattern: str, n_tokens: int) -> list[int]:
    """So many tokens of a pattern that repeats."""
    return rig.engine.preparer._vocabulary.tokenize(pattern * n_tokens, parse_special=False)[:n_tokens]


def test_four_that_do_not_fit_the_pool_together_all_end_as_if_each_were_alone(smollm2: Rig) -> None:
    """Case 5: 1,024 cells, four prompts of 300 tokens, 600 tokens of answer each."""
    prompts = [patterned(smollm2, pattern, 300) for pattern in PATTERNS]
    asked = [smollm2.ask(tokens, 600, reuse=False) for tokens in prompts]
    answers: dict[str, list[int]] = {sequence.request_id: [] for sequence in asked}
    most_used = 0
    while not all(sequence.is_finished for sequence in asked):
        before = [sequence.n_generated for sequence in asked]
        smollm2.loop.step()
        for sequence, n in zip(asked, before, strict=True):
            if sequence.n_generated > n and sequence.pending is not None:
                answers[sequence.request_id].append(sequence.pending)
        most_used = max(most_used, smollm2.engine.scheduler.memory.n_used_cells)
    assert [(sequence.reason, sequence.n_generated) for sequence in asked] == [(Reason.LENGTH, 600)] * 4
    assert 1000 < most_used <= 1024
    assert smollm2.used(Park, Save, Load)
    assert asked[0].n_parks == 0
    assert smollm2.loop.totals.n_violations == 0
    for sequence in asked:
        assert answers[sequence.request_id] == cycle_of(sequence.prompt, 600)


def cycle_of(tokens: list[int], n: int) -> list[int]:
    """What continues the shortest period of `tokens`."""
    period = next(p for p in range(1, len(tokens)) if all(a == b for a, b in zip(tokens[8:], tokens[8 + p :], strict=False)))
    return [tokens[len(tokens) - period + i % period] for i in range(n)]


@pytest.mark.parametrize("memory", ["smollm2_path", "window_path", "hybrid_path", "recurrent_path"])
def test_what_is_shared_continues_as_if_it_were_computed(memory: str, request: pytest.FixtureRequest) -> None:
    """Busy and idle sources, followers, and a source that is gone: the same answers as those of one that shares nothing."""
    path: Path = request.getfixturevalue(memory)
    common = prompt(120, 1)
    prompts = [[*common, *prompt(9, seed)] for seed in range(8, 14)]
    fresh, pool = Rig(path, n_slots=1), Rig(path, n_slots=3, pool=700)
    expected = [fresh.answer(fresh.ask(tokens, 12, reuse=False)) for tokens in prompts]
    asked = [pool.ask(tokens, 12) for tokens in prompts]
    tokens_of: dict[str, list[int]] = {sequence.request_id: [] for sequence in asked}
    while not all(sequence.is_finished for sequence in asked):
        before = {sequence.request_id: sequence.n_generated for sequence in asked}
        pool.loop.step()
        for sequence in asked:
            if sequence.n_generated > before[sequence.request_id] and sequence.pending is not None:
                tokens_of[sequence.request_id].append(sequence.pending)
    found = [tokens_of[sequence.request_id] for sequence in asked]
    assert found == expected
    assert sum(sequence.n_cached for sequence in asked) >= 4 * len(common)
    assert pool.used(Copy if memory == "window_path" else Fork)
    assert not pool.used(Fork if memory == "window_path" else Copy)
    assert pool.loop.totals.n_violations == 0
    snapshot = pool.loop._snapshot()
    assert 0 < snapshot.n_used_cells <= sum(slot.n_cells for slot in snapshot.slots)
    assert snapshot.n_used_cells <= pool.engine.info.kv_pool == 700
    fresh.engine.backend.close()
    pool.engine.backend.close()
