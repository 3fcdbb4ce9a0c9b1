"""A backend without a model: it keeps the cells that llama.cpp would, and answers each prompt with a known continuation.

The "model" is a function of the tokens alone: the next token is a hash of everything before it. So a sequence whose cells
were mixed up with another's, cut wrongly or computed twice gives another answer, and a test that compares texts sees it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from runner.engine.batch import BatchPlan, Outcome
from runner.engine.kv import Drop, KvOp, Park, Swap, Trim, Unpark
from runner.engine.layout import Weights
from runner.engine.lifecycle import State
from runner.engine.sampling import SamplingParams
from runner.engine.scheduler import Scheduler, StepResult
from runner.engine.sequence import Sequence as Generation
from runner.engine.slots import SlotPool

N_VOCAB = 1000
EOG = 7


class Letters:
    """A vocabulary of one letter a token; token 7 ends a generation."""

    def piece(self, token: int) -> bytes:
        """One letter."""
        return b"" if token == EOG else bytes([ord("a") + token % 26])

    def is_eog(self, token: int) -> bool:
        """Token 7 only."""
        return token == EOG


def next_token(tokens: Sequence[int], *, can_end: bool = False) -> int:
    """What the "model" says after `tokens`."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    token = value % N_VOCAB
    return token if can_end or token != EOG else token + 1


def answer(prompt: Sequence[int], n: int) -> list[int]:
    """The first `n` tokens that follow `prompt`."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeBackend:
    """Models cells by position. Raises AssertionError on what would abort or corrupt the real one."""

    def __init__(self, n_slots: int, *, n_batch: int = 64, n_ctx: int = 512) -> None:
        self.cells: list[list[int]] = [[] for _ in range(n_slots)]
        self.samplers: list[list[int] | None] = [None] * n_slots
        self.kept: dict[str, tuple[list[int] | None, list[int] | None]] = {}
        self.plans: list[BatchPlan] = []
        self.ops: list[KvOp] = []
        self.refuse: Callable[[KvOp], bool] = lambda op: False
        self.outcome: Callable[[BatchPlan], Outcome] = lambda plan: Outcome.DONE
        self._n_batch, self._n_ctx = n_batch, n_ctx

    def apply(self, ops: Iterable[KvOp]) -> list[KvOp]:
        """Carry out or refuse."""
        ops = list(ops)
        self.ops += ops
        return [op for op in ops if not self._apply(op, is_refused=not isinstance(op, Drop) and self.refuse(op))]

    def _apply(self, op: KvOp, *, is_refused: bool) -> bool:
        match op:
            case Trim(slot_id, keep):
                assert keep <= len(self.cells[slot_id])
                del self.cells[slot_id][0 if is_refused else keep :]
            case Swap(a, b):
                self.cells[a], self.cells[b] = ([], []) if is_refused else (self.cells[b], self.cells[a])
                self.samplers[a], self.samplers[b] = self.samplers[b], self.samplers[a]
            case Park(slot_id, ticket, keeps_cells):
                assert ticket not in self.kept
                self.kept[ticket] = (list(self.cells[slot_id]) if keeps_cells and not is_refused else None, self.samplers[slot_id])
                self.samplers[slot_id] = None
            case Unpark(ticket, slot_id, has_cells):
                cells, self.samplers[slot_id] = self.kept.pop(ticket)
                assert not has_cells or cells is not None, "cells that were not kept cannot come back"
                if has_cells or is_refused:
                    self.cells[slot_id] = [] if is_refused or cells is None else cells
            case Drop(ticket):
                del self.kept[ticket]
        return not is_refused

    def decode(self, plan: BatchPlan) -> Outcome:
        """Write the cells, unless the test says otherwise."""
        self.plans.append(plan)
        assert 0 < plan.n_rows <= self._n_batch
        ids = [chunk.slot_id for chunk in plan.chunks]
        assert ids == sorted(set(ids)), "rows in ascending slot id, one chunk a slot"
        outcome = self.outcome(plan)
        if outcome is Outcome.BROKEN:
            # Some of the cells exist: those of the first chunk but its last token's.
            chunk = plan.chunks[0]
            self.cells[chunk.slot_id].extend(chunk.tokens[:-1])
        if outcome is Outcome.DONE:
            for chunk in plan.chunks:
                cells = self.cells[chunk.slot_id]
                assert chunk.pos == len(cells), "no position is written twice, none is left out"
                cells.extend(chunk.tokens)
                assert len(cells) <= self._n_ctx
        return outcome

    def sample(self, plan: BatchPlan) -> list[int]:
        """The model's next token for each chunk with logits."""
        tokens = []
        for chunk in plan.chunks:
            if chunk.has_logits:
                sampler = self.samplers[chunk.slot_id]
                assert sampler is not None, "a sampler chain is there before the first logits"
                token = next_token(self.cells[chunk.slot_id])
                sampler.append(token)
                tokens.append(token)
        return tokens

    def open_sampler(self, slot_id: int, sampling: SamplingParams, prompt_tail: Sequence[int], *, ignore_eos: bool) -> None:
        """A new chain: here the list of what it chose."""
        self.samplers[slot_id] = list(prompt_tail)

    def n_cells(self, slot_id: int) -> int:
        """Cells that are there."""
        return len(self.cells[slot_id])


