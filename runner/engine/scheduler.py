"""Decides what each step computes.

Life of a sequence: `add` -> waiting (queue.py says who is next) -> placed into a slot -> prompt chunks -> one token a step (rows.py says
what a step computes) -> ended, the slot is free and keeps its cells as a prefix cache. `cancel` ends it at any stage. While no slot is
free it may have to give up its own (preempt.py says who): it is parked, waits under the place of its arrival, and goes on where it was.
So it may where all slots take cells from one pool and that is full (reservations.py).

`plan` binds sequences to slots and orders what that takes of their cells (memory.py). The rows it plans change no token list before
`commit` books them: a batch that was refused is planned again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from runner.config import PolicyName
from runner.engine.backend import Vocabulary
from runner.engine.batch import BatchPlan, Chunk, Outcome, Split
from runner.engine.budget import LEAST_CHUNK, PromptBudget
from runner.engine.cells import Slot
from runner.engine.costs import StepCosts
from runner.engine.kv import Drop, KvOp, Park, Unpark
from runner.engine.layout import Mover, Weights, closing_swap
from runner.engine.lifecycle import Reason, State
from runner.engine.memory import KvMemory
from runner.engine.memory_kind import MemoryKind
from runner.engine.preempt import Preemption
from runner.engine.queue import WaitingQueue
from runner.engine.reservations import growth_victim
from runner.engine.rows import RowChooser
from runner.engine.sequence import Sequence
from runner.engine.slots import SlotPool

# A batch that failed is tried again once; a sequence that was in two such batches is given up.
MAX_FAULTS = 2


@dataclass(slots=True)
class StepResult:
    """What a step brought: text per sequence, sequences that ended, those that failed and why, gaps since their last tokens."""

    texts: list[tuple[Sequence, str]] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.texts or self.ended or self.failed)


class Scheduler:
    """All sequences of one engine. Pure: driven by `add`, `cancel`, `plan` and `commit` with the time as an argument."""

    def __init__(
        self,
        pool: SlotPool,
        vocabulary: Vocabulary,
        weights: Weights,
        *,
        n_batch: int,
        itl_target_s: float,
        prompt_chunk: int = 0,
        policy: PolicyName = "fair",
        max_running_per_client: int = 0,
        share_grace_s: float = 1.0,
        kv_host_bytes: int = 1 << 30,
        kind: MemoryKind | None = None,
        oldest: Callable[[int], int] = lambda slot_id: 0,
        shift_at: int | None = None,
    ) -> None:
        """`n_batch` bounds the rows of a step, `itl_target_s` and `prompt_chunk` those of prompts beside streams (budget.py).

        `kv_host_bytes` bounds the cells that are kept in host memory, of parked sequences and others; beyond it they are computed again.
        `oldest` is the first position that a slot's sliding window still has. A slot with `shift_at` tokens is shifted where its sequence
        goes on; None: no sequence's `max_tokens` goes beyond its slot.
        """
        self.pool = pool
        self.waiting = WaitingQueue(policy, max_running_per_client=max_running_per_client)
        self.running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._preemption = Preemption(
            across_tiers=policy != "fcfs",
            share_grace_s=share_grace_s if policy == "fair" else None,
            charged=self.waiting.charged,
            has_backlog=self.waiting.has_backlog,
        )
        self.costs = StepCosts()
        kind = kind or MemoryKind(weights.cell_bytes, slot_cells=0)
        self.memory = KvMemory(pool, kind, self.costs, host_bytes=kv_host_bytes, oldest=oldest)
        self._following = self.memory.following
        self._n_parked = 0
        self._to_park: list[str] = []
        self._vocabulary = vocabulary
        self._budget = PromptBudget(self.costs, max_rows=n_batch, target_gap_s=itl_target_s, fixed_rows=prompt_chunk)
        self._rows = RowChooser(self.memory, self.costs, self._budget)
        self._weights = weights
        self._shift_at = shift_at
        self._placed: list[Sequence] = []
        self._solo: deque[int] = deque()
        # Of this step: those whose cells would not fit the whole pool, and the last of their texts.
        self._cut_short: list[tuple[Sequence, str]] = []
        self._planned_at = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.running or self.memory.has_orders)

    @property
    def n_parked(self) -> int:
        """Sequences that had a slot and wait for the next."""
        return self._n_parked

    @property
    def parked_bytes(self) -> int:
        """Cells of parked sequences in host memory."""
        return self.memory.host.owned_bytes

    @property
    def longest_step_s(self) -> float | None:
        """What the slowest step should take, in seconds; None before anything was measured."""
        return self._budget.longest_step_s

    # -- arrivals and departures ---------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for a slot. Its id is the only one of its kind here."""
        assert sequence.state is State.QUEUED
        assert sequence.request_id not in self._by_id
        self._by_id[sequence.request_id] = sequence
        self.waiting.push(sequence)

    def cancel(self, request_id: str, now: float) -> Sequence | None:
        """End a sequence at whatever stage it is; None where it is not here (any more)."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._end(sequence, Reason.CANCELLED, now)
        return sequence

    def park(self, request_id: str) -> None:
        """Park a running sequence at the next step, whatever it costs; nothing happens where it does not run then."""
        self._to_park.append(request_id)

    # -- planning ------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> BatchPlan:
        """Free a slot for who must not wait, place waiting sequences, close a gap between slots, then choose this step's rows."""
        self._planned_at = now
        memory = self.memory
        memory.begin_step()
        self._park_as_told(now)
        if self.waiting:
            self._place_waiting(now)
            self._preempt(now)
        memory.serve_followers(now)
        chunks = self._fitting_chunks(now)
        return BatchPlan(memory.take_orders(), tuple(chunks), memory.kind.split, memory.n_attended)

    def _fitting_chunks(self, now: float) -> list[Chunk]:
        """The rows of this step. Where the pool of all slots has no cells for them, sequences are parked until it has.

        Those that have just been placed are not: there was room for them and for the next rows of all others.
        """
        chunks = self._chunks()
        while not self.memory.make_room(sum(len(chunk.tokens) for chunk in chunks), now):
            if len(self.running) == 1:
                self._end_at_once(self.running[0], now)
            else:
                self._park(growth_victim([sequence for sequence in self.running if sequence not in self._placed]), now)
            chunks = self._chunks()
        return chunks

    def _chunks(self) -> list[Chunk]:
        if self._solo:
            return self._solo_chunks()
        memory = self.memory
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            if sequence.state is State.DECODE:
                decoding.append(sequence)
            elif not memory.is_held(sequence):
                prefilling.append(sequence)
        if prefilling and (self._rows.prompt_is_due or not decoding):
            return self._rows.prompt_chunks(prefilling, decoding)
        if decoding:
            self._close_a_gap(decoding)
        return self._rows.decode_chunks(decoding)

    def take_placed(self) -> list[Sequence]:
        """The sequences that got a slot since the last call: each needs a sampler chain before its first logits."""
        placed, self._placed = self._placed, []
        return placed

    def without(self, plan: BatchPlan, refused: Iterable[KvOp]) -> BatchPlan:
        """Take back what rested on cells that the cache would not give: those sequences compute them in a later step.

        The operations are gone through in order: one that was carried out later may have moved the empty cells, or filled them.
        """
        emptied = self.memory.refused(plan.kv_ops, refused)
        for slot_id in emptied:
            self._forget_cells(self.pool[slot_id])
        return plan._replace(kv_ops=(), chunks=tuple(chunk for chunk in plan.chunks if chunk.slot_id not in emptied))

    def _place_waiting(self, now: float) -> None:
        """Fill the free slots."""
        while self.pool.has_free and (sequence := self.waiting.peek()) is not None:
            if not self._place(sequence, now):
                return

    def _place(self, sequence: Sequence, now: float) -> bool:
        """False where its cells would have to be moved, and enough have been in this step, or where there is no room for them."""
        slot = self.memory.place(sequence, now)
        if slot is None:
            return False
        if sequence.state is State.PARKED:
            self._resume(sequence, slot, now)
        else:
            sequence.n_cached = len(slot.tokens)
            sequence.times.admitted_at = now
            sequence.move_to(State.PREFILL)
        self.waiting.take(sequence)
        self.running.append(sequence)
        self._placed.append(sequence)
        return True

    def _resume(self, sequence: Sequence, slot: Slot, now: float) -> None:
        self.memory.order(Unpark(sequence.request_id, slot.slot_id))
        self._n_parked -= 1
        sequence.times.parked_s += now - sequence.times.parked_at
        is_whole = sequence.pending is not None and len(slot.tokens) == len(sequence.script)
        sequence.move_to(State.DECODE if is_whole else State.PREFILL)

    def _park_as_told(self, now: float) -> None:
        if self._solo:
            return
        told = [self._by_id[request_id] for request_id in self._to_park if request_id in self._by_id]
        self._to_park.clear()
        for sequence in told:
            if sequence.slot_id is not None:
                self._park(sequence, now)

    def _preempt(self, now: float) -> None:
        """Let those who must not wait have the slots of those who give theirs up. While a refused batch is taken apart, nobody moves."""
        while not self._solo and (first := self.waiting.claimant()) is not None:
            victims = self._victims_for(first, now)
            if not victims or not self.memory.may_move(sum(map(self.memory.bytes_of, victims))):
                return
            for victim in victims:
                self._park(victim, now)
            if not self._place(first, now):
                return

    def _victims_for(self, first: Sequence, now: float) -> list[Sequence]:
        """Those whose slots `first` needs, or whose cells of a pool that all share; none where it needs none or they do not suffice."""
        victims: list[Sequence] = []
        running, spared = list(self.running), self._spared(first)
        while not ((victims or self.pool.has_free) and self.memory.has_room_for(first, without=victims)):
            victim = self._preemption.victim_for(first, running, now, spared=spared)
            if victim is None:
                return []
            victims.append(victim)
            running.remove(victim)
        return victims

    def _spared(self, first: Sequence) -> list[Sequence]:
        """Those that have only just got their slots or their cells, and those that compute for somebody of the first one's tier."""
        pending = [slot.sequence for slot in self.pool.slots if slot.is_pending and slot.sequence is not None]
        return [*self._placed, *pending, *self._following.led(first.tier)]

    def _park(self, sequence: Sequence, now: float) -> None:
        slot = self._slot_of(sequence)
        if sequence.pending is not None and sequence.state is State.DECODE:
            sequence.script = list(slot.tokens)
        self.memory.order(Park(slot.slot_id, sequence.request_id))
        self.memory.park(sequence, now)
        sequence.n_parks += 1
        self._n_parked += 1
        sequence.times.parked_at = now
        self.running.remove(sequence)
        sequence.move_to(State.PARKED)
        self.waiting.leave(sequence)
        self.waiting.push(sequence)

    def _close_a_gap(self, decoding: list[Sequence]) -> None:
        if len(self.running) == 1 or self.memory.kind.split is not Split.ADJACENT:
            return
        busy = {sequence.slot_id for sequence in self.running if sequence.slot_id is not None}
        if max(busy) - min(busy) < len(busy):
            return
        still = {slot.slot_id for slot in self.pool.slots if not slot.is_pending}
        movers = {
            s.slot_id: Mover(len(self._slot_of(s).tokens), s.max_tokens - s.n_generated)
            for s in decoding
            if s.slot_id is not None and s.slot_id in still
        }
        free = {slot.slot_id: len(slot.tokens) for slot in self.pool.slots if slot.is_free and slot.slot_id in still}
        swap = closing_swap(movers, busy, free, self._weights)
        if swap is not None:
            self.memory.exchange(swap)

    def _forget_cells(self, slot: Slot) -> None:
        """The cells are gone, the tokens are known: a sequence that decodes computes them again and goes on."""
        tokens = self.memory.forget(slot)
        sequence = slot.sequence
        if sequence is None:
            return
        sequence.n_cached = 0
        if sequence.state is State.DECODE:
            sequence.script = tokens
            sequence.move_to(State.PARKED)
            sequence.move_to(State.PREFILL)
            self.memory.script_changed(slot)

    def _solo_chunks(self) -> list[Chunk]:
        """One chunk alone: some row of a batch was refused, and this finds out whose."""
        while self._solo:
            sequence = self.pool[self._solo[0]].sequence
            if sequence is None:
                self._solo.popleft()
            elif sequence.state is State.DECODE:
                return [self._rows.decode_chunk(sequence)]
            else:
                return [self._rows.prompt_chunk(sequence, LEAST_CHUNK)]
        return []

    # -- booking -------------------------------------------------------------------------------------------------------

    def commit(
        self,
        plan: BatchPlan,
        outcome: Outcome,
        sampled: Seq[int],
        now: float,
        cells: Mapping[int, int] | None = None,
        *,
        moved_s: float = 0.0,
    ) -> StepResult:
        """Book what the step made true. `cells` tells, after BROKEN, how many cells each slot of the plan really has.

        `moved_s` of the step's seconds went into its `kv_ops`.
        """
        result = StepResult(texts=self._cut_short, ended=[sequence for sequence, _ in self._cut_short])
        self._cut_short = []
        self._give_up_hopeless(result, now)
        match outcome:
            case Outcome.DONE:
                if plan.chunks:
                    self.memory.decoded()
                self._learn(plan, now - self._planned_at, moved_s)
                self._book(plan, sampled, now, result)
            case Outcome.INVALID | Outcome.NO_ROOM if not self._solo and (len(plan.chunks) > 1 or plan.n_rows > LEAST_CHUNK):
                self._solo.extend(chunk.slot_id for chunk in plan.chunks)
            case Outcome.INVALID | Outcome.NO_ROOM:
                self._fail(plan.chunks[-1], f"llama.cpp refused the batch ({outcome.value})", result, now)
            case Outcome.BROKEN:
                assert cells is not None
                self._repair(plan, cells, result, now)
        return result

    def _learn(self, plan: BatchPlan, seconds: float, moved_s: float) -> None:
        """The batch took what the moves before it did not; of that the queued copies what it takes to move as much."""
        memory = self.memory
        forked_s = self.costs.move_s(memory.n_forked_bytes) if memory.n_forked_bytes else 0.0
        self._rows.learn(plan, seconds - moved_s - (forked_s or 0.0))
        self.costs.learn_move(memory.n_moved_bytes if plan.kv_ops else 0, moved_s)

    def _book(self, plan: BatchPlan, sampled: Seq[int], now: float, result: StepResult) -> None:
        tokens = iter(sampled)
        cost_s = (now - self._planned_at) / max(1, plan.n_rows)
        for chunk in plan.chunks:
            slot = self.pool[chunk.slot_id]
            assert chunk.pos == len(slot.tokens), f"slot {slot.slot_id}: a chunk at {chunk.pos}, {len(slot.tokens)} cells"
            self.memory.extend(slot, chunk.tokens)
            token = next(tokens) if chunk.has_logits else None
            if self._solo and self._solo[0] == chunk.slot_id:
                self._solo.popleft()
            sequence = slot.sequence
            if sequence is None:
                continue
            self.waiting.charge(sequence, cost_s * len(chunk.tokens))
            if token is not None:
                self._accept(sequence, token, now, result)
            elif sequence.pending is not None and len(slot.tokens) == len(sequence.script):
                sequence.move_to(State.DECODE)  # computed again after it was parked: its next token is known
            elif len(slot.tokens) == len(sequence.script) - 1:
                self.memory.mark(slot)
        assert next(tokens, None) is None

    def _accept(self, sequence: Sequence, token: int, now: float, result: StepResult) -> None:
        if sequence.state is State.PREFILL:
            sequence.move_to(State.DECODE)
            sequence.times.first_token_at = now
        else:
            result.gaps_s.append(now - sequence.times.last_token_at)
        sequence.times.last_token_at = now
        text = sequence.accept(token, self._vocabulary.piece(token), is_eog=self._vocabulary.is_eog(token))
        result.texts.append((sequence, text))
        if sequence.reason is not None:
            self._end(sequence, sequence.reason, now)
            result.ended.append(sequence)
        elif len(self._slot_of(sequence).tokens) == self._shift_at:
            self.memory.shift(self._slot_of(sequence), sequence.n_keep)

    def _repair(self, plan: BatchPlan, cells: Mapping[int, int], result: StepResult, now: float) -> None:
        for chunk in plan.chunks:
            slot = self.pool[chunk.slot_id]
            keep = min(len(slot.tokens), cells[chunk.slot_id])
            is_short = keep < len(slot.tokens)
            self.memory.cut(slot, keep)
            sequence = slot.sequence
            if sequence is None:
                continue
            sequence.n_faults += 1
            if sequence.n_faults >= MAX_FAULTS or (is_short and sequence.state is State.DECODE):
                self._fail(chunk, "llama.cpp could not compute the batch", result, now)

    def condemn(self, slot_id: int, why: str, now: float) -> StepResult:
        """A slot's cells are not what its tokens say: end whoever has it with an error, and empty it."""
        result, slot = StepResult(), self.pool[slot_id]
        if slot.sequence is not None:
            result.failed.append((slot.sequence, why))
            self._end(slot.sequence, Reason.ERROR, now)
        self.memory.cut(slot, 0)
        return result

    def _give_up_hopeless(self, result: StepResult, now: float) -> None:
        for sequence in list(self.running):
            if sequence.n_faults >= MAX_FAULTS:
                self._end(sequence, Reason.ERROR, now)
                result.failed.append((sequence, "The slot's cells were lost"))

    def _fail(self, chunk: Chunk, why: str, result: StepResult, now: float) -> None:
        """End the chunk's sequence with an error and empty its slot: what lies in its cells is not certain any more."""
        slot = self.pool[chunk.slot_id]
        sequence = slot.sequence
        assert sequence is not None
        self._end(sequence, Reason.ERROR, now)
        result.failed.append((sequence, why))
        self.memory.cut(slot, 0)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end_at_once(self, sequence: Sequence, now: float) -> None:
        """It has the whole pool, and that is full."""
        self._cut_short.append((sequence, sequence.cut_short()))
        self._end(sequence, Reason.LENGTH, now)

    def _end(self, sequence: Sequence, reason: Reason, now: float) -> None:
        sequence.reason = reason
        sequence.times.finished_at = now
        if sequence.state is State.PARKED:
            sequence.times.parked_s += now - sequence.times.parked_at
            self.memory.forget_parked(sequence)
            self._n_parked -= 1
            self.memory.order(Drop(sequence.request_id))
        if sequence.state in (State.QUEUED, State.PARKED):
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.memory.release(sequence, now)
            self.waiting.leave(sequence)
        sequence.move_to(State.FINISHED)
        del self._by_id[sequence.request_id]

    def _slot_of(self, sequence: Sequence) -> Slot:
        assert sequence.slot_id is not None
        return self.pool[sequence.slot_id]
