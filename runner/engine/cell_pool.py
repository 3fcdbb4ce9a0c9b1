"""How many cells are used where all slots take theirs from one pool. A cell that several slots share counts once.

    run     consecutive positions whose cells one slot made; slots hold it up to an end of their own
    slot 0  0 ------ 200 ------ 310
    slot 1  0 ------ 200                    the same cells
                         200 ------ 290     its own run, for those behind position 200 are slot 0's

A cell is free again when the last slot that holds it lets it go: each run takes as many as the furthest of its holders has.
"""

from collections.abc import Mapping


class _Run:
    """Cells from `start` on; `ends` has the end of each slot that holds some."""

    __slots__ = ("ends", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.ends: dict[int, int] = {}

    @property
    def end(self) -> int:
        return max(self.ends.values(), default=self.start)


class CellPool:
    """The books of `n_cells` cells. Pure numbers: which tokens lie in them is `KvMemory`'s to know."""

    def __init__(self, n_slots: int, n_cells: int) -> None:
        self.n_cells = n_cells
        self.n_used = 0
        self._runs: list[list[_Run]] = [[] for _ in range(n_slots)]

    @property
    def n_free(self) -> int:
        """Cells that nobody holds."""
        return self.n_cells - self.n_used

    def n_held(self, keeps: Mapping[int, int]) -> int:
        """How many cells would be used if each of these slots held so many of its first ones, or all it has, and the others none."""
        ends: dict[_Run, int] = {}
        for slot_id, keep in keeps.items():
            for run in self._runs[slot_id]:
                ends[run] = max(ends.get(run, run.start), min(run.ends[slot_id], keep))
        return sum(end - run.start for run, end in ends.items())

    def extend(self, slot_id: int, n: int) -> None:
        """The slot has got `n` cells more, which nobody else holds."""
        runs = self._runs[slot_id]
        end = runs[-1].ends[slot_id] if runs else 0
        if not runs or runs[-1].end > end:
            runs.append(_Run(end))
        runs[-1].ends[slot_id] = end + n
        self.n_used += n

    def cut(self, slot_id: int, keep: int) -> None:
        """The slot holds its first `keep` cells only, or all it has."""
        runs = self._runs[slot_id]
        while runs and runs[-1].ends[slot_id] > keep:
            run = runs[-1]
            before = run.end
            if keep > run.start:
                run.ends[slot_id] = keep
            else:
                del run.ends[slot_id]
                runs.pop()
            self.n_used -= before - run.end

    def share(self, source: int, target: int, keep: int) -> None:
        """The target holds the first `keep` cells of the source, and no others."""
        self.cut(target, 0)
        for run in self._runs[source]:
            if run.start >= keep:
                break
            run.ends[target] = min(run.ends[source], keep)
            self._runs[target].append(run)
