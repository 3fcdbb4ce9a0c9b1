"""Whether a slot's cells are what its token list says, by what llama.cpp itself says of them."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from runner.engine.memory_kind import MemoryKind


@dataclass(frozen=True, slots=True)
class Observed:
    """Of one slot: the positions of its oldest and its newest cell (-1: none), bytes of its state and of the part that cannot be cut."""

    pos_min: int
    pos_max: int
    n_bytes: int
    n_partial_bytes: int


@dataclass(slots=True)
class _Line:
    """Bytes are a header and so many a cell: learned from the first two sizes that are not of the same number of cells."""

    first: tuple[int, int] | None = None
    per_cell: float | None = None

    def fits(self, n_cells: int, n_bytes: int) -> bool:
        """Whether a further size lies where the first two say."""
        if self.first is None:
            self.first = n_cells, n_bytes
        n_first, first_bytes = self.first
        if n_cells == n_first:
            return n_bytes == first_bytes
        per_cell = (n_bytes - first_bytes) / (n_cells - n_first)
        if self.per_cell is None:
            self.per_cell = per_cell
        return per_cell == self.per_cell


@dataclass(slots=True)
class Invariants:
    """What must hold of every slot between two steps.

    The newest position is the last token's; the oldest is the first token's, or not behind the window's begin, or the only one of a
    recurrent state; and the state weighs a header and so many bytes a cell.
    """

    kind: MemoryKind
    _lines: dict[Hashable, _Line] = field(default_factory=dict)

    def broken(self, n_tokens: int, slot: Observed, *, is_shifted: bool = False) -> str | None:
        """The first that does not hold, as a sentence; None where all do.

        Of a shifted window only the number of tokens counts: what it had lost of the first ones may lie in it now, as a hole.
        """
        if slot.pos_max + 1 != n_tokens:
            return f"the slot has {slot.pos_max + 1} cells, its tokens are {n_tokens}"
        if n_tokens == 0 or (is_shifted and self.kind.n_swa):
            return None
        latest = self._latest_oldest(n_tokens)
        if not 0 <= slot.pos_min <= latest:
            return f"the oldest of {n_tokens} cells is at {slot.pos_min}, and must not be behind {latest}"
        n_base = slot.n_bytes - (slot.n_partial_bytes if self.kind.needs_marks else 0)
        if not self._line("cells").fits(n_tokens, n_base):
            return f"the state of {n_tokens} cells weighs {n_base} bytes, which others do not"
        n_window = n_tokens - max(slot.pos_min, self.kind.oldest_saved(n_tokens)) if self.kind.n_swa else 0
        if self.kind.needs_marks and not self._line("partial").fits(n_window, slot.n_partial_bytes):
            return f"the part of a state that cannot be cut weighs {slot.n_partial_bytes} bytes, which others do not"
        return None

    def _latest_oldest(self, n_tokens: int) -> int:
        if not self.kind.can_be_cut:
            return n_tokens - 1
        return self.kind.oldest_saved(n_tokens)

    def _line(self, part: str) -> _Line:
        return self._lines.setdefault(part, _Line())
