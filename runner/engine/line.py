"""All of one tier who wait: by arrival and by their clients' shares."""

import heapq
from collections import deque
from typing import Generic

from runner.engine.order import Owner, Tier
from runner.engine.places import Key, PlaceHeap, W, place_of
from runner.engine.shares import Share, Shares


class Line(Generic[W]):
    """All of one tier."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._by_place: PlaceHeap[W] = PlaceHeap()
        self._clients: Shares[W] = Shares(has_parts=True)
        # In the order in which they were parked.
        self._parked: dict[Key, W] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits here."""
        return len(self._by_place) == 0

    @property
    def oldest(self) -> W | None:
        """The first to have come."""
        return self._by_place.first

    @property
    def least_charged(self) -> W | None:
        """The first of the client, and of its part, that was charged least."""
        client = self._clients.least_charged
        return None if client is None else client.next

    @property
    def longest_parked(self) -> W | None:
        """Of those who had a slot the first to have lost it."""
        return next(iter(self._parked.values()), None)

    def lead(self, client: str) -> float:
        """How much more the client was charged than the one whose turn it is, of those with somebody waiting."""
        return self._clients.lead(client)

    def preview(self, waiting: list[W], cost: float) -> list[W]:
        """Those of this tier in the order of their turns, where each costs the same."""
        by_client: dict[str, dict[str, list[W]]] = {}
        for waiter in sorted(waiting, key=place_of):
            by_client.setdefault(waiter.owner.client, {}).setdefault(waiter.owner.part, []).append(waiter)
        clients = []
        for name, by_part in by_client.items():
            parts = self._clients.parts_of(name)
            own = _in_turns([(*parts.account(part), theirs) for part, theirs in by_part.items()], cost)
            clients.append((*self._clients.account(name), own))
        return _in_turns(clients, cost, by_weight=True)

    def push(self, waiter: W, *, is_parked: bool = False) -> None:
        """See `WaitingQueue`; so for the others."""
        if is_parked:
            self._parked[place_of(waiter)] = waiter
        self._by_place.push(waiter)
        part = _parts(self._clients.arrive(waiter.owner.client, waiter.owner.weight)).arrive(waiter.owner.part, 1.0)
        part.waiting.push(waiter)

    def take(self, waiter: W) -> None:
        """It runs."""
        self._by_place.discard(waiter)
        self._parked.pop(place_of(waiter), None)
        _parts(self._clients.take(waiter.owner.client)).take(waiter.owner.part).waiting.discard(waiter)

    def remove(self, waiter: W) -> None:
        """It waits no more."""
        self._by_place.discard(waiter)
        self._parked.pop(place_of(waiter), None)
        client = self._clients.leave(waiter.owner.client, was_running=False)
        _parts(client).leave(waiter.owner.part, was_running=False).waiting.discard(waiter)

    def leave(self, waiter: W) -> None:
        """It runs no more."""
        client = self._clients.leave(waiter.owner.client, was_running=True)
        _parts(client).leave(waiter.owner.part, was_running=True)

    def charge(self, owner: Owner, cost: float) -> None:
        """Of one that runs."""
        _parts(self._clients.charge(owner.client, cost)).charge(owner.part, cost)

    def charged(self, owner: Owner) -> float:
        """Of one that runs or waits."""
        return self._clients[owner.client].charged


def _parts(client: Share[W]) -> Shares[W]:
    assert client.parts is not None
    return client.parts


def _in_turns(shares: list[tuple[float, int, list[W]]], cost: float, *, by_weight: bool = False) -> list[W]:
    """Of shares, each with what it was charged, its rank and its waiters in order: all in the order of turns that cost the same."""
    # Shares that were never here have the same rank: among them the order in which they are given counts.
    turns = [(charged, number, i, deque(theirs)) for i, (charged, number, theirs) in enumerate(shares)]
    heapq.heapify(turns)
    ordered = []
    while turns:
        charged, number, i, theirs = turns[0]
        ordered.append(theirs.popleft())
        if theirs:
            weight = theirs[0].owner.weight if by_weight else 1.0
            heapq.heapreplace(turns, (charged + max(cost, 1e-9) / weight, number, i, theirs))
        else:
            heapq.heappop(turns)
    return ordered
