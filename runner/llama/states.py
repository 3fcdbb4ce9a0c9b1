"""States of slots in host memory: llama.cpp's own bytes, which nobody else understands."""

import ctypes
import mmap
from typing import Any, Final

from runner.llama.context import Context

State = ctypes.Array[ctypes.c_uint8]

# From this size on a buffer is a mapping of its own: freed, its memory goes back to the system at once, whole.
_LEAST_MAPPED: Final = 1 << 16


class States:
    """By id. A partial state is what cannot be cut out of cells later: a window's cells, a recurrent layer's state."""

    def __init__(self, api: Any, context: Context) -> None:
        self._api, self._context = api, context
        self._states: dict[int, State] = {}
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
        if self._api.llama_memory_seq_pos_max(self._context.memory, slot_id) < 0:
            return (ctypes.c_uint8 * 0)()
        n = self.size(slot_id, is_partial=is_partial)
        state = new_state(n)
        if state is None:
            return None
        flags = self._flags(is_partial=is_partial)
        written = self._api.llama_state_seq_get_data_ext(self._context.handle, state, n, slot_id, flags)
        return state if written == n else None

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
        return kind.from_buffer(mmap.mmap(-1, n_bytes)) if n_bytes >= _LEAST_MAPPED else kind()
    except (OSError, MemoryError, ValueError):
        return None
