"""The real `Backend`: cells, decode and sampling through llama.cpp. Belongs to the decode thread."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from runner.engine.batch import BatchPlan, Outcome
from runner.engine.kv import Drop, KvOp, Park, Swap, Trim, Unpark
from runner.engine.sampling import SamplingParams
from runner.llama.batch import Batch
from runner.llama.context import Context, ContextSize
from runner.llama.library import Library
from runner.llama.model import Model
from runner.llama.sampler import build_chain

State = ctypes.Array[ctypes.c_uint8]


@dataclass(frozen=True, slots=True)
class _Parked:
    """A parked sequence's sampler chain, and its cells unless they are to be computed again."""

    chain: int
    cells: State | None


@dataclass(slots=True)
class NativeTime:
    """Seconds spent in native code since the start, by kind."""

    decode_s: float = 0.0
    sample_s: float = 0.0
    move_s: float = 0.0


class LlamaBackend:
    """N slots of one context."""

    def __init__(
        self, library: Library, model: Model, context: Context, size: ContextSize, *, on_gpu: bool, clock: Callable[[], float]
    ) -> None:
        self.native = NativeTime()
        self._api, self._clock = library.api, clock
        self._model, self._context, self._on_gpu = model, context, on_gpu
        self._batch = Batch(library.api, size.n_batch, size.n_slots)
        self._can_be_cut, self._n_swa = model.can_be_cut, model.n_swa
        self._chains: list[int] = [0] * size.n_slots
        self._parked: dict[str, _Parked] = {}
        self._outputs: list[tuple[int, int]] = []
        pointer, int32 = ctypes.c_void_p, ctypes.c_int32
        self._sample = library.hold("llama_sampler_sample", int32, pointer, pointer, int32)
        self._accept = library.hold("llama_sampler_accept", None, pointer, int32)
        self._free_chain = library.hold("llama_sampler_free", None, pointer)
        self._remove = library.hold("llama_memory_seq_rm", ctypes.c_bool, pointer, int32, int32, int32)
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
        match status:
            case 0:
                return Outcome.DONE
            case 1:
                return Outcome.NO_ROOM
            case -1:
                return Outcome.INVALID
        if not self._can_be_cut:
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

    def close(self) -> None:
        """Free the chains."""
        for chain in filter(None, [*self._chains, *(parked.chain for parked in self._parked.values())]):
            self._free_chain(chain)
        self._chains = [0] * len(self._chains)
        self._parked.clear()

    def _apply(self, op: KvOp) -> bool:
        match op:
            case Trim(slot_id, keep):
                return self._trim(slot_id, keep)
            case Swap(source, target):
                return self._swap(source, target)
            case Park(slot_id, ticket, keeps_cells):
                return self._park(slot_id, ticket, keeps_cells=keeps_cells)
            case Unpark(ticket, slot_id, has_cells):
                return self._unpark(ticket, slot_id, has_cells=has_cells)
            case Drop(ticket):
                self._free_chain(self._parked.pop(ticket).chain)
                return True

    def _park(self, slot_id: int, ticket: str, *, keeps_cells: bool) -> bool:
        cells = self._save(slot_id) if keeps_cells else None
        self._parked[ticket] = _Parked(self._chains[slot_id], cells)
        self._chains[slot_id] = 0
        return cells is not None or not keeps_cells

    def _unpark(self, ticket: str, slot_id: int, *, has_cells: bool) -> bool:
        parked = self._parked.pop(ticket)
        if self._chains[slot_id]:
            self._free_chain(self._chains[slot_id])
        self._chains[slot_id] = parked.chain
        if not has_cells:
            return True
        assert parked.cells is not None
        if self._restore(slot_id, parked.cells):
            return True
        self._clear(slot_id)
        return False

    def _trim(self, slot_id: int, keep: int) -> bool:
        if keep == 0:
            self._clear(slot_id)
            return True
        if self.n_cells(slot_id) == keep:
            return True
        can_continue = self._can_be_cut and self._holds_window(slot_id, keep)
        if can_continue and self._remove(self._context.memory, slot_id, keep, -1):
            return True
        self._clear(slot_id)
        return False

    def _holds_window(self, slot_id: int, keep: int) -> bool:
        """Whether a sliding-window cache still has every cell that the token at `keep` attends to.

        seq_rm says true even when they are gone, and the answer is then wrong (design: section 4).
        """
        n_swa = self._n_swa
        if n_swa == 0:
            return True
        oldest = int(self._pos_min(self._context.memory, slot_id))
        return oldest == 0 or oldest < max(0, keep - n_swa)

    def _swap(self, source: int, target: int) -> bool:
        self._chains[source], self._chains[target] = self._chains[target], self._chains[source]
        from_source, from_target = self._save(source), self._save(target)
        if from_source is None or from_target is None or not (self._restore(target, from_source) and self._restore(source, from_target)):
            self._clear(source)
            self._clear(target)
            return False
        return True

    def _save(self, slot_id: int) -> State | None:
        """The slot's state, an empty array for an empty slot, None where llama.cpp could not save it."""
        if self.n_cells(slot_id) == 0:
            return (ctypes.c_uint8 * 0)()
        n = self._api.llama_state_seq_get_size(self._context.handle, slot_id)
        buffer = (ctypes.c_uint8 * n)()
        written = self._api.llama_state_seq_get_data(self._context.handle, buffer, n, slot_id)
        return buffer if written == n else None

    def _restore(self, slot_id: int, buffer: State) -> bool:
        self._clear(slot_id)
        if len(buffer) == 0:
            return True
        return bool(self._api.llama_state_seq_set_data(self._context.handle, buffer, len(buffer), slot_id))

    def _clear(self, slot_id: int) -> None:
        self._remove(self._context.memory, slot_id, -1, -1)
