"""The real `Backend`: cells, decode and sampling through llama.cpp. Belongs to the decode thread."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from runner.engine.batch import BatchPlan, Outcome
from runner.engine.kv import Checkpoint, Copy, Drop, Forget, Fork, KvOp, Load, Park, Rewind, Save, Shift, Swap, Trim, Unpark
from runner.engine.memory_kind import MemoryKind
from runner.engine.sampling import SamplingParams
from runner.llama.batch import Batch
from runner.llama.context import Context, ContextSize
from runner.llama.invariants import Invariants, Observed
from runner.llama.library import Library
from runner.llama.model import Model
from runner.llama.sampler import build_chain
from runner.llama.states import State, States


@dataclass(slots=True)
class NativeTime:
    """Seconds spent in native code since the start, by kind."""

    decode_s: float = 0.0
    sample_s: float = 0.0
    move_s: float = 0.0


class LlamaBackend:
    """N slots of one context."""

    def __init__(
        self,
        library: Library,
        model: Model,
        context: Context,
        size: ContextSize,
        kind: MemoryKind,
        *,
        on_gpu: bool,
        clock: Callable[[], float],
    ) -> None:
        self.native = NativeTime()
        self._api, self._clock = library.api, clock
        self._model, self._context, self._on_gpu = model, context, on_gpu
        self._batch = Batch(library.api, size.n_batch, size.n_slots)
        self._kind = kind
        self._chains: list[int] = [0] * size.n_slots
        self._parked: dict[str, int] = {}
        self._states = States(library.api, context)
        self._invariants = Invariants(kind)
        # Slots that a copy is queued from or to, or a shift of: llama.cpp makes it at the next decode, and nothing else knows of it.
        self._pending: set[int] = set()
        self._shifted: set[int] = set()
        self._outputs: list[tuple[int, int]] = []
        pointer, int32 = ctypes.c_void_p, ctypes.c_int32
        self._sample = library.hold("llama_sampler_sample", int32, pointer, pointer, int32)
        self._accept = library.hold("llama_sampler_accept", None, pointer, int32)
        self._free_chain = library.hold("llama_sampler_free", None, pointer)
        self._remove = library.hold("llama_memory_seq_rm", ctypes.c_bool, pointer, int32, int32, int32)
        self._copy_sequence = library.hold("llama_memory_seq_cp", None, pointer, int32, int32, int32, int32)
        self._add = library.hold("llama_memory_seq_add", None, pointer, int32, int32, int32, int32)
        self._pos_max = library.hold("llama_memory_seq_pos_max", int32, pointer, int32)
        self._pos_min = library.hold("llama_memory_seq_pos_min", int32, pointer, int32)

    def open_sampler(self, slot_id: int, sampling: SamplingParams, prompt_tail: Sequence[int], *, ignore_eos: bool) -> None:
        """Give a slot a new chain. The seed was drawn before, where the request brought none."""
        assert sampling.seed is not None
        vocabulary = self._model.vocabulary
        banned = vocabulary.eog_tokens if ignore_eos else ()
        if self._chains[slot_id]:
            self._free_chain(self._chains[slot_id])
        chain = self._chains[slot_id] = build_chain(self._api, vocabulary.n_tokens, sampling, banned, sampling.seed)
        if sampling.has_penalties:
            for token in prompt_tail:
                self._accept(chain, token)

    def apply(self, ops: Iterable[KvOp]) -> list[KvOp]:
        """Carry out what `engine/kv.py` lists; see `engine/backend.py`."""
        started = self._clock()
        refused = [op for op in ops if not self._apply(op)]
        self.native.move_s += self._clock() - started
        return refused

    def decode(self, plan: BatchPlan) -> Outcome:
        """One llama_decode. The GIL is free meanwhile."""
        batch, self._outputs = self._batch.fill(plan)
        started = self._clock()
        status = self._api.llama_decode(self._context.handle, batch)
        if status == 0 and self._on_gpu:
            # Through CDLL: the short calls that follow keep the GIL and would hold it for the whole GPU step.
            self._api.llama_synchronize(self._context.handle)
        self.native.decode_s += self._clock() - started
        if status != -1:
            self._pending.clear()
        match status:
            case 0:
                return Outcome.DONE
            case 1:
                return Outcome.NO_ROOM
            case -1:
                return Outcome.INVALID
        if not self._kind.can_be_cut:
            for chunk in plan.chunks:
                self._clear(chunk.slot_id)
        return Outcome.BROKEN

    def sample(self, plan: BatchPlan) -> list[int]:
        """One token a chunk with logits, through its slot's chain."""
        started = self._clock()
        assert len(self._outputs) == plan.n_outputs
        handle, chains, sample = self._context.handle, self._chains, self._sample
        tokens = [sample(chains[slot_id], handle, row) for slot_id, row in self._outputs]
        self.native.sample_s += self._clock() - started
        return tokens

    def n_cells(self, slot_id: int) -> int:
        """The slot's largest position + 1."""
        return int(self._pos_max(self._context.memory, slot_id)) + 1

    def oldest(self, slot_id: int) -> int:
        """The first position that the slot's sliding window still has (elsewhere 0); 0 for an empty slot."""
        return max(0, int(self._pos_min(self._context.memory, slot_id)))

    def broken_invariant(self, slot_id: int, n_tokens: int) -> str | None:
        """What does not hold of a slot that should have the cells of so many tokens, as a sentence; None where all does."""
        if slot_id in self._pending:
            return None
        memory, states = self._context.memory, self._states
        n_bytes, n_partial = states.size(slot_id), states.size(slot_id, is_partial=True)
        observed = Observed(int(self._pos_min(memory, slot_id)), self.n_cells(slot_id) - 1, n_bytes, n_partial)
        return self._invariants.broken(n_tokens, observed, is_shifted=slot_id in self._shifted)

    def state(self, state_id: int) -> memoryview | None:
        """The bytes of a saved state or checkpoint; None where it was never saved."""
        state = self._states.get(state_id)
        return None if state is None else memoryview(state).cast("B")

    def slot_state(self, slot_id: int) -> memoryview | None:
        """Those of a slot, as if it were saved; None where llama.cpp could not."""
        self._assert_settled(slot_id)
        state = self._states.read(slot_id)
        return None if state is None else memoryview(state).cast("B")

    def adopt(self, state_id: int, data: memoryview) -> None:
        """Keep a state that was read elsewhere: `data` is writable and owns its memory."""
        self._states.put(state_id, (ctypes.c_uint8 * data.nbytes).from_buffer(data))

    def close(self) -> None:
        """Free the chains."""
        for chain in filter(None, [*self._chains, *self._parked.values()]):
            self._free_chain(chain)
        self._chains = [0] * len(self._chains)
        self._parked.clear()
        self._states.clear()

    def _apply(self, op: KvOp) -> bool:
        match op:
            case Trim(slot_id, keep):
                return self._trim(slot_id, keep)
            case Swap(source, target):
                return self._swap(source, target)
            case Fork(source, target, keep):
                return self._fork(source, target, keep)
            case Copy(source, target, keep):
                return self._copy(source, target, keep)
            case Save(slot_id, state_id):
                self._assert_settled(slot_id)
                return self._states.save(state_id, slot_id)
            case Load(state_id, slot_id):
                self._assert_settled(slot_id)
                return self._restored(slot_id, self._states.get(state_id))
            case Checkpoint(slot_id, state_id):
                self._assert_settled(slot_id)
                return self._states.save(state_id, slot_id, is_partial=True)
            case Rewind(state_id, slot_id, keep):
                return self._rewind(state_id, slot_id, keep)
            case Shift(slot_id, keep, discard):
                return self._shift(slot_id, keep, discard)
            case Forget(state_id):
                self._states.forget(state_id)
                return True
            case Park(slot_id, ticket):
                self._parked[ticket], self._chains[slot_id] = self._chains[slot_id], 0
                return True
            case Unpark(ticket, slot_id):
                if self._chains[slot_id]:
                    self._free_chain(self._chains[slot_id])
                self._chains[slot_id] = self._parked.pop(ticket)
                return True
            case Drop(ticket):
                if chain := self._parked.pop(ticket):
                    self._free_chain(chain)
                return True

    def _fork(self, source: int, target: int, keep: int) -> bool:
        """Metadata change at once, K and V with the next decode. Never of a part: between partitioned slots llama.cpp asserts that.

        Of a shared pool the target gets the cells themselves, so many as it is to keep, and nothing is queued.
        """
        self._assert_settled(target)
        if self.n_cells(source) < keep:
            self._clear(target)
            return False
        if self._kind.is_unified:
            self._clear(target)
            self._copy_sequence(self._context.memory, source, target, 0, keep)
            return self._trim(target, keep)
        self._copy_sequence(self._context.memory, source, target, -1, -1)
        self._pending |= {source, target}
        return self._trim(target, keep)

    def _copy(self, source: int, target: int, keep: int) -> bool:
        self._assert_settled(source, target)
        return self._restored(target, self._states.borrow(source)) and self._trim(target, keep)

    def _rewind(self, state_id: int, slot_id: int, keep: int) -> bool:
        self._assert_settled(slot_id)
        state = self._states.get(state_id)
        if state is not None and self.n_cells(slot_id) >= keep and self._states.write(slot_id, state, is_partial=True):
            self._remove(self._context.memory, slot_id, keep, -1)
            if self.n_cells(slot_id) == keep:
                return True
        self._clear(slot_id)
        return False

    def _shift(self, slot_id: int, keep: int, discard: int) -> bool:
        """Positions change at once, keys with the next decode. Only where `Context.can_shift`: elsewhere that decode aborts the process."""
        self._assert_settled(slot_id)
        end, memory = keep + discard, self._context.memory
        if self.n_cells(slot_id) <= end or not self._remove(memory, slot_id, keep, end):
            self._clear(slot_id)
            return False
        self._add(memory, slot_id, end, -1, -discard)
        self._pending.add(slot_id)
        self._shifted.add(slot_id)
        return True

    def _assert_settled(self, *slot_ids: int) -> None:
        assert self._pending.isdisjoint(slot_ids), f"a copy or a shift of one of the slots {slot_ids} is queued"

    def _trim(self, slot_id: int, keep: int) -> bool:
        if keep == 0:
            self._clear(slot_id)
            return True
        n_cells = self.n_cells(slot_id)
        if n_cells == keep:
            return True
        # seq_rm says true even where a window's cells are gone, and the answer is then wrong: see `MemoryKind.reach`.
        reach, _ = self._kind.reach(n_cells, keep, (), self.oldest(slot_id))
        if reach == keep < n_cells and self._remove(self._context.memory, slot_id, keep, -1):
            return True
        self._clear(slot_id)
        return False

    def _swap(self, source: int, target: int) -> bool:
        self._assert_settled(source, target)
        self._chains[source], self._chains[target] = self._chains[target], self._chains[source]
        places = {source: target, target: source}
        shifted = {places.get(slot_id, slot_id) for slot_id in self._shifted}
        from_source, from_target = self._states.read(source), self._states.borrow(target)
        if from_source is None or from_target is None or not (self._restored(target, from_source) and self._restored(source, from_target)):
            self._clear(source)
            self._clear(target)
            return False
        self._shifted = shifted
        return True

    def _restored(self, slot_id: int, state: State | None) -> bool:
        """Whether the slot has this state and nothing else now; if not it is empty."""
        self._clear(slot_id)
        if state is None:
            return False
        if len(state) == 0 or self._states.write(slot_id, state):
            return True
        self._clear(slot_id)
        return False

    def _clear(self, slot_id: int) -> None:
        self._shifted.discard(slot_id)
        self._remove(self._context.memory, slot_id, -1, -1)
