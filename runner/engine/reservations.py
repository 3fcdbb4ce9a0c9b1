"""Who may take cells from a pool that all slots share.

Room for a prompt and a little of its answer is reserved when a sequence gets its slot; what it needs beyond that, it takes as long as there
is some. When there is none, idle slots lose their cells, and then somebody is parked (`growth_victim`). It comes back when what it has and
four times as much headroom as before fit beside all others, or when nobody else runs.

    Somebody proceeds     of those who run all but one can be parked, and that one has the whole pool then.
    It does not thrash    from a return to the next park at least the headroom's cells were filled, and it grows with each park.
    Nobody starves        who was parked MAX_PARKS times is parked only for others who were too and came before: there is a first.
                          Who is next in the queue and does not fit is not overtaken, so it gets its turn when those who run have ended.
"""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

from runner.engine.cell_pool import CellPool
from runner.engine.following import Following
from runner.engine.preempt import MAX_PARKS
from runner.engine.sequence import Sequence
from runner.engine.slots import SlotPool

# Tokens of an answer for which there is room when its sequence is placed first.
HEADROOM: Final = 32
# Whenever it was parked, twice as many so many times.
DOUBLINGS: Final = 2


@dataclass(frozen=True, slots=True)
class Reservations:
    """Of all that run. `shares_cells`: who follows a leader's prompt will hold the same cells."""

    slots: SlotPool
    cells: CellPool
    following: Following
    shares_cells: bool

    def could_fit(self, sequence: Sequence) -> bool:
        """Whether it would if others had the cells of its whole prompt: False costs less to find than which have."""
        return self.fits(sequence, {}, n_shared=len(sequence.script))

    def fits(
        self, sequence: Sequence, keeps: Mapping[int, int], *, n_shared: int = 0, n_brought: int = 0, without: Collection[Sequence] = ()
    ) -> bool:
        """Whether it can be placed when idle slots keep nothing but the first `keeps` of their cells, by slot.

        `n_shared` of its first tokens lie in those or in cells of others, or will; `n_brought` are copied to cells of its own. `without`:
        as if those did not run.
        """
        running = [slot for slot in self.slots.slots if slot.sequence is not None and slot.sequence not in without]
        n_held = self.cells.n_held({slot.slot_id: len(slot.tokens) for slot in running} | dict(keeps))
        if not running:
            return n_held + n_brought <= self.cells.n_cells
        n_promised = sum(self._n_left(slot.sequence, len(slot.tokens)) for slot in running if slot.sequence is not None)
        return n_held + n_promised + max(n_brought, n_reserved(sequence) - n_shared) <= self.cells.n_cells

    def _n_left(self, sequence: Sequence, n_tokens: int) -> int:
        """Of what was reserved what it has not taken, and always one cell for the next token."""
        if self.shares_cells:
            n_tokens = max(n_tokens, self.following.n_awaited(sequence))
        return max(sequence.n_reserved - n_tokens, min(1, _n_whole(sequence) - n_tokens))


def n_reserved(sequence: Sequence) -> int:
    """Cells to reserve for a sequence that is placed: what must exist before it can go on, and headroom."""
    n_script = len(sequence.script)
    return n_script + min(HEADROOM << DOUBLINGS * sequence.n_parks, max(0, _n_whole(sequence) - n_script))


def growth_victim(running: Seq[Sequence]) -> Sequence:
    """Who is parked when the pool is full: of the lowest tier the last to have come, and of those parked too often the last of all."""
    return max(running, key=_dispensable)


def _dispensable(sequence: Sequence) -> tuple[bool, int, tuple[float, int]]:
    assert sequence.place is not None
    may_be_parked = sequence.n_parks < MAX_PARKS
    return may_be_parked, sequence.tier if may_be_parked else 0, sequence.place


def _n_whole(sequence: Sequence) -> int:
    """Cells of its prompt and its longest answer, whose last token needs none."""
    return len(sequence.prompt) + sequence.max_tokens - 1
