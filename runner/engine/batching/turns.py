"""Whose turn it is among waiters that need no slot: the rule of the queue (`policies.by_share`), taken many at a time."""

from typing import Generic

from runner.engine.line import Line
from runner.engine.order import Tier
from runner.engine.places import W
from runner.engine.policies import Given, by_share


class Turns(Generic[W]):
    """All who wait, best tier first, within it the client that was charged least, within that by place.

    What an operation costs does not depend on how many wait.
    """

    def __init__(self) -> None:
        self._lines: tuple[Line[W], ...] = tuple(Line(tier) for tier in Tier)
        self._given = Given()

    def lead(self, tier: Tier, client: str) -> float:
        """By how much, within the tier, others are served before it is the client's turn: each of them by as much as this at most."""
        return self._lines[tier].lead(client)

    def push(self, waiter: W) -> None:
        """Let it wait at its place."""
        self._lines[waiter.tier].push(waiter)

    def take(self) -> W | None:
        """Who is next; it waits no more until it is put back. None where nobody waits."""
        waiter = by_share(self._lines, self._given)
        if waiter is not None:
            self._lines[waiter.tier].take(waiter)
        return waiter

    def pick(self, waiter: W) -> W:
        """Take one that waits, out of turn."""
        self._lines[waiter.tier].take(waiter)
        return waiter

    def put_back(self, waiter: W) -> None:
        """One that was taken waits again, at the same place and with the same account."""
        self._lines[waiter.tier].push(waiter)
        self._lines[waiter.tier].leave(waiter)

    def drop(self, waiter: W) -> None:
        """One that was taken has ended without being served."""
        self._lines[waiter.tier].leave(waiter)

    def serve(self, waiter: W, cost: float) -> None:
        """One that was taken is served: its client pays for it."""
        is_best = all(line.is_empty for line in self._lines[: waiter.tier])
        self._given = Given(since_aged=self._given.since_aged + 1 if is_best else 0)
        self._lines[waiter.tier].charge(waiter.owner, cost)
        self._lines[waiter.tier].leave(waiter)

    def remove(self, waiter: W) -> None:
        """One that waits does so no more."""
        self._lines[waiter.tier].remove(waiter)
