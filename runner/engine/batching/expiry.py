"""Whose time is up first. An entry that has gone stays until it comes to the top, or until half of the heap is such."""

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class Expiry(Generic[T]):
    """Values by the instant at which they expire."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._alive: dict[int, T] = {}

    def push(self, at: float, number: int, value: T) -> None:
        """Let `value` expire at `at`. No two have the same `number`."""
        self._alive[number] = value
        heapq.heappush(self._heap, (at, number))

    def discard(self, number: int) -> None:
        """Forget one, if it is here."""
        self._alive.pop(number, None)
        if len(self._heap) > 2 * len(self._alive) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._alive]
            heapq.heapify(self._heap)

    @property
    def first(self) -> T | None:
        """What expires first."""
        heap, alive = self._heap, self._alive
        while heap and heap[0][1] not in alive:
            heapq.heappop(heap)
        return alive[heap[0][1]] if heap else None
