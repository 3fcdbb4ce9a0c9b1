"""llama.cpp's memory called directly, with no engine between: the facts that the engine rests on are tested on this."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.config import FlashAttn, ModelFile
from runner.llama.context import Context, ContextSize, Kernels
from runner.llama.library import Library
from runner.llama.model import Model

Logits = NDArray[np.float32]
State = ctypes.Array[ctypes.c_uint8]

WHOLE, PARTIAL = 0, 1


class LoadedModel:
    """A model, and its words. The library outlives all contexts: llama.cpp keeps its log callback."""

    def __init__(self, library: Library, path: Path) -> None:
        self.library = library
        self.model = Model(library, ModelFile(str(path), 0, path.stat().st_size), n_gpu_layers=0, devices=[])

    def tokens(self, n: int) -> list[int]:
        """`n` ordinary tokens, the same in each call and all different from their neighbours."""
        return [300 + i * 7919 % 5000 for i in range(n)]

    def slots(
        self, n_slots: int = 2, n_ctx_slot: int = 1024, n_batch: int = 512, *, flash_attn: FlashAttn = "auto", swa_full: bool = False
    ) -> "Slots":
        """A context."""
        return Slots(self, ContextSize(n_slots, n_ctx_slot, n_batch, 2, 2), Kernels(flash_attn, swa_full=swa_full))


class Slots:
    """A context's slots. As a context manager, frees it."""

    def __init__(self, loaded: LoadedModel, size: ContextSize, kernels: Kernels) -> None:
        self.api: Any = loaded.library.api
        self.n_slots, self._n_batch, self._n_vocab = size.n_slots, size.n_batch, loaded.model.vocabulary.n_tokens
        self._context = Context(loaded.library, loaded.model, size, kernels)
        self._batch = self.api.llama_batch_init(size.n_batch, 0, 1)

    def __enter__(self) -> "Slots":
        return self

    def __exit__(self, *_: object) -> None:
        self.api.llama_batch_free(self._batch)
        self._context.close()

    def feed(self, slot: int, tokens: Sequence[int], pos: int = 0) -> Logits:
        """Decode `tokens` from `pos` on in chunks of a batch; the logits behind the last."""
        for begin in range(0, len(tokens), self._n_batch):
            chunk = tokens[begin : begin + self._n_batch]
            assert self.decode(slot, chunk, pos + begin) == 0
        logits = self.api.llama_get_logits_ith(self._context.handle, -1)
        return np.ctypeslib.as_array(logits, (self._n_vocab,)).copy()

    def decode(self, slot: int, tokens: Sequence[int], pos: int) -> int:
        """One llama_decode, logits for the last token; its status."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos + i, 1, i == len(tokens) - 1
            batch.seq_id[i][0] = slot
        return int(self.api.llama_decode(self._context.handle, batch))

    def remove(self, slot: int, begin: int = -1, end: int = -1) -> bool:
        """seq_rm."""
        return bool(self.api.llama_memory_seq_rm(self._context.memory, slot, begin, end))

    def copy(self, source: int, target: int) -> None:
        """seq_cp of the full range."""
        self.api.llama_memory_seq_cp(self._context.memory, source, target, -1, -1)

    def shift(self, slot: int, begin: int, by: int) -> None:
        """seq_add from `begin` to the end."""
        self.api.llama_memory_seq_add(self._context.memory, slot, begin, -1, by)

    def can_shift(self) -> bool:
        """llama_memory_can_shift."""
        return bool(self.api.llama_memory_can_shift(self._context.memory))

    def span(self, slot: int) -> tuple[int, int]:
        """pos_min and pos_max."""
        memory = self._context.memory
        return int(self.api.llama_memory_seq_pos_min(memory, slot)), int(self.api.llama_memory_seq_pos_max(memory, slot))

    def size(self, slot: int, flags: int = WHOLE) -> int:
        """Bytes of the state."""
        return int(self.api.llama_state_seq_get_size_ext(self._context.handle, slot, flags))

    def save(self, slot: int, flags: int = WHOLE) -> State:
        """The state."""
        n_bytes = self.size(slot, flags)
        state = (ctypes.c_uint8 * n_bytes)()
        assert self.api.llama_state_seq_get_data_ext(self._context.handle, _pointer(state), n_bytes, slot, flags) == n_bytes
        return state

    def load(self, slot: int, state: State, flags: int = WHOLE) -> bool:
        """Put a state into a slot."""
        return bool(self.api.llama_state_seq_set_data_ext(self._context.handle, _pointer(state), len(state), slot, flags))


def distance(left: Logits, right: Logits) -> float:
    """The largest difference, in standard deviations of the logits."""
    return float(np.abs(left - right).max() / left.std())


def _pointer(state: State) -> Any:
    return ctypes.cast(state, ctypes.POINTER(ctypes.c_uint8))
