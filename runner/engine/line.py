"""All sequences of one tier that wait: by arrival and by their clients' shares."""

import heapq

from runner.engine.order import Owner, Tier
from runner.engine.places import PlaceHeap, place_of
from runner.engine.sequence import Sequence
from runner.engine.shares import Share, Shares


class Line:
    """All of one tier."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._by_place = PlaceHeap()
        self._clients = Shares(has_parts=True)

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits here."""
        return len(self._by_place) == 0

    @property
    def oldest(self) -> Sequence | None:
        """The first to have come."""
        return self._by_place.first

    @property
    def least_charged(self) -> Sequence | None:
        """The first of the client, and of its part, that was charged least."""
        client = self._clients.least_charged
        return None if client is None else client.next

    def preview(self, waiting: list[Sequence], cost: float) -> list[Sequence]:
        """The sequences of this tier in the order of their turns, where each costs the same."""
        by_client: dict[str, list[Sequence]] = {}
        for sequence in sorted(waiting, key=place_of, reverse=True):
            by_client.setdefault(sequence.owner.client, []).append(sequence)
        turns = [(*self._clients.account(name), theirs) for name, theirs in by_client.items()]
        heapq.heapify(turns)
        ordered = []
        while turns:
            charged, number, theirs = turns[0]
            ordered.append(theirs.pop())
            if theirs:
                heapq.heapreplace(turns, (charged + max(cost, 1e-9) / theirs[-1].owner.weight, number, theirs))
            else:
                heapq.heappop(turns)
        return ordered

    def push(self, sequence: Sequence) -> None:
        """See `WaitingQueue`; so for the others."""
        self._by_place.push(sequence)
        part = _parts(self._clients.arrive(sequence.owner.client, sequence.owner.weight)).arrive(sequence.owner.part, 1.0)
        part.waiting.push(sequence)

    def take(self, sequence: Sequence) -> None:
        """It runs."""
        self._by_place.discard(sequence)
        _parts(self._clients.take(sequence.owner.client)).take(sequence.owner.part).waiting.discard(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It waits no more."""
        self._by_place.discard(sequence)
        client = self._clients.leave(sequence.owner.client, was_running=False)
        _parts(client).leave(sequence.owner.part, was_running=False).waiting.discard(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It runs no more."""
        client = self._clients.leave(sequence.owner.client, was_running=True)
        _parts(client).leave(sequence.owner.part, was_running=True)

    def charge(self, owner: Owner, cost: float) -> None:
        """Of one that runs."""
        _parts(self._clients.charge(owner.client, cost)).charge(owner.part, cost)

    def charged(self, owner: Owner) -> float:
        """Of one that runs or waits."""
        return self._clients[owner.client].charged


def _parts(client: Share) -> Shares:
    assert client.parts is not None
    return client.parts
