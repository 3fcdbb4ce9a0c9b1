"""Accounts of clients and of their parts: who was charged least is next."""

import heapq
from collections import OrderedDict
from typing import Final, Generic

from runner.engine.places import PlaceHeap, W

# Clients without a request whose debts are remembered.
MAX_IDLE: Final = 4096


class Share(Generic[W]):
    """The account of a client in a tier, or of a part of one: who waits in its parts, or, where it is a part, its own."""

    __slots__ = ("charged", "is_listed", "n_running", "n_waiting", "number", "parts", "waiting", "weight")

    def __init__(self, number: int, *, has_parts: bool) -> None:
        self.number = number
        self.charged = 0.0
        self.weight = 1.0
        self.n_waiting = self.n_running = 0
        self.is_listed = False
        self.parts: Shares[W] | None = Shares(has_parts=False) if has_parts else None
        self.waiting: PlaceHeap[W] = PlaceHeap()

    @property
    def next(self) -> W | None:
        """Whose turn it is in here."""
        if self.parts is None:
            return self.waiting.first
        least = self.parts.least_charged
        return None if least is None else least.next


class Shares(Generic[W]):
    """Shares that take turns: the one that was charged least, by weight, is next.

    A share that appears begins at the floor: what a share would have been charged that had been here all the time and got just its
    part. So it neither has to catch up nor is caught up with, and however many appear, all who wait are overtaken by the floor in
    the end. One that went away with debts finds them again.
    """

    def __init__(self, *, has_parts: bool) -> None:
        self._has_parts = has_parts
        self._by_name: dict[str, Share[W]] = {}
        self._listed: list[tuple[float, int, Share[W]]] = []
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._floor = 0.0
        self._active_weight = 0.0
        self._n_made = 0

    def __getitem__(self, name: str) -> Share[W]:
        return self._by_name[name]

    def account(self, name: str) -> tuple[float, int]:
        """What the share was charged, and its rank among equals; where it is not known yet, what it would begin with."""
        share = self._by_name.get(name)
        return (self._floor, self._n_made) if share is None else (share.charged, share.number)

    def parts_of(self, name: str) -> "Shares[W]":
        """The accounts of a share's parts; empty ones where it is not known yet."""
        share = self._by_name.get(name)
        return Shares(has_parts=False) if share is None or share.parts is None else share.parts

    @property
    def least_charged(self) -> Share[W] | None:
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

    def lead(self, name: str) -> float:
        """How much more a share was charged, or will have been when it appears, than the one whose turn it is."""
        least = self.least_charged
        if least is None:
            return 0.0
        share = self._by_name.get(name)
        is_here = share is not None and share.n_waiting + share.n_running > 0
        charged = self.account(name)[0] if is_here else max(self.account(name)[0], self._floor)
        return max(0.0, charged - least.charged)

    def arrive(self, name: str, weight: float) -> Share[W]:
        """One more sequence of this share waits."""
        share = self._by_name.get(name)
        if share is None:
            self._n_made += 1
            share = self._by_name[name] = Share(self._n_made, has_parts=self._has_parts)
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

    def take(self, name: str) -> Share[W]:
        """One that waited runs."""
        share = self._by_name[name]
        share.n_waiting -= 1
        share.n_running += 1
        return share

    def charge(self, name: str, cost: float) -> Share[W]:
        """Put it on the share's account."""
        share = self._by_name[name]
        share.charged += cost / share.weight
        self._floor += cost / self._active_weight
        return share

    def leave(self, name: str, *, was_running: bool) -> Share[W]:
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
