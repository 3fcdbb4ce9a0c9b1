"""What a model's memory can do, and what a state of it weighs."""

from collections.abc import Iterable
from dataclasses import dataclass

from runner.engine.batch import Split
from runner.engine.cells import Mark


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """Bytes of K and V of one token: in the layers that attend to all before it, and in those that attend to the last `n_swa`.

    `fixed_bytes` is what a recurrent layer keeps, whatever the number of tokens. `slot_cells` is how many cells llama.cpp makes for a slot;
    0 `pool_cells`: each slot has its own, else all slots take theirs from so many (llama.cpp's `kv_unified`).
    """

    cell_bytes: int
    slot_cells: int
    window_cell_bytes: int = 0
    n_swa: int = 0
    fixed_bytes: int = 0
    can_be_cut: bool = True
    pool_cells: int = 0

    @property
    def is_unified(self) -> bool:
        """Whether all slots take their cells from one pool."""
        return self.pool_cells > 0

    @property
    def shares_cells(self) -> bool:
        """Whether several slots may hold the same cells: at once, and without a byte moved.

        Never those of a window: llama.cpp reuses its cells behind the window only where one slot alone holds them, and with none left
        the next batch has no room (llama-kv-cache-iswa.cpp; tests/llama/test_unified_contract.py).
        """
        return self.is_unified and self.n_swa == 0

    @property
    def split(self) -> Split:
        """What rows share a pass."""
        if not self.is_unified:
            return Split.ADJACENT
        return Split.SIMPLE if self.can_be_cut else Split.EQUAL

    @property
    def needs_marks(self) -> bool:
        """Whether cells cannot always be cut back to any position."""
        return self.n_swa > 0 or not self.can_be_cut

    @property
    def slot_bytes(self) -> int:
        """What a fork copies."""
        if self.shares_cells:
            return 0
        return self.slot_cells * (self.cell_bytes + self.window_cell_bytes) + self.fixed_bytes

    def state_bytes(self, n_tokens: int) -> int:
        """What the cells of so many tokens weigh in host memory."""
        return n_tokens * self.cell_bytes + self.mark_bytes(n_tokens)

    def mark_bytes(self, n_tokens: int) -> int:
        """What a checkpoint behind so many tokens weighs."""
        return min(n_tokens, self.n_swa) * self.window_cell_bytes + (self.fixed_bytes if n_tokens else 0)

    def oldest_saved(self, n_tokens: int) -> int:
        """The first position that a window still has after its cells were saved and loaded."""
        return max(0, n_tokens - self.n_swa) if self.n_swa else 0

    def reach(self, n_tokens: int, most: int, marks: Iterable[Mark], oldest: int) -> tuple[int, Mark | None]:
        """From where `n_tokens` cells can be continued, not behind `most`, and by which checkpoint; 0 where from nowhere.

        `oldest` is the first position that its window still has. seq_rm says true even where cells are gone that the next token attends
        to, and the answer is then wrong: continuing at `pos` needs all from `pos - n_swa + 1` on.
        """
        if most >= n_tokens:
            return n_tokens, None
        if self.can_be_cut and (self.n_swa == 0 or oldest <= max(0, most - self.n_swa + 1)):
            return most, None
        mark = max((mark for mark in marks if mark.pos <= most), key=lambda mark: mark.pos, default=None)
        return (mark.pos, mark) if mark is not None else (0, None)