class Rig:
    """A scheduler over a fake backend with a clock that ticks 10 ms a step, or what the test says that a step costs."""

    def cost(self, plan: BatchPlan) -> float:
        """Seconds."""
        return 0.01

    def __init__(self, n_slots: int = 4, *, n_batch: int = 64, n_ctx: int = 512, cell_bytes: int = 1, **options: Any) -> None:
        self.backend = FakeBackend(n_slots, n_batch=n_batch, n_ctx=n_ctx)
        self.pool = SlotPool(n_slots)
        weights = Weights(model_bytes=1_000, cell_bytes=cell_bytes)
        self.scheduler = Scheduler(self.pool, Letters(), weights, n_batch=n_batch, itl_target_s=0.25, **options)
        self.cell_bytes = cell_bytes
        self.now = 0.0
        self.tokens: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}
        self.ended: list[Generation] = []
        self.failed: list[tuple[Generation, str]] = []
        self._n = 0

    def moved_s(self, ops: Sequence[KvOp]) -> float:
        """Of these the seconds that the operations on cells took."""
        return 0.0

    def add(self, prompt: Sequence[int], max_tokens: int = 8, **options: object) -> Generation:
        """Submit a prompt; request ids are r0, r1, ..."""
        sequence = Generation(f"r{self._n}", list(prompt), SamplingParams(temperature=0.0), max_tokens, **options)  # type: ignore[arg-type]
        self._n += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepResult:
        """One step as the decode loop makes it."""
        plan = self.scheduler.plan(self.now)
        refused = self.backend.apply(plan.kv_ops)
        if refused:
            plan = self.scheduler.without(plan, refused)
        for sequence in self.scheduler.take_placed():
            if sequence.slot_id is not None and sequence.n_parks == 0:
                self.backend.open_sampler(sequence.slot_id, sequence.sampling, (), ignore_eos=False)
        outcome = self.backend.decode(plan) if plan.chunks else Outcome.DONE
        sampled = self.backend.sample(plan) if outcome is Outcome.DONE else []
        cells = {chunk.slot_id: self.backend.n_cells(chunk.slot_id) for chunk in plan.chunks}
        owners = [self.pool[chunk.slot_id].sequence for chunk in plan.chunks if chunk.has_logits]
        self.now += self.cost(plan)
        result = self.scheduler.commit(plan, outcome, sampled, self.now, cells, moved_s=self.moved_s(plan.kv_ops))
        if outcome is Outcome.DONE:
            for owner, token in zip(owners, sampled, strict=True):
                assert owner is not None
                self.tokens.setdefault(owner.request_id, []).append(token)
        for sequence, text in result.texts:
            self.texts[sequence.request_id] = self.texts.get(sequence.request_id, "") + text
        self.ended += result.ended
        self.failed += result.failed
        self.check()
        return result

    def run(self, limit: int = 2_000) -> None:
        """Step until nothing is left."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"work is left after {limit} steps")

    def check(self) -> None:
        """What holds between any two steps: token lists equal cells, except where a repair is already ordered."""
        repairs = self.scheduler._repairs
        for slot in self.pool.slots:
            expected = self.backend.cells[slot.slot_id]
            if slot.slot_id in repairs:
                expected = expected[: repairs[slot.slot_id].keep]
            assert slot.tokens == expected
            assert slot.sequence is None or slot.sequence.slot_id == slot.slot_id
        held = [slot.sequence for slot in self.pool.slots if slot.sequence is not None]
        assert set(map(id, held)) == set(map(id, self.scheduler.running))
        assert self.pool.has_free == (len(held) < len(self.pool.slots))
        parked = [sequence for sequence in self.scheduler.waiting if sequence.state is State.PARKED]
        dropped = {drop.ticket for drop in self.scheduler._drops}
        assert set(self.backend.kept) - dropped == {sequence.request_id for sequence in parked}
        assert self.scheduler.n_parked == len(parked)
        assert self.scheduler.parked_bytes == sum(sequence.n_kept for sequence in parked) * self.cell_bytes


__all__ = ["EOG", "FakeBackend", "Letters", "Rig", "Swap", "answer", "next_token"]
