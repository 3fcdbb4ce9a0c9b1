"""States of slots in host memory: llama.cpp's own bytes, which nobody else understands."""

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any, Final

from runner.llama.context import Context

State = ctypes.Array[ctypes.c_uint8]

# Of each cell in a state: its position, the number of its sequences and their ids (llama_kv_cache::state_write_meta).
STATE_CELL_BYTES: Final = 12
# The buffer of copies between slots: to write into memory that is there takes a twelfth of the time that new memory does (docs/log.md).
_MOST_SCRATCH: Final = 32 << 20
# From this size on a buffer is a mapping of its own: freed, its memory goes back to the system at once, whole.
_LEAST_MAPPED: Final = 1 << 16


class States:
    """By id. A partial state is what cannot be cut out of cells later: a window's cells, a recurrent layer's state."""

    def __init__(self, api: Any, context: Context) -> None:
        self._api, self._context = api, context
        self._states: dict[int, State] = {}
        self._scratch: State | None = None
        self._partial = int(api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def get(self, state_id: int) -> State | None:
        """None where it was never saved."""
        return self._states.get(state_id)

    def save(self, state_id: int, slot_id: int, *, is_partial: bool = False) -> bool:
        """Keep the slot's state under an id. False where llama.cpp could not, or there is no memory."""
        state = self.read(slot_id, is_partial=is_partial)
        if state is not None:
            self._states[state_id] = state
        return state is not None

    def put(self, state_id: int, state: State) -> None:
        """Keep one that was read elsewhere."""
        self._states[state_id] = state

    def forget(self, state_id: int) -> None:
        """Where it was kept."""
        self._states.pop(state_id, None)

    def clear(self) -> None:
        """Forget all."""
        self._states.clear()

    def size(self, slot_id: int, *, is_partial: bool = False) -> int:
        """In bytes."""
        return int(self._api.llama_state_seq_get_size_ext(self._context.handle, slot_id, self._flags(is_partial=is_partial)))

    def read(self, slot_id: int, *, is_partial: bool = False) -> State | None:
        """The slot's state, an empty array for an empty slot, None where llama.cpp could not give it."""
        return self._read(slot_id, is_partial=is_partial, into=new_state)

    def borrow(self, slot_id: int) -> State | None:
        """The same, until the next call: it may be overwritten then."""
        return self._read(slot_id, is_partial=False, into=self._scratch_of)

    def probe(self, slot_id: int, token: int) -> int:
        """What the part of a state that does not depend on the number of tokens weighs; the slot is empty before and after."""
        tokens = (ctypes.c_int32 * 1)(token)
        if self._api.llama_decode(self._context.handle, self._api.llama_batch_get_one(tokens, 1)) != 0:
            return 0
        n_bytes = self.size(slot_id, is_partial=True)
        self._api.llama_memory_seq_rm(self._context.memory, slot_id, -1, -1)
        return n_bytes

    def _read(self, slot_id: int, *, is_partial: bool, into: Callable[[int], State | None]) -> State | None:
        if self._api.llama_memory_seq_pos_max(self._context.memory, slot_id) < 0:
            return (ctypes.c_uint8 * 0)()
        n = self.size(slot_id, is_partial=is_partial)
        state = into(n)
        if state is None:
            return None
        flags = self._flags(is_partial=is_partial)
        written = self._api.llama_state_seq_get_data_ext(self._context.handle, state, n, slot_id, flags)
        return state if written == n else None

    def _scratch_of(self, n_bytes: int) -> State | None:
        if n_bytes > _MOST_SCRATCH:
            return new_state(n_bytes)
        if self._scratch is None or len(self._scratch) < n_bytes:
            self._scratch = new_state(n_bytes)
        if self._scratch is None:
            return None
        return (ctypes.c_uint8 * n_bytes).from_buffer(self._scratch)

    def write(self, slot_id: int, state: State, *, is_partial: bool = False) -> bool:
        """Whether llama.cpp took it. What the slot had must be gone before, but for a partial state."""
        flags = self._flags(is_partial=is_partial)
        return bool(self._api.llama_state_seq_set_data_ext(self._context.handle, state, len(state), slot_id, flags))

    def _flags(self, *, is_partial: bool) -> int:
        return self._partial if is_partial else 0


def new_state(n_bytes: int) -> State | None:
    """A buffer of exactly this size; None where there is no memory."""
    kind = ctypes.c_uint8 * n_bytes
    try:
        return kind.from_buffer(_mapping(n_bytes)) if n_bytes >= _LEAST_MAPPED else kind()
    except (OSError, MemoryError, ValueError):
        return None


def _mapping(n_bytes: int) -> mmap.mmap:
    """Private: shared pages, which are the default, take half as long again to come (docs/log.md)."""
    if sys.platform == "win32":
        return mmap.mmap(-1, n_bytes)
    return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
