"""Which slot a sequence should get, and where the cells of its first tokens come from.

    in place     cells of the same beginning lie in a free slot         what is behind them is cut off
    copied       they lie in another slot, a busy one too               through llama.cpp's own copy, or through host memory: fewer bytes
    shared       the same, where all slots take cells from one pool     no byte is moved
    loaded       they lie in host memory
    from nothing

All are weighed in tokens to compute: those that are left, those that the bytes to move would have been, and those that others lose.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Final

from runner.engine.batch import Split
from runner.engine.cells import Cells, HostCells, Mark, Slot
from runner.engine.costs import StepCosts
from runner.engine.host_memory import HostMemory
from runner.engine.memory_kind import MemoryKind
from runner.engine.prefix import n_shared
from runner.engine.prefix_index import BLOCK, PrefixIndex
from runner.engine.sequence import Sequence
from runner.engine.slots import SlotPool

# A cached token is worth this share of a token that must be computed now: its owner may come back, the newcomer is here.
CACHED_TOKEN_WORTH: Final = 0.25
# After so long without use it is half as likely that its owner comes back, after twice as long a third, and so on.
RETURN_S: Final = 120.0
# What a slot away from the busy ones costs, in computed tokens: until it is moved, each decode step needs one more pass.
APART_COST: Final = 8.0
# Fewer tokens are not worth a copy in host memory, nor are those that take no longer to be computed again.
LEAST_SAVED: Final = 32
LEAST_SAVED_S: Final = 0.2
# To move a cell costs this share of computing it, until both were measured: by far less on every machine we know.
MOVED_CELL_COST: Final = 0.004
# So many of those that share most are looked at.
_MOST_MATCHES: Final = 8


@dataclass(frozen=True, slots=True)
class Source:
    """Cells that the first `keep` come from, by a checkpoint where there is one.

    `is_fork`: by llama.cpp's own copy of a whole slot, or, where slots share cells, by holding the same ones.
    """

    cells: Cells
    keep: int
    mark: Mark | None
    n_bytes: int
    is_fork: bool = False
    shares_cells: bool = False

    @property
    def n_brought(self) -> int:
        """Cells that the target needs for it, the ones behind `keep` among them until they are cut off."""
        return 0 if self.shares_cells else len(self.cells.tokens)


@dataclass(frozen=True, slots=True)
class Way:
    """A slot, what it gets its first `keep` cells from (None: from its own), and whether what it loses is saved first.

    `cost` is in tokens to compute; `n_bytes` are moved in all, those of a fork, which moves them at the next decode, among them.
    """

    cost: float
    target: Slot
    keep: int = 0
    mark: Mark | None = None
    source: Source | None = None
    saves: bool = False
    n_bytes: int = 0

    @property
    def rank(self) -> tuple[float, float, int]:
        """The lowest is best; of equals the slot that was of no use for the longest time."""
        return self.cost, self.target.used_at, self.target.slot_id


class Placer:
    """Weighs. Changes nothing."""

    def __init__(
        self,
        pool: SlotPool,
        index: PrefixIndex[Cells],
        host: HostMemory,
        kind: MemoryKind,
        costs: StepCosts,
        oldest: Callable[[int], int],
    ) -> None:
        """`oldest` says of a slot which position is the first that its sliding window still has."""
        self.least_saved_s = LEAST_SAVED_S
        self._pool, self._index, self._host = pool, index, host
        self._kind, self._costs, self._oldest = kind, costs, oldest

    def matches(self, sequence: Sequence) -> list[tuple[Cells, int]]:
        """Whose tokens begin like its own, and how many do: of those that are there and those that are being computed."""
        return list(self._index.matches(sequence.script, sequence.domain, _MOST_MATCHES))

    def way_for(
        self, sequence: Sequence, matches: Seq[tuple[Cells, int]], now: float, fits: Callable[[Way], bool], *, copies: bool = True
    ) -> Way | None:
        """The best way into a free slot of those that fit; without `copies` with what a slot has itself."""
        ways = self._own_ways(sequence, matches, now)
        if copies:
            ways += self._copied_ways(sequence, matches, now)
        return next(filter(fits, sorted(ways, key=_rank)), None)

    def sources(self, matches: Iterable[tuple[Cells, int]], most: int) -> Iterator[Source]:
        """Of the matches those whose first cells, `most` at most, can be copied or loaded."""
        kind = self._kind
        for cells, n in matches:
            n_tokens = len(cells.tokens)
            n = min(n, n_tokens, most)
            keep, mark = kind.reach(n_tokens, n, cells.marks, kind.oldest_saved(n_tokens))
            if isinstance(cells, HostCells) and keep:
                yield Source(cells, keep, mark, cells.n_bytes)
            if not isinstance(cells, Slot):
                continue
            if not (cells.is_pending or kind.shares_cells) and keep:
                yield Source(cells, keep, mark, 2 * kind.state_bytes(n_tokens))
            keep, mark = kind.reach(n_tokens, n, (), self._oldest(cells.slot_id))
            if keep and kind.shares_cells:
                yield Source(cells, keep, mark, 0, is_fork=True, shares_cells=True)
            elif keep and not kind.is_unified:
                yield Source(cells, keep, mark, kind.slot_bytes, is_fork=True)

    def best_source(self, sources: Iterable[Source]) -> Source | None:
        """The one that leaves least to do."""
        return min(sources, key=lambda source: self.tokens_of(source.n_bytes) - source.keep, default=None)

    def tokens_of(self, n_bytes: int) -> float:
        """How many tokens could be computed in the time that it takes to move so many bytes."""
        move_s, row_s = self._costs.move_s(n_bytes), self._costs.prompt_row_s()
        if move_s is not None and row_s:
            return move_s / row_s
        kind = self._kind
        return MOVED_CELL_COST * n_bytes / max(1, kind.cell_bytes + kind.window_cell_bytes + kind.fixed_bytes)

    def _own_ways(self, sequence: Sequence, matches: Seq[tuple[Cells, int]], now: float) -> list[Way]:
        n_found = {id(cells): n for cells, n in matches}
        most = most_kept(sequence)
        ways = []
        for slot in self._pool.slots:
            if not slot.is_free:
                continue
            keep, mark = 0, None
            if sequence.cache_prompt and slot.domain == sequence.domain:
                n = n_found.get(id(slot))
                # Those that share too little for the index are compared.
                n = n_shared(slot.tokens[:BLOCK], sequence.script[:BLOCK]) if n is None else min(n, len(slot.tokens))
                keep, mark = self._kind.reach(len(slot.tokens), min(n, most), slot.marks, self._oldest(slot.slot_id))
            ways.append(self._emptied(sequence, slot, keep, mark, now))
        return ways

    def _copied_ways(self, sequence: Sequence, matches: Seq[tuple[Cells, int]], now: float) -> Iterator[Way]:
        free = [self._emptied(sequence, slot, 0, None, now) for slot in self._pool.slots if slot.is_free and not slot.is_pending]
        targets = sorted(free, key=_rank)[:2]
        for source in self.sources(matches, most_kept(sequence)):
            for way in targets:
                if way.target is not source.cells:
                    cost = way.cost - source.keep + self.tokens_of(source.n_bytes)
                    yield replace(way, cost=cost, keep=source.keep, mark=source.mark, source=source, n_bytes=way.n_bytes + source.n_bytes)
                    break

    def _emptied(self, sequence: Sequence, slot: Slot, keep: int, mark: Mark | None, now: float) -> Way:
        """With what is behind the first `keep` cells of its own gone."""
        if mark is not None and slot.is_pending:
            keep, mark = 0, None
        lost, saves = self.loss(slot, keep, now)
        is_apart = self._kind.split is Split.ADJACENT and not (self._pool.is_idle or self._pool.joins_a_run(slot))
        apart = APART_COST if is_apart else 0.0
        n_bytes = self._kind.state_bytes(len(slot.tokens)) if saves else 0
        return Way(len(sequence.script) - keep + lost + apart, slot, keep, mark, None, saves, n_bytes)

    def loss(self, slot: Slot, keep: int, now: float) -> tuple[float, bool]:
        """What it costs others, and whether what the slot has is better saved first."""
        n_lost = len(slot.tokens) - keep
        if n_lost <= 0:
            return 0.0, False
        n_unique = self._index.n_unique(slot, most=n_lost)
        worth = n_unique / (1.0 + max(0.0, now - slot.used_at) / RETURN_S)
        if n_unique >= LEAST_SAVED and n_unique * (self._costs.prompt_row_s() or math.inf) >= self.least_saved_s and not slot.is_pending:
            n_bytes = self._kind.state_bytes(len(slot.tokens))
            copied = self.tokens_of(2 * n_bytes)
            if copied < worth and self._host.could_hold(n_bytes):
                return min(copied, CACHED_TOKEN_WORTH * worth), True
        return CACHED_TOKEN_WORTH * worth, False


def most_kept(sequence: Sequence) -> int:
    """Of its script: the last prompt token is always decoded again, for its logits seed the first sample."""
    return len(sequence.script) - (sequence.pending is None)


def _rank(way: Way) -> tuple[float, float, int]:
    return way.rank
