"""Who gets the next slot. No operation looks at all who wait: 100,000 of them cost a step no more than ten.

    tier        high before normal before low before batch, but whoever has waited long enough goes first (`order.SLACK_S`)
    client      within a tier the one that was charged least for what was computed for it, by weight
    part        within a client the same again
    arrival     within a part

What waits lies in heaps by key; an entry that was taken or removed stays there until it comes to the top.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Final

from runner.config import PolicyName
from runner.engine.order import SLACK_S, Owner, Tier
from runner.engine.sequence import Sequence

# Of so many slots given to others while an aged request of a lower tier waits, the next one is its own.
TURNS_BEFORE_AGED: Final = 3
# Clients without a request whose debts are remembered.
MAX_IDLE: Final = 4096
# Beyond so many nobody is told a place: to know it, all who wait must be looked at.
MAX_PREVIEW: Final = 1024
# What one more request's cost counts in the mean.
_NEW_SHARE: Final = 0.1

Key = tuple[float, int]


class WaitingQueue:
    """All sequences without a slot: new ones, and parked ones under the key of their arrival."""

    def __init__(self, policy: PolicyName = "fair", *, max_running_per_client: int = 0) -> None:
        """`max_running_per_client` 0: no limit."""
        self._lines = tuple(_Line(tier) for tier in Tier)
        self._choose = POLICIES[policy]
        self._gate = _Gate(max_running_per_client)
        self._waiting: dict[str, Sequence] = {}
        self._n_turns = 0
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
        if sequence.place is None:
            self._n_pushed += 1
            sequence.place = (sequence.times.arrived_at, self._n_pushed)
        self._waiting[sequence.request_id] = sequence
        if self._gate.lets(sequence):
            self._lines[sequence.tier].push(sequence)

    def peek(self) -> Sequence | None:
        """Who is next; None where nobody is, or all are held back by their clients' limits."""
        return self._choose(self._lines, self._n_turns)

    def take(self, sequence: Sequence) -> None:
        """The sequence got a slot."""
        del self._waiting[sequence.request_id]
        is_best = all(line.is_empty for line in self._lines[: sequence.tier])
        self._n_turns = self._n_turns + 1 if is_best else 0
        self._lines[sequence.tier].take(sequence)

    def leave(self, sequence: Sequence) -> None:
        """The sequence gives up its slot, to wait again or because it has ended."""
        self._lines[sequence.tier].leave(sequence)
        mean = self._mean_cost or sequence.charged
        self._mean_cost = mean + _NEW_SHARE * (sequence.charged - mean)
        self._open_gate(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence waits no more: it has ended without a slot."""
        del self._waiting[sequence.request_id]
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

    def preview(self, most: int = MAX_PREVIEW) -> list[str]:
        """The ids of those who wait in the order in which they will be served, as far as it can be told; none where more than `most` wait.

        For each request that is served its client is charged what one has cost of late; ageing and newcomers are left out.
        """
        if len(self._waiting) > most:
            return []
        return [sequence.request_id for sequence in self._orders(list(self._waiting.values()))]

    def _orders(self, waiting: list[Sequence]) -> list[Sequence]:
        if self._choose is not by_share:
            return sorted(waiting, key=_place if self._choose is first_come else aged_place)
        ordered: list[Sequence] = []
        for line in self._lines:
            ordered += line.preview([sequence for sequence in waiting if sequence.tier is line.tier], self._mean_cost)
        return ordered

    def _open_gate(self, gone: Sequence) -> None:
        for sequence in self._gate.closes_behind(gone, self._waiting):
            self._lines[sequence.tier].push(sequence)


# -- policies: pure functions of the lines and of the number of turns since the last aged request ------------------------


def first_come(lines: "Seq[_Line]", n_turns: int) -> Sequence | None:
    """By arrival alone."""
    return min((line.oldest for line in lines if line.oldest is not None), key=_place, default=None)


def by_priority(lines: "Seq[_Line]", n_turns: int) -> Sequence | None:
    """By arrival plus the tier's slack."""
    return min((line.oldest for line in lines if line.oldest is not None), key=aged_place, default=None)


def by_share(lines: "Seq[_Line]", n_turns: int) -> Sequence | None:
    """The best tier's least charged client; now and then a request of a lower tier that has waited out the difference of the slacks."""
    best = next((line for line in lines if not line.is_empty), None)
    if best is None:
        return None
    chosen = best.least_charged
    if n_turns >= TURNS_BEFORE_AGED:
        aged = by_priority([line for line in lines if line.tier > best.tier], n_turns)
        if aged is not None and chosen is not None and aged_place(aged) < aged_place(chosen):
            return aged
    return chosen


def _place(sequence: Sequence) -> Key:
    assert sequence.place is not None
    return sequence.place


def aged_place(sequence: Sequence) -> Key:
    """When a sequence counts as having come (`order.SLACK_S`), and its number among equals."""
    arrived_at, number = _place(sequence)
    return arrived_at + SLACK_S[sequence.tier], number


Policy = Callable[["Seq[_Line]", int], Sequence | None]
POLICIES: Final[dict[str, Policy]] = {"fair": by_share, "priority": by_priority, "fcfs": first_come}


# -- one tier --------------------------------------------------------------------------------------------------------------------


class _Heap:
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
        place = _place(sequence)
        self._alive[place[1]] = sequence
        heapq.heappush(self._keys, place)

    def discard(self, sequence: Sequence) -> None:
        """Let one go."""
        self._alive.pop(_place(sequence)[1], None)
        if len(self._keys) > 2 * len(self._alive) + 64:
            self._keys = [key for key in dict.fromkeys(self._keys) if key[1] in self._alive]
            heapq.heapify(self._keys)


class _Share:
    """The account of a client in a tier, or of a part of one: waiting sequences in its parts, or, where it is a part, its own."""

    __slots__ = ("charged", "is_listed", "n_running", "n_waiting", "number", "parts", "waiting", "weight")

    def __init__(self, number: int, *, has_parts: bool) -> None:
        self.number = number
        self.charged = 0.0
        self.weight = 1.0
        self.n_waiting = self.n_running = 0
        self.is_listed = False
        self.parts = _Shares(has_parts=False) if has_parts else None
        self.waiting = _Heap()

    @property
    def next(self) -> Sequence | None:
        """Whose turn it is in here."""
        if self.parts is None:
            return self.waiting.first
        least = self.parts.least_charged
        return None if least is None else least.next


class _Shares:
    """Shares that take turns: the one that was charged least, by weight, is next.

    A share that appears begins at the floor: what a share would have been charged that had been here all the time and got just its
    part. So it neither has to catch up nor is caught up with, and however many appear, all who wait are overtaken by the floor in
    the end. One that went away with debts finds them again.
    """

    def __init__(self, *, has_parts: bool) -> None:
        self._has_parts = has_parts
        self._by_name: dict[str, _Share] = {}
        self._listed: list[tuple[float, int, _Share]] = []
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._floor = 0.0
        self._active_weight = 0.0
        self._n_made = 0

    def __getitem__(self, name: str) -> _Share:
        return self._by_name[name]

    def account(self, name: str) -> tuple[float, int]:
        """What the share was charged, and its rank among equals; where it is not known yet, what it would begin with."""
        share = self._by_name.get(name)
        return (self._floor, self._n_made) if share is None else (share.charged, share.number)

    @property
    def least_charged(self) -> _Share | None:
        """The share whose turn it is, of those with somebody waiting."""
        listed = self._listed
        while listed:
            charged, number, share = listed[0]
            if share.n_waiting == 0:
                heapq.heappop(listed)
                share.is_listed = False
            elif charged != share.charged:  # charged since it was listed
                heapq.heapreplace(listed, (share.charged, number, share))
            else:
                return share
        return None

    def arrive(self, name: str, weight: float) -> _Share:
        """One more sequence of this share waits."""
        share = self._by_name.get(name)
        if share is None:
            self._n_made += 1
            share = self._by_name[name] = _Share(self._n_made, has_parts=self._has_parts)
        if share.n_waiting == share.n_running == 0:
            self._idle.pop(name, None)
            share.charged = max(share.charged, self._floor)
            share.weight = weight
            self._active_weight += weight
        share.n_waiting += 1
        if not share.is_listed:
            share.is_listed = True
            heapq.heappush(self._listed, (share.charged, share.number, share))
        return share

    def take(self, name: str) -> _Share:
        """One that waited runs."""
        share = self._by_name[name]
        share.n_waiting -= 1
        share.n_running += 1
        return share

    def charge(self, name: str, cost: float) -> _Share:
        """Put it on the share's account."""
        share = self._by_name[name]
        share.charged += cost / share.weight
        self._floor += cost / self._active_weight
        return share

    def leave(self, name: str, *, was_running: bool) -> _Share:
        """One that ran, or waited, does so no more."""
        share = self._by_name[name]
        if was_running:
            share.n_running -= 1
        else:
            share.n_waiting -= 1
        if share.n_waiting == share.n_running == 0:
            self._active_weight = max(0.0, self._active_weight - share.weight) if len(self._idle) + 1 < len(self._by_name) else 0.0
            self._idle[name] = None
            if len(self._idle) > MAX_IDLE:
                forgotten, _ = self._idle.popitem(last=False)
                del self._by_name[forgotten]
        return share


class _Line:
    """All of one tier."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._by_place = _Heap()
        self._clients = _Shares(has_parts=True)

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
        for sequence in sorted(waiting, key=_place, reverse=True):
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


def _parts(client: _Share) -> _Shares:
    assert client.parts is not None
    return client.parts


class _Gate:
    """Holds back what a client has beyond its limit: so many of its sequences, running or in line, are let through at a time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._n_through: dict[str, int] = {}
        self._held: dict[str, list[tuple[Tier, Key, str]]] = {}
        self._held_ids: set[str] = set()

    def lets(self, sequence: Sequence) -> bool:
        """Whether it may stand in line now; else it is held until another of its client ends."""
        if self._limit == 0:
            return True
        client = sequence.owner.client
        if self._n_through.get(client, 0) < self._limit:
            self._n_through[client] = self._n_through.get(client, 0) + 1
            return True
        heapq.heappush(self._held.setdefault(client, []), (sequence.tier, _place(sequence), sequence.request_id))
        self._held_ids.add(sequence.request_id)
        return False

    def is_held(self, sequence: Sequence) -> bool:
        """Whether it is held back; it is forgotten, if so."""
        if sequence.request_id in self._held_ids:
            self._held_ids.remove(sequence.request_id)
            return True
        return False

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
        self._held.pop(client, None)
        if not self._n_through[client]:
            del self._n_through[client]
        return []
