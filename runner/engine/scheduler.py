"""Decides what each step computes.

Life of a sequence: `add` -> waiting (queue.py says who is next) -> placed into a slot -> prompt chunks -> one token a step (rows.py says
what a step computes) -> ended, the slot is free and keeps its cells as a prefix cache. `cancel` ends it at any stage. While no slot is
free it may have to give up its own (preempt.py says who): it is parked, waits under the place of its arrival, and goes on where it was.

`plan` binds sequences to slots, cuts a slot's token list to what is kept and orders the same of the cache (`kv_ops`). The
rows it plans change no token list before `commit` books them: a batch that was refused is planned again.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from runner.config import PolicyName
from runner.engine.backend import Vocabulary
from runner.engine.batch import BatchPlan, Chunk, Outcome
from runner.engine.budget import LEAST_CHUNK, PromptBudget
from runner.engine.costs import StepCosts
from runner.engine.kv import Drop, KvOp, Park, Swap, Trim, Unpark
from runner.engine.layout import Mover, Weights, closing_swap
from runner.engine.lifecycle import Reason, State
from runner.engine.parking import HostMemory
from runner.engine.preempt import Preemption
from runner.engine.queue import WaitingQueue
from runner.engine.rows import RowChooser
from runner.engine.sequence import Sequence
from runner.engine.slots import Slot, SlotPool

# A batch that failed is tried again once; a sequence that was in two such batches is given up.
MAX_FAULTS = 2
# What the copies of cells in one step may take together, seconds, where they are more than one.
MOST_MOVED_S = 0.01


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
    ) -> None:
        """`n_batch` bounds the rows of a step, `itl_target_s` and `prompt_chunk` those of prompts beside streams (budget.py).

        `kv_host_bytes` bounds the cells of parked sequences in host memory; beyond it they are computed again.
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
        self._host = HostMemory(kv_host_bytes, weights.cell_bytes, self.costs)
        self._n_parked = self._n_moved_bytes = 0
        self._drops: list[Drop] = []
        self._to_park: list[str] = []
        self._vocabulary = vocabulary
        self._budget = PromptBudget(self.costs, max_rows=n_batch, target_gap_s=itl_target_s, fixed_rows=prompt_chunk)
        self._rows = RowChooser(pool, self.costs, self._budget)
        self._weights = weights
        self._placed: list[Sequence] = []
        self._solo: deque[int] = deque()
        self._repairs: dict[int, Trim] = {}
        self._planned_at = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.running or self._drops)

    @property
    def n_parked(self) -> int:
        """Sequences that had a slot and wait for the next."""
        return self._n_parked

    @property
    def parked_bytes(self) -> int:
        """Cells of parked sequences in host memory."""
        return self._host.used_bytes

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
        self._n_moved_bytes = 0
        ops: list[KvOp] = [*self._drops, *self._repairs.values()]
        self._drops.clear()
        ops += self._park_as_told(now)
        if self.waiting:
            ops += self._place_waiting(now)
            ops += self._preempt(now)
        if self._solo:
            return self._solo_plan(tuple(ops))
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            (decoding if sequence.state is State.DECODE else prefilling).append(sequence)
        if prefilling and (self._rows.prompt_is_due or not decoding):
            return BatchPlan(tuple(ops), tuple(self._rows.prompt_chunks(prefilling, decoding)))
        if decoding:
            ops += self._close_a_gap(decoding)
        return BatchPlan(tuple(ops), tuple(self._rows.decode_chunks(decoding)))

    def take_placed(self) -> list[Sequence]:
        """The sequences that got a slot since the last call: each needs a sampler chain before its first logits."""
        placed, self._placed = self._placed, []
        return placed

    def without(self, plan: BatchPlan, refused: Iterable[KvOp]) -> BatchPlan:
        """Take back what rested on cells that the cache would not give: those sequences compute them in a later step.

        The operations are gone through in order: one that was carried out later may have moved the empty cells, or filled them.
        """
        was_refused = {id(op) for op in refused}
        emptied: set[int] = set()
        for op in plan.kv_ops:
            is_refused = id(op) in was_refused
            match op:
                case Trim(slot_id) if is_refused:
                    emptied.add(slot_id)
                case Park(slot_id, ticket) if is_refused or slot_id in emptied:
                    if (parked := self._by_id.get(ticket)) is not None:
                        self._host.lose(parked)
                case Unpark(_, slot_id) if is_refused:
                    emptied.add(slot_id)
                case Unpark(_, slot_id, has_cells) if has_cells:
                    emptied.discard(slot_id)
                case Swap(source, target) if is_refused:
                    emptied |= {source, target}
                case Swap(source, target):
                    places = {source: target, target: source}
                    emptied = {places.get(slot_id, slot_id) for slot_id in emptied}
        for slot_id in emptied:
            self._forget_cells(self.pool[slot_id])
        return plan._replace(kv_ops=(), chunks=tuple(chunk for chunk in plan.chunks if chunk.slot_id not in emptied))

    def _place_waiting(self, now: float) -> list[KvOp]:
        """Fill the free slots."""
        ops: list[KvOp] = []
        while self.pool.has_free and (sequence := self.waiting.peek()) is not None:
            placing = self._place(sequence, now)
            if placing is None:
                break
            ops += placing
        return ops

    def _place(self, sequence: Sequence, now: float) -> list[KvOp] | None:
        """None where its cells would have to be moved, and enough have been in this step."""
        return self._resume(sequence, now) if sequence.state is State.PARKED else self._admit(sequence, now)

    def _may_move(self, n_cells: int) -> bool:
        """Whether so many more cells may be copied in this step: the first always, others while all take no time to speak of."""
        if self._n_moved_bytes == 0:
            return True
        move_s = self.costs.move_s(self._n_moved_bytes + self._host.bytes_of(n_cells))
        return move_s is not None and move_s <= MOST_MOVED_S

    def _admit(self, sequence: Sequence, now: float) -> list[KvOp]:
        placement = self.pool.place(sequence.prompt, may_reuse=sequence.cache_prompt, now=now)
        assert placement is not None
        slot, keep = placement.slot, placement.keep
        ops = self._cut(slot, keep)
        sequence.n_cached = keep
        sequence.times.admitted_at = now
        self._bind(slot, sequence, State.PREFILL)
        return ops

    def _resume(self, sequence: Sequence, now: float) -> list[KvOp] | None:
        """Let a parked sequence go on, with its cells from a slot or from host memory."""
        placement = self.pool.place(sequence.script, may_reuse=True, now=now, needs_logits=sequence.pending is None)
        assert placement is not None
        slot, keep = placement.slot, placement.keep
        has_cells = keep < sequence.n_kept
        if has_cells and not self._may_move(sequence.n_kept):
            return None
        ops: list[KvOp] = []
        if has_cells:
            self._n_moved_bytes += self._host.bytes_of(sequence.n_kept)
            slot.tokens = sequence.script[: sequence.n_kept]
        else:
            ops += self._cut(slot, keep)
        ops.append(Unpark(sequence.request_id, slot.slot_id, has_cells))
        self._host.lose(sequence)
        self._n_parked -= 1
        sequence.times.parked_s += now - sequence.times.parked_at
        is_whole = sequence.pending is not None and len(slot.tokens) == len(sequence.script)
        self._bind(slot, sequence, State.DECODE if is_whole else State.PREFILL)
        return ops

    def _bind(self, slot: Slot, sequence: Sequence, state: State) -> None:
        self.waiting.take(sequence)
        self.pool.bind(slot, sequence)
        sequence.move_to(state)
        self.running.append(sequence)
        self._placed.append(sequence)

    def _cut(self, slot: Slot, keep: int) -> list[KvOp]:
        if keep == len(slot.tokens):
            return []
        del slot.tokens[keep:]
        return [Trim(slot.slot_id, keep)]

    def _park_as_told(self, now: float) -> list[Park]:
        if self._solo:
            return []
        told = [self._by_id[request_id] for request_id in self._to_park if request_id in self._by_id]
        self._to_park.clear()
        return [self._park(sequence, now) for sequence in told if sequence.slot_id is not None]

    def _preempt(self, now: float) -> list[KvOp]:
        """Let those who must not wait have the slots of those who give theirs up. While a refused batch is taken apart, nobody moves."""
        ops: list[KvOp] = []
        while not (self.pool.has_free or self._solo) and (first := self.waiting.claimant()) is not None:
            victim = self._preemption.victim_for(first, self.running, now, spared=self._placed)
            if victim is None or not self._may_move(len(self._slot_of(victim).tokens)):
                break
            ops.append(self._park(victim, now))
            ops += self._place(first, now) or ()
        return ops

    def _park(self, sequence: Sequence, now: float) -> Park:
        slot = self._slot_of(sequence)
        if sequence.pending is not None and sequence.state is State.DECODE:
            sequence.script = list(slot.tokens)
        keeps_cells = self._host.keep(sequence, len(slot.tokens))
        self._n_moved_bytes += self._host.bytes_of(sequence.n_kept)
        sequence.n_parks += 1
        self._n_parked += 1
        sequence.times.parked_at = now
        self.running.remove(sequence)
        self.pool.release(slot, now)
        sequence.move_to(State.PARKED)
        self.waiting.leave(sequence)
        self.waiting.push(sequence)
        return Park(slot.slot_id, sequence.request_id, keeps_cells)

    def _close_a_gap(self, decoding: list[Sequence]) -> list[KvOp]:
        if len(self.running) == 1:
            return []
        busy = {sequence.slot_id for sequence in self.running if sequence.slot_id is not None}
        if max(busy) - min(busy) < len(busy):
            return []
        movers = {s.slot_id: Mover(len(self._slot_of(s).tokens), s.max_tokens - s.n_generated) for s in decoding if s.slot_id is not None}
        free = {slot.slot_id: len(slot.tokens) for slot in self.pool.slots if slot.is_free}
        swap = closing_swap(movers, busy, free, self._weights)
        if swap is None:
            return []
        busy_slot, free_slot = self.pool[swap.source], self.pool[swap.target]
        self._n_moved_bytes += self._host.bytes_of(len(busy_slot.tokens) + len(free_slot.tokens))
        self.pool.exchange(busy_slot, free_slot)
        return [swap]

    def _forget_cells(self, slot: Slot) -> None:
        """The cells are gone, the tokens are known: a sequence that decodes computes them again and goes on."""
        tokens, slot.tokens = slot.tokens, []
        sequence = slot.sequence
        if sequence is None:
            return
        sequence.n_cached = 0
        if sequence.state is State.DECODE:
            sequence.script = tokens
            sequence.move_to(State.PARKED)
            sequence.move_to(State.PREFILL)

    def _solo_plan(self, ops: tuple[KvOp, ...]) -> BatchPlan:
        """One chunk alone: some row of a batch was refused, and this finds out whose."""
        while self._solo:
            sequence = self.pool[self._solo[0]].sequence
            if sequence is None:
                self._solo.popleft()
            elif sequence.state is State.DECODE:
                return BatchPlan(ops, (self._rows.decode_chunk(sequence),))
            else:
                return BatchPlan(ops, (self._rows.prompt_chunk(sequence, LEAST_CHUNK),))
        return BatchPlan(ops)

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
        self._repairs.clear()
        result = StepResult()
        self._give_up_hopeless(result, now)
        match outcome:
            case Outcome.DONE:
                self._rows.learn(plan, now - self._planned_at - moved_s)
                self.costs.learn_move(self._n_moved_bytes if plan.kv_ops else 0, moved_s)
                self._book(plan, sampled, now, result)
            case Outcome.INVALID | Outcome.NO_ROOM if not self._solo and (len(plan.chunks) > 1 or plan.n_rows > LEAST_CHUNK):
                self._solo.extend(chunk.slot_id for chunk in plan.chunks)
            case Outcome.INVALID | Outcome.NO_ROOM:
                self._fail(plan.chunks[-1], f"llama.cpp refused the batch ({outcome.value})", result, now)
            case Outcome.BROKEN:
                assert cells is not None
                self._repair(plan, cells, result, now)
        return result

    def _book(self, plan: BatchPlan, sampled: Seq[int], now: float, result: StepResult) -> None:
        tokens = iter(sampled)
        cost_s = (now - self._planned_at) / max(1, plan.n_rows)
        for chunk in plan.chunks:
            slot = self.pool[chunk.slot_id]
            assert chunk.pos == len(slot.tokens), f"slot {slot.slot_id}: a chunk at {chunk.pos}, {len(slot.tokens)} cells"
            slot.tokens.extend(chunk.tokens)
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

    def _repair(self, plan: BatchPlan, cells: Mapping[int, int], result: StepResult, now: float) -> None:
        for chunk in plan.chunks:
            slot = self.pool[chunk.slot_id]
            keep = min(len(slot.tokens), cells[chunk.slot_id])
            is_short = keep < len(slot.tokens)
            del slot.tokens[keep:]
            self._repairs[slot.slot_id] = Trim(slot.slot_id, keep)
            sequence = slot.sequence
            if sequence is None:
                continue
            sequence.n_faults += 1
            if sequence.n_faults >= MAX_FAULTS or (is_short and sequence.state is State.DECODE):
                self._fail(chunk, "llama.cpp could not compute the batch", result, now)

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
        slot.tokens = []
        self._repairs[slot.slot_id] = Trim(slot.slot_id, 0)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, reason: Reason, now: float) -> None:
        sequence.reason = reason
        sequence.times.finished_at = now
        if sequence.state is State.PARKED:
            sequence.times.parked_s += now - sequence.times.parked_at
            self._host.lose(sequence)
            self._n_parked -= 1
            self._drops.append(Drop(sequence.request_id))
        if sequence.state in (State.QUEUED, State.PARKED):
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.pool.release(self._slot_of(sequence), now)
            self.waiting.leave(sequence)
        sequence.move_to(State.FINISHED)
        del self._by_id[sequence.request_id]

    def _slot_of(self, sequence: Sequence) -> Slot:
        assert sequence.slot_id is not None
        return self.pool[sequence.slot_id]
