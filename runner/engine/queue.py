"""Who gets the next slot. No operation looks at all who wait: 100,000 of them cost a step no more than ten.

    tier        high before normal before low before batch, but whoever has waited long enough goes first (`order.SLACK_S`)
    client      within a tier the one that was charged least for what was computed for it, by weight
    part        within a client the same again
    arrival     within a part

What waits lies in heaps by key; an entry that was taken or removed stays there until it comes to the top.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from runner.config import PolicyName
from runner.engine.gate import Gate
from runner.engine.line import Line
from runner.engine.order import Tier
from runner.engine.places import aged_place, place_of
from runner.engine.policies import POLICIES, Given, by_share, first_come
from runner.engine.sequence import Sequence

# Beyond so many nobody is told a place: to know it, all who wait must be looked at.
MAX_PREVIEW: Final = 1024
# What one more request's cost counts in the mean.
_NEW_SHARE: Final = 0.1


class WaitingQueue:
    """All sequences without a slot: new ones, and parked ones under the key of their arrival."""

    def __init__(self, policy: PolicyName = "fair", *, max_running_per_client: int = 0) -> None:
        """`max_running_per_client` 0: no limit."""
        self._lines = tuple(Line[Sequence](tier) for tier in Tier)
        self._choose = POLICIES[policy]
        self._gate = Gate(max_running_per_client)
        self._waiting: dict[str, Sequence] = {}
        # By tier and client: those waiting that never had a slot.
        self._n_new: Counter[tuple[Tier, str]] = Counter()
        self._given = Given()
        self._n_pushed = 0
        self._mean_cost = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._waiting.values())

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait. Its place is fixed when it is pushed first."""
        assert sequence.request_id not in self._waiting
        self._n_new[_account(sequence)] += sequence.n_parks == 0
        if sequence.place is None:
            self._n_pushed += 1
            sequence.place = (sequence.times.arrived_at, self._n_pushed)
        self._waiting[sequence.request_id] = sequence
        if self._gate.lets(sequence):
            self._lines[sequence.tier].push(sequence, is_parked=sequence.n_parks > 0)

    def peek(self) -> Sequence | None:
        """Who gets the next free slot; None where nobody waits, or all are held back by their clients' limits."""
        return self._choose(self._lines, self._given)

    def claimant(self) -> Sequence | None:
        """Who may ask for the slot of another: whoever is next by right, not because it was parked long ago."""
        return self._choose(self._lines, self._given._replace(since_parked=0))

    def take(self, sequence: Sequence) -> None:
        """The sequence got a slot."""
        self._forget(sequence)
        is_best = all(line.is_empty for line in self._lines[: sequence.tier])
        since_aged, since_parked = self._given
        self._given = Given(since_aged + 1 if is_best else 0, 0 if sequence.n_parks else since_parked + 1)
        self._lines[sequence.tier].take(sequence)

    def leave(self, sequence: Sequence) -> None:
        """The sequence gives up its slot, to wait again or because it has ended."""
        self._lines[sequence.tier].leave(sequence)
        mean = self._mean_cost or sequence.charged
        self._mean_cost = mean + _NEW_SHARE * (sequence.charged - mean)
        self._open_gate(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence waits no more: it has ended without a slot."""
        self._forget(sequence)
        if self._gate.is_held(sequence):
            return  # its entry dies in the gate's heap
        self._lines[sequence.tier].remove(sequence)
        self._open_gate(sequence)

    def charge(self, sequence: Sequence, cost: float) -> None:
        """Put on the account of a running sequence's owner what a step has cost for it (any unit, the same for all)."""
        self._lines[sequence.tier].charge(sequence.owner, cost)
        sequence.charged += cost

    def charged(self, sequence: Sequence) -> float:
        """What the sequence's client has on its account, by its weight, within the tier."""
        return self._lines[sequence.tier].charged(sequence.owner)

    def has_backlog(self, sequence: Sequence) -> bool:
        """Whether the sequence's client has others waiting in the tier that never had a slot."""
        return self._n_new[_account(sequence)] > 0

    def preview(self, most: int = MAX_PREVIEW) -> list[str]:
        """The ids of those who wait in the order in which they will be served, as far as it can be told; none where more than `most` wait.

        For each request that is served its client is charged what one has cost of late; ageing and newcomers are left out.
        """
        if len(self._waiting) > most:
            return []
        return [sequence.request_id for sequence in self._orders(list(self._waiting.values()))]

    def _orders(self, waiting: list[Sequence]) -> list[Sequence]:
        if self._choose is not by_share:
            return sorted(waiting, key=place_of if self._choose is first_come else aged_place)
        ordered: list[Sequence] = []
        for line in self._lines:
            ordered += line.preview([sequence for sequence in waiting if sequence.tier is line.tier], self._mean_cost)
        return ordered

    def _forget(self, sequence: Sequence) -> None:
        del self._waiting[sequence.request_id]
        account = _account(sequence)
        self._n_new[account] -= sequence.n_parks == 0
        if not self._n_new[account]:
            del self._n_new[account]

    def _open_gate(self, gone: Sequence) -> None:
        for sequence in self._gate.closes_behind(gone, self._waiting):
            self._lines[sequence.tier].push(sequence, is_parked=sequence.n_parks > 0)


def _account(sequence: Sequence) -> tuple[Tier, str]:
    return sequence.tier, sequence.owner.client
