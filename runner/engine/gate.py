"""How many sequences of one client may run or stand in line at a time."""

import heapq
from collections import Counter

from runner.engine.order import Tier
from runner.engine.places import Key, place_of
from runner.engine.sequence import Sequence


class Gate:
    """Holds back what a client has beyond its limit: so many of its sequences, running or in line, are let through at a time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._n_through: dict[str, int] = {}
        self._held: dict[str, list[tuple[Tier, Key, str]]] = {}
        self._held_ids: set[str] = set()
        # Entries of each client that are still in its heap and were forgotten.
        self._n_dead: Counter[str] = Counter()

    def lets(self, sequence: Sequence) -> bool:
        """Whether it may stand in line now; else it is held until another of its client ends."""
        if self._limit == 0:
            return True
        client = sequence.owner.client
        if self._n_through.get(client, 0) < self._limit:
            self._n_through[client] = self._n_through.get(client, 0) + 1
            return True
        heapq.heappush(self._held.setdefault(client, []), (sequence.tier, place_of(sequence), sequence.request_id))
        self._held_ids.add(sequence.request_id)
        return False

    def is_held(self, sequence: Sequence) -> bool:
        """Whether it is held back; it is forgotten, if so."""
        if sequence.request_id not in self._held_ids:
            return False
        self._held_ids.remove(sequence.request_id)
        client = sequence.owner.client
        self._n_dead[client] += 1
        if 2 * self._n_dead[client] > len(self._held[client]):
            self._held[client] = [entry for entry in self._held[client] if entry[2] in self._held_ids]
            heapq.heapify(self._held[client])
            del self._n_dead[client]
        return True

    def closes_behind(self, gone: Sequence, waiting: dict[str, Sequence]) -> list[Sequence]:
        """Who of the client comes through, now that one of those let through has gone."""
        if self._limit == 0:
            return []
        client = gone.owner.client
        self._n_through[client] -= 1
        held = self._held.get(client, [])
        while held:
            _, _, request_id = heapq.heappop(held)
            if request_id in self._held_ids:
                self._held_ids.remove(request_id)
                self._n_through[client] += 1
                return [waiting[request_id]]
            self._n_dead[client] -= 1
        self._held.pop(client, None)
        self._n_dead.pop(client, None)
        if not self._n_through[client]:
            del self._n_through[client]
        return []
