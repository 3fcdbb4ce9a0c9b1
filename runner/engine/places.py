"""When somebody who waits came, and those who wait in that order."""

import heapq
from typing import Generic, Protocol, TypeVar

from runner.engine.order import SLACK_S, Owner, Tier

Key = tuple[float, int]


class Waiter(Protocol):
    """Whoever stands in line: a sequence for a slot, or an input for a batch. `place` is fixed before it does."""

    @property
    def tier(self) -> Tier:
        """Its class."""

    @property
    def owner(self) -> Owner:
        """Whose share it is charged to."""

    @property
    def place(self) -> Key | None:
        """When it came, and its number among equals."""


W = TypeVar("W", bound=Waiter)


def place_of(waiter: Waiter) -> Key:
    assert waiter.place is not None
    return waiter.place


def aged_place(waiter: Waiter) -> Key:
    """When a waiter counts as having come (`order.SLACK_S`), and its number among equals."""
    arrived_at, number = place_of(waiter)
    return arrived_at + SLACK_S[waiter.tier], number


class PlaceHeap(Generic[W]):
    """Waiters by place. The key of one that has gone is dropped when it comes to the top, or when half of the heap is such."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._alive: dict[int, W] = {}

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def first(self) -> W | None:
        """The one that came first."""
        keys, alive = self._keys, self._alive
        while keys:
            waiter = alive.get(keys[0][1])
            if waiter is not None:
                return waiter
            heapq.heappop(keys)
        return None

    def push(self, waiter: W) -> None:
        """Add one that is not here."""
        place = place_of(waiter)
        self._alive[place[1]] = waiter
        heapq.heappush(self._keys, place)

    def discard(self, waiter: W) -> None:
        """Let one go."""
        self._alive.pop(place_of(waiter)[1], None)
        if len(self._keys) > 2 * len(self._alive) + 64:
            self._keys = [key for key in dict.fromkeys(self._keys) if key[1] in self._alive]
            heapq.heapify(self._keys)
