"""A backend without a model: it keeps the cells that llama.cpp would, and answers each prompt with a known continuation.

The "model" is a function of the tokens alone: the next token is a hash of everything before it. So a sequence whose cells
were mixed up with another's, cut wrongly or computed twice gives another answer, and a test that compares texts sees it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from runner.engine.batch import BatchPlan, Outcome
from runner.engine.kv import Checkpoint, Copy, Drop, Forget, Fork, KvOp, Load, Park, Rewind, Save, Shift, Swap, Trim, Unpark
from runner.engine.layout import Weights
from runner.engine.lifecycle import State
from runner.engine.memory_kind import MemoryKind
from runner.engine.sampling import SamplingParams
from runner.engine.scheduler import Scheduler, StepResult
from runner.engine.sequence import Sequence as Generation
from runner.engine.slots import SlotPool

N_VOCAB = 1000
EOG = 7
NEVER_REFUSED = (Park, Unpark, Drop, Forget)


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


class Cell(int):
    """A token that knows in whose trust domain it was computed, and whether with tokens that are gone."""

    domain: str
    is_shifted: bool

    def __new__(cls, token: int, domain: str, *, is_shifted: bool = False) -> "Cell":
        cell = super().__new__(cls, token)
        cell.domain, cell.is_shifted = domain, is_shifted
        return cell


class FakeBackend:
    """Models cells by position. Raises AssertionError on what would abort or corrupt the real one.

    A fork moves its cells at the next decode only, as llama.cpp's does, and so does a shift: what must not touch them until then fails.
    Shifted cells may change places whole; to save, copy or mark them fails, for they are not what their tokens would give anew.
    With a window only its last cells are there once they were computed (`slack` more than it needs); with `can_be_cut` False a slot is
    one state that has no past. With a pool of cells a fork holds the same cells at once, each is free when nobody holds it, and a batch
    that needs more than are free changes nothing (`n_no_room` counts these).
    """

    def __init__(self, n_slots: int, *, n_batch: int = 64, n_ctx: int = 512, kind: MemoryKind | None = None, slack: int = 0) -> None:
        self.cells: list[list[Cell]] = [[] for _ in range(n_slots)]
        self.oldest: list[int] = [0] * n_slots
        self.samplers: list[list[int] | None] = [None] * n_slots
        self.chains: dict[str, list[int] | None] = {}
        self.states: dict[int, list[Cell]] = {}
        self.checkpoints: dict[int, list[Cell]] = {}
        self.pending: list[tuple[int, int]] = []
        self.plans: list[BatchPlan] = []
        self.ops: list[KvOp] = []
        self.n_no_room = 0
        self.refuse: Callable[[KvOp], bool] = lambda op: False
        self.outcome: Callable[[BatchPlan], Outcome] = lambda plan: Outcome.DONE
        self.domain_of: Callable[[int], str] = lambda slot_id: ""
        self._n_batch, self._n_ctx = n_batch, n_ctx
        self._kind, self._slack = kind or MemoryKind(1, 0), slack

    def apply(self, ops: Iterable[KvOp]) -> list[KvOp]:
        """Carry out or refuse."""
        ops = list(ops)
        self.ops += ops
        return [op for op in ops if not self._apply(op, is_refused=not isinstance(op, NEVER_REFUSED) and self.refuse(op))]

    def _apply(self, op: KvOp, *, is_refused: bool) -> bool:
        match op:
            case Trim(slot_id, keep):
                return self._cut(slot_id, 0 if is_refused else keep, is_refused=is_refused)
            case Swap(a, b):
                self._assert_settled(a, b)
                self.cells[a], self.cells[b] = ([], []) if is_refused else (self.cells[b], self.cells[a])
                self.samplers[a], self.samplers[b] = self.samplers[b], self.samplers[a]
                self._loaded(a)
                self._loaded(b)
            case Fork(source, target, keep) if self._kind.is_unified:
                assert source != target
                assert self._kind.n_swa == 0, "window cells of two slots are never free again"
                assert self._kind.can_be_cut or keep == len(self.cells[source]), "a state is its end's"
                is_done = not is_refused and keep <= len(self.cells[source])
                self.cells[target] = self.cells[source][:keep] if is_done else []
                return is_done
            case Fork(source, target, keep):
                self._assert_settled(target)
                self._assert_shareable(source)
                assert source != target
                self.cells[target] = list(self.cells[source])
                self.oldest[target] = self.oldest[source]
                self.pending.append((source, target))
                return self._cut(target, 0 if is_refused else keep, is_refused=is_refused)
            case Copy(source, target, keep):
                self._assert_settled(source, target)
                self._assert_shareable(source)
                assert source != target
                is_done = self._restore(target, self.cells[source])
                return self._cut(target, 0 if is_refused else keep, is_refused=is_refused) and is_done
            case Save(slot_id, state_id):
                self._assert_settled(slot_id)
                self._assert_shareable(slot_id)
                assert state_id not in self.states
                if not is_refused:
                    self.states[state_id] = list(self.cells[slot_id])
            case Load(state_id, slot_id):
                self._assert_settled(slot_id)
                state = None if is_refused else self.states.get(state_id)
                return self._restore(slot_id, state or ()) and state is not None
            case Checkpoint(slot_id, state_id):
                self._assert_settled(slot_id)
                self._assert_shareable(slot_id)
                if not is_refused:
                    self.checkpoints[state_id] = list(self.cells[slot_id])
            case Rewind(state_id, slot_id, keep):
                self._assert_settled(slot_id)
                state = None if is_refused else self.checkpoints.get(state_id)
                if state is None or len(self.cells[slot_id]) < keep:
                    self.cells[slot_id] = []
                    return False
                assert state == self.cells[slot_id][:keep], "a checkpoint of other tokens"
                del self.cells[slot_id][keep:]
                self._loaded(slot_id)
            case Shift(slot_id, keep, discard):
                self._assert_settled(slot_id)
                self.pending.append((slot_id, slot_id))
                cells = self.cells[slot_id]
                assert 0 < keep < keep + discard < len(cells)
                moved = [Cell(cell, cell.domain, is_shifted=True) for cell in cells[keep + discard :]]
                self.cells[slot_id] = [] if is_refused else cells[:keep] + moved
            case Forget(state_id):
                self.states.pop(state_id, None)
                self.checkpoints.pop(state_id, None)
            case Park(slot_id, ticket):
                assert ticket not in self.chains
                self.chains[ticket], self.samplers[slot_id] = self.samplers[slot_id], None
            case Unpark(ticket, slot_id):
                self.samplers[slot_id] = self.chains.pop(ticket)
            case Drop(ticket):
                del self.chains[ticket]
        return not is_refused

    def _assert_settled(self, *slot_ids: int) -> None:
        pending = {slot_id for source, target in self.pending for slot_id in (source, target)}
        assert not pending & set(slot_ids), f"{slot_ids} have a queued copy or shift: llama.cpp would change cells that are not theirs"

    def _assert_shareable(self, slot_id: int) -> None:
        assert not any(cell.is_shifted for cell in self.cells[slot_id]), f"slot {slot_id} was shifted"

    def _cut(self, slot_id: int, keep: int, *, is_refused: bool) -> bool:
        cells, kind = self.cells[slot_id], self._kind
        if len(cells) < keep:
            cells.clear()
            return False
        if 0 < keep < len(cells):
            reach, mark = kind.reach(len(cells), keep, (), self.oldest[slot_id])
            assert (reach, mark) == (keep, None), f"slot {slot_id} cannot be cut from {len(cells)} to {keep}"
        del cells[keep:]
        self.oldest[slot_id] = min(self.oldest[slot_id], len(cells))
        return not is_refused

    def _restore(self, slot_id: int, state: Iterable[Cell]) -> bool:
        """Into cells of its own; where there are too few the slot is empty."""
        self.cells[slot_id] = []
        found = [Cell(cell, cell.domain, is_shifted=cell.is_shifted) for cell in state]
        if len(found) <= self.n_free:
            self.cells[slot_id] = found
        self._loaded(slot_id)
        return len(self.cells[slot_id]) == len(found)

    @property
    def n_free(self) -> float:
        """Cells of the pool that nobody holds."""
        pool_cells = self._kind.pool_cells or math.inf
        return pool_cells - len({id(cell) for cells in self.cells for cell in cells})

    def _loaded(self, slot_id: int) -> None:
        self.oldest[slot_id] = self._kind.oldest_saved(len(self.cells[slot_id]))

    def decode(self, plan: BatchPlan) -> Outcome:
        """Write the cells, unless the test says otherwise."""
        self.plans.append(plan)
        assert 0 < plan.n_rows <= self._n_batch
        ids = [chunk.slot_id for chunk in plan.chunks]
        assert ids == sorted(set(ids)), "rows in ascending slot id, one chunk a slot"
        outcome = self.outcome(plan)
        if outcome is Outcome.DONE and plan.n_rows > self.n_free:
            outcome = Outcome.NO_ROOM
            self.n_no_room += 1
        if outcome is Outcome.DONE:
            self.pending.clear()
        if outcome is Outcome.BROKEN:
            # Some of the cells exist: those of the first chunk but its last token's. A state without a past is given up: nobody knows it.
            chunk = plan.chunks[0]
            self._compute(chunk.slot_id, chunk.tokens[:-1])
            for chunk in plan.chunks if not self._kind.can_be_cut else ():
                self.cells[chunk.slot_id].clear()
        if outcome is Outcome.DONE:
            for chunk in plan.chunks:
                cells = self.cells[chunk.slot_id]
                assert chunk.pos == len(cells), "no position is written twice, none is left out"
                self._compute(chunk.slot_id, chunk.tokens)
                assert len(cells) <= self._n_ctx
                if self._kind.n_swa:
                    self.oldest[chunk.slot_id] = max(self.oldest[chunk.slot_id], len(cells) - self._kind.n_swa - self._slack)
        return outcome

    def _compute(self, slot_id: int, tokens: Sequence[int]) -> None:
        domain, cells = self.domain_of(slot_id), self.cells[slot_id]
        is_shifted = any(cell.is_shifted for cell in cells)
        cells.extend(Cell(token, domain, is_shifted=is_shifted) for token in tokens)

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

    def broken_invariant(self, slot_id: int, n_tokens: int) -> str | None:
        """By number."""
        n_cells = len(self.cells[slot_id])
        return None if n_cells == n_tokens else f"the slot has {n_cells} cells, its tokens are {n_tokens}"

    def n_cells(self, slot_id: int) -> int:
        """Cells that are there."""
        return len(self.cells[slot_id])


class Rig:
    """A scheduler over a fake backend with a clock that ticks 10 ms a step, or what the test says that a step costs."""

    def cost(self, plan: BatchPlan) -> float:
        """Seconds."""
        return 0.01

    def __init__(
        self, n_slots: int = 4, *, n_batch: int = 64, n_ctx: int = 512, kind: MemoryKind | None = None, slack: int = 0, **options: Any
    ) -> None:
        kind = kind or MemoryKind(1, slot_cells=n_ctx)
        self.backend = FakeBackend(n_slots, n_batch=n_batch, n_ctx=n_ctx, kind=kind, slack=slack)
        self.pool = SlotPool(n_slots)
        weights = Weights(model_bytes=1_000, cell_bytes=kind.cell_bytes)
        oldest = self.backend.oldest.__getitem__
        self.scheduler = Scheduler(self.pool, Letters(), weights, n_batch=n_batch, itl_target_s=0.25, kind=kind, oldest=oldest, **options)
        self.memory = self.scheduler.memory
        self.memory.placer.least_saved_s = 0.0  # a step takes no time here
        self.backend.domain_of = lambda slot_id: self.pool[slot_id].domain
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
        """What holds between any two steps: token lists equal cells (but for what is ordered), books equal what is kept."""
        memory, backend = self.memory, self.backend
        for slot in self.pool.slots:
            cells = backend.cells[slot.slot_id]
            assert slot.tokens == self.ordered(slot.slot_id)
            assert slot.is_shifted == (any(cell.is_shifted for cell in self.ordered(slot.slot_id)))
            assert {cell.domain for cell in cells} <= {slot.domain}
            assert slot.sequence is None or slot.sequence.domain == slot.domain
            assert slot.sequence is None or slot.sequence.slot_id == slot.slot_id
        held = [slot.sequence for slot in self.pool.slots if slot.sequence is not None]
        assert set(map(id, held)) == set(map(id, self.scheduler.running))
        assert self.pool.has_free == (len(held) < len(self.pool.slots))
        parked = [sequence for sequence in self.scheduler.waiting if sequence.state is State.PARKED]
        dropped = {op.ticket for op in memory.orders if isinstance(op, Drop)}
        assert set(backend.chains) - dropped == {sequence.request_id for sequence in parked}
        assert self.scheduler.n_parked == len(parked)
        self.check_host(parked)
        if memory.cells is not None:
            n_used = len({id(cell) for slot in self.pool.slots for cell in self.ordered(slot.slot_id)})
            assert memory.cells.n_used == n_used <= memory.cells.n_cells
            assert backend.n_no_room == 0

    def ordered(self, slot_id: int) -> list[Cell]:
        """A slot's cells once what is ordered will have been done."""
        cells = self.backend.cells[slot_id]
        for op in self.memory.orders:
            match op:
                case Trim(changed, keep) if changed == slot_id:
                    cells = cells[:keep]
                case Shift(changed, keep, discard) if changed == slot_id:
                    cells = cells[:keep] + [Cell(cell, cell.domain, is_shifted=True) for cell in cells[keep + discard :]]
        return cells

    def check_host(self, parked: list[Generation]) -> None:
        """The books of host memory."""
        memory, backend, kind = self.memory, self.backend, self.memory.kind
        forgotten = {op.state_id for op in memory.orders if isinstance(op, Forget)}
        ordered = {op.state_id for op in memory.orders if isinstance(op, Save | Checkpoint)}
        states = {cells.state_id: cells for cells in memory.host}
        assert set(backend.states) - forgotten == set(states) - ordered
        assert all(cells.tokens == backend.states[state_id] for state_id, cells in states.items() if state_id not in ordered)
        marks = {mark.state_id: mark for cells in (*self.pool.slots, *memory.host) for mark in cells.marks}
        assert set(backend.checkpoints) - forgotten == set(marks) - ordered
        n_bytes = sum(kind.state_bytes(len(cells.tokens)) for cells in memory.host) + sum(mark.n_bytes for mark in marks.values())
        assert memory.host.used_bytes == n_bytes <= memory.host.limit_bytes
        owned = {cells.owner.request_id: len(cells.tokens) for cells in memory.host if cells.owner is not None}
        assert owned == {sequence.request_id: sequence.n_kept for sequence in parked if sequence.n_kept}
        assert self.scheduler.parked_bytes == sum(kind.state_bytes(n) for n in owned.values())


__all__ = ["EOG", "FakeBackend", "Letters", "Rig", "Swap", "answer", "next_token"]
