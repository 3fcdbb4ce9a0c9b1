"""How long those that wait will do so, as they and those that are refused are told.

`Pace` says when each would get its slot if nobody came any more. Those who come later may go before: a better tier before all others,
other clients before a client's second request. How much longer it takes is learned as the median of (wait that was) / (wait that
was said) for each kind of waiter: the tier, and whether it stands behind another request of its client. The median moves by one small
step towards each wait that ends (Robbins and Monro, "A stochastic approximation method", Annals of Mathematical Statistics 22, 1951).
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from runner.engine.order import Tier
from runner.engine.pace import Pace, Work

# Who waits less is told no time: what is learned from it would be the length of a step.
_LEAST_S: Final = 0.05
# By how much, of itself, a factor moves with each wait that ends.
_STEP: Final = 0.02
# No kind of waiter is told more than so many times what the course of those that are there says, nor so much less.
_MOST: Final = 20.0

Kind = tuple[Tier, bool]


class Waiter(NamedTuple):
    """One that has no slot. `n_prompt`: tokens of its prompt, by which a queue may be bounded."""

    request_id: str
    client: str
    tier: Tier
    n_prompt: int
    work: Work


class Waits:
    """What was said of all that wait at the last look, and what came of it. Pure: `now` comes from the caller."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._factors: dict[Kind, float] = {}
        # For each that waits: when it was first of a kind, and what the pace said then.
        self._said: dict[str, dict[Kind, tuple[float, float]]] = {}
        self._at = 0.0
        self._waiters: Sequence[Waiter] = ()
        self._starts: list[float] = []
        self._waits: dict[str, float] = {}

    def look(self, now: float, running: Iterable[Work], waiting: Sequence[Waiter], n_slots: int) -> None:
        """Take those that are there, `waiting` in the order of their turns. Costs some microseconds for each that waits."""
        self._at, self._waiters = now, waiting
        self._starts, self._waits = [], {}
        if not self._pace.has_learned:
            return
        self._starts = list(self._pace.starts(running, (waiter.work for waiter in waiting), n_slots))
        n_before: Counter[str] = Counter()
        for waiter, start in zip(waiting, self._starts, strict=True):
            kind = waiter.tier, n_before[waiter.client] > 0
            n_before[waiter.client] += 1
            self._said.setdefault(waiter.request_id, {}).setdefault(kind, (now, start))
            self._waits[waiter.request_id] = start * self._factors.get(kind, 1.0)

    def started(self, request_id: str, now: float) -> None:
        """It has a slot."""
        for kind, (said_at, said_s) in self._said.pop(request_id, {}).items():
            if said_s >= _LEAST_S:
                self._learn(kind, (now - said_at) / said_s)

    def gone(self, request_id: str) -> None:
        """It waits no more and has got no slot."""
        self._said.pop(request_id, None)

    def wait_s(self, request_id: str, now: float) -> float | None:
        """Until it gets a slot; None where nobody knows."""
        wait_s = self._waits.get(request_id)
        return None if wait_s is None else self._since(wait_s, now)

    def mean_s(self) -> float | None:
        """Of all that waited at the last look; None where nobody knows."""
        return sum(self._waits.values()) / len(self._waits) if self._waits else None

    def room_s(self, n: int, now: float) -> float | None:
        """Until so many have left the queue for a slot, whoever they are; None where nobody knows."""
        return self._since(self._starts[min(n, len(self._starts)) - 1], now) if self._starts else None

    def tokens_s(self, n_tokens: int, now: float) -> float | None:
        """Until prompts of so many tokens have left the queue; None where nobody knows."""
        n_gone = accumulate(waiter.n_prompt for waiter in self._waiters)
        return self.room_s(1 + sum(1 for n in n_gone if n < n_tokens), now)

    def client_s(self, client: str, n: int, now: float) -> float | None:
        """Until so many of a client's have left the queue; None where nobody knows."""
        own = sorted(self._waits[waiter.request_id] for waiter in self._waiters if waiter.client == client and self._waits)
        return self._since(own[min(n, len(own)) - 1], now) if own else None

    def _since(self, wait_s: float, now: float) -> float:
        return max(0.0, wait_s - (now - self._at))

    def _learn(self, kind: Kind, ratio: float) -> None:
        factor = self._factors.get(kind, 1.0)
        factor *= math.exp(_STEP if ratio > factor else -_STEP)
        self._factors[kind] = min(max(factor, 1.0 / _MOST), _MOST)
