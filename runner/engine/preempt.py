"""Who gives up a slot for whom. Only asked while no slot is free and somebody waits."""

from collections import Counter
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

from runner.engine.lifecycle import State
from runner.engine.sequence import Sequence

# So often a request may be parked; after that it keeps its slot.
MAX_PARKS: Final = 4
# Of a client that has requests waiting which never had a slot, a slot is asked back after this part of the grace: it loses none of its
# pace, only the order of its own requests changes.
BACKLOG_GRACE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Preemption:
    """The rules of one scheduler.

    `share_grace_s` is how long a client below its share of the slots waits before one above its own gives a slot back; None: for
    ever. `charged` says what a sequence's client has on its account, `has_backlog` whether it has requests waiting that never had a slot.
    """

    across_tiers: bool
    share_grace_s: float | None
    charged: Callable[[Sequence], float]
    has_backlog: Callable[[Sequence], bool]

    def victim_for(self, first: Sequence, running: Seq[Sequence], now: float, *, spared: Container[Sequence] = ()) -> Sequence | None:
        """Of a lower tier than `first` the lowest, and of a client over its share where `first` has waited out the grace; None: nobody.

        Among equals the one with the fewest cells: that is what parking costs. `spared` have only just got their slots.
        """
        parkable = [sequence for sequence in running if sequence.n_parks < MAX_PARKS and sequence not in spared]
        lower = [sequence for sequence in parkable if sequence.tier > first.tier] if self.across_tiers else []
        if lower:
            return min(lower, key=lambda sequence: (-sequence.tier, _n_cells(sequence)))
        since = first.times.parked_at if first.state is State.PARKED else first.times.prepared_at
        if self.share_grace_s is None or now - since < BACKLOG_GRACE * self.share_grace_s:
            return None
        if now - since < self.share_grace_s:
            parkable = [sequence for sequence in parkable if self.has_backlog(sequence)]
        return self._of_client_over_share(first, parkable, running)

    def _of_client_over_share(self, first: Sequence, parkable: list[Sequence], running: Seq[Sequence]) -> Sequence | None:
        """One slot changes hands where its old owner was charged more, and still has more slots, by weight, than the new one then."""
        held = Counter(sequence.owner.client for sequence in running if sequence.tier == first.tier)
        enough = (held[first.owner.client] + 1) / first.owner.weight
        over = [s for s in parkable if s.tier == first.tier and held[s.owner.client] / s.owner.weight > enough]
        over = [s for s in over if self.charged(s) > self.charged(first)]
        return min(over, key=lambda s: (-held[s.owner.client] / s.owner.weight, _n_cells(s)), default=None)


def _n_cells(sequence: Sequence) -> int:
    """About; a prompt counts whole, computed or not."""
    return len(sequence.prompt) + sequence.n_generated
