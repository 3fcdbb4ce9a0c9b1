"""What parked sequences keep in host memory. The books only: the back end has the bytes."""

from runner.engine.costs import Rows, StepCosts
from runner.engine.sequence import Sequence


class HostMemory:
    """Bounded room for the cells of parked sequences."""

    def __init__(self, limit_bytes: int, cell_bytes: int, costs: StepCosts) -> None:
        """`cell_bytes`: K and V of one token over all layers."""
        self.limit_bytes, self._cell_bytes = limit_bytes, cell_bytes
        self._costs = costs
        self.used_bytes = 0

    def bytes_of(self, n_cells: int) -> int:
        """What so many cells take."""
        return n_cells * self._cell_bytes

    def keep(self, sequence: Sequence, n_cells: int) -> bool:
        """Keep its cells, where they fit and to copy them twice is faster than to compute them again."""
        n_bytes = self.bytes_of(n_cells)
        if not 0 < n_bytes <= self.limit_bytes - self.used_bytes or self._is_slower(n_cells, n_bytes):
            return False
        sequence.n_kept = n_cells
        self.used_bytes += n_bytes
        return True

    def lose(self, sequence: Sequence) -> None:
        """Its cells are here no more."""
        self.used_bytes -= self.bytes_of(sequence.n_kept)
        sequence.n_kept = 0

    def _is_slower(self, n_cells: int, n_bytes: int) -> bool:
        """While one of the two was never measured, copying is taken to be faster: it is, by far, on every machine we know."""
        move_s, compute_s = self._costs.move_s(2 * n_bytes), self._costs.prompt_s(Rows(n_cells, 1, n_cells))
        return move_s is not None and compute_s is not None and move_s > compute_s
