"""A BatchPlan as a llama_batch: arrays made once and refilled each step."""

import ctypes
from typing import Any

from runner.engine.batch import BatchPlan


class Batch:
    """Room for `n_batch` rows over `n_slots` slots. `fill` writes a plan and returns the struct that llama_decode takes."""

    def __init__(self, api: Any, n_batch: int, n_slots: int) -> None:
        self._n_batch, self._n_slots = n_batch, n_slots
        self._tokens = (ctypes.c_int32 * n_batch)()
        self._positions = (ctypes.c_int32 * n_batch)()
        self._n_seq_ids = (ctypes.c_int32 * n_batch)(*([1] * n_batch))
        self._wants_logits = (ctypes.c_int8 * n_batch)()
        # llama_batch has an array of sequence ids a row; ours has one id a row, so rows of a slot point to the same cell.
        self._slot_ids = (ctypes.c_int32 * n_slots)(*range(n_slots))
        base = ctypes.addressof(self._slot_ids)
        self._addresses = [base + i * ctypes.sizeof(ctypes.c_int32) for i in range(n_slots)]
        self._seq_ids = (ctypes.c_size_t * n_batch)()
        struct = api.llama_batch()
        fields = {name: kind for name, kind in api.llama_batch._fields_}  # noqa: C416 - ctypes' own public attribute
        struct.token = ctypes.cast(self._tokens, fields["token"])
        struct.pos = ctypes.cast(self._positions, fields["pos"])
        struct.n_seq_id = ctypes.cast(self._n_seq_ids, fields["n_seq_id"])
        struct.seq_id = ctypes.cast(self._seq_ids, fields["seq_id"])
        struct.logits = ctypes.cast(self._wants_logits, fields["logits"])
        self._struct = struct

    def fill(self, plan: BatchPlan) -> tuple[Any, list[tuple[int, int]]]:
        """Write the rows. Returns the llama_batch and (slot id, row) of each row with logits.

        llama.cpp aborts the process on more rows than `n_batch` or a sequence id out of range: asserted here.
        """
        row, outputs = 0, []
        for chunk in plan.chunks:
            end = row + len(chunk.tokens)
            assert end <= self._n_batch, f"{end} rows for a batch of {self._n_batch}"
            assert 0 <= chunk.slot_id < self._n_slots
            assert chunk.pos >= 0
            if end == row + 1:
                self._tokens[row], self._positions[row] = chunk.tokens[0], chunk.pos
                self._seq_ids[row], self._wants_logits[row] = self._addresses[chunk.slot_id], int(chunk.has_logits)
            else:
                self._tokens[row:end] = list(chunk.tokens)
                self._positions[row:end] = list(range(chunk.pos, chunk.pos + end - row))
                self._seq_ids[row:end] = [self._addresses[chunk.slot_id]] * (end - row)
                self._wants_logits[row:end] = [0] * (end - row)
                self._wants_logits[end - 1] = int(chunk.has_logits)
            if chunk.has_logits:
                outputs.append((chunk.slot_id, end - 1))
            row = end
        self._struct.n_tokens = row
        return self._struct, outputs
