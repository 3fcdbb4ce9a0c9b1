"""What lies in host memory: cells of parked sequences, of conversations whose slot went to others, and checkpoints. The books only."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

from runner.engine.cells import HostCells, Mark
from runner.engine.sequence import Sequence

# A token that was not used for so long is half as likely to be wanted again.
HALF_LIFE_S: Final = 600.0
# Who gave its conversation a name will come back: as if it had been used so much later.
NAMED_BONUS_S: Final = 1200.0


class HostMemory:
    """Bounded room. Ids of states and checkpoints are given out here, each once."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        # Of cells, and of checkpoints of slots.
        self.used_bytes = 0
        self._states: dict[int, HostCells] = {}
        self._owned: dict[str, HostCells] = {}
        # How many cells each checkpoint is of use to.
        self._n_holders: Counter[int] = Counter()
        self._n_ids = 0

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[HostCells]:
        """In the order in which they came."""
        return iter(self._states.values())

    @property
    def owned_bytes(self) -> int:
        """Of parked sequences."""
        return sum(cells.n_bytes for cells in self._owned.values())

    def get(self, state_id: int) -> HostCells | None:
        """None where it is not here."""
        return self._states.get(state_id)

    def of(self, owner: Sequence) -> HostCells:
        """Those of a parked sequence that has some."""
        return self._owned[owner.request_id]

    def new_id(self) -> int:
        """Of a state or checkpoint."""
        self._n_ids += 1
        return self._n_ids

    def could_hold(self, n_bytes: int) -> bool:
        """Whether so many bytes would fit if nothing else were here."""
        return n_bytes <= self.limit_bytes

    def room_for(self, n_bytes: int, worth: float = math.inf) -> list[HostCells] | None:
        """Those to be given up for so many bytes, each worth less than `worth`; None where they do not fit."""
        missing = self.used_bytes + n_bytes - self.limit_bytes
        if missing <= 0:
            return []
        given_up = []
        for cells in sorted((cells for cells in self if cells.may_go and cells.worth < worth), key=_worth):
            given_up.append(cells)
            missing -= cells.n_bytes
            if missing <= 0:
                return given_up
        return None

    def put(self, cells: HostCells) -> None:
        """Take it in; there is room."""
        self.used_bytes += cells.n_bytes
        self._states[cells.state_id] = cells
        if cells.owner is not None:
            self._owned[cells.owner.request_id] = cells

    def remove(self, cells: HostCells) -> None:
        """It is here no more."""
        del self._states[cells.state_id]
        if cells.owner is not None:
            del self._owned[cells.owner.request_id]
        self.used_bytes -= cells.n_bytes

    def hold(self, mark: Mark) -> None:
        """One more has use for a checkpoint."""
        self.used_bytes += 0 if self._n_holders[mark.state_id] else mark.n_bytes
        self._n_holders[mark.state_id] += 1

    def let_go(self, mark: Mark) -> bool:
        """One less has. Returns whether it was the last."""
        self._n_holders[mark.state_id] -= 1
        if self._n_holders[mark.state_id]:
            return False
        del self._n_holders[mark.state_id]
        self.used_bytes -= mark.n_bytes
        return True


def worth_of(cells: HostCells) -> float:
    """By tokens saved per byte, halved with each half-life of age; on a scale on which what is worth less stays so."""
    per_byte = math.log2(max(1, len(cells.tokens)) / max(1, cells.n_bytes))
    return per_byte + (cells.used_at + (NAMED_BONUS_S if cells.session else 0.0)) / HALF_LIFE_S


def _worth(cells: HostCells) -> float:
    return cells.worth
