"""When a sequence came, and those that wait in that order."""

import heapq

from runner.engine.order import SLACK_S
from runner.engine.sequence import Sequence

Key = tuple[float, int]


def place_of(sequence: Sequence) -> Key:
    assert sequence.place is not None
    return sequence.place


def aged_place(sequence: Sequence) -> Key:
    """When a sequence counts as having come (`order.SLACK_S`), and its number among equals."""
    arrived_at, number = place_of(sequence)
    return arrived_at + SLACK_S[sequence.tier], number


class PlaceHeap:
    """Sequences by place. The key of one that has gone is dropped when it comes to the top, or when half of the heap is such."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._alive: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def first(self) -> Sequence | None:
        """The one that came first."""
        keys, alive = self._keys, self._alive
        while keys:
            sequence = alive.get(keys[0][1])
            if sequence is not None:
                return sequence
            heapq.heappop(keys)
        return None

    def push(self, sequence: Sequence) -> None:
        """Add one that is not here."""
        place = place_of(sequence)
        self._alive[place[1]] = sequence
        heapq.heappush(self._keys, place)

    def discard(self, sequence: Sequence) -> None:
        """Let one go."""
        self._alive.pop(place_of(sequence)[1], None)
        if len(self._keys) > 2 * len(self._alive) + 64:
            self._keys = [key for key in dict.fromkeys(self._keys) if key[1] in self._alive]
            heapq.heapify(self._keys)
