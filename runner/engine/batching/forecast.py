"""How long a newcomer will wait for its batch, from what waits before it: counted by tier and client, without looking at all who wait."""

import math
from dataclasses import dataclass, field
from typing import Final

from runner.engine.order import Tier

# The wait that is forecast is one that a tenth of all stay below: who is refused by it would have been late nine times in ten.
_SHARE_BELOW: Final = 0.1
_STEP: Final = 0.1
_LEAST, _MOST = 0.01, 100.0


@dataclass(slots=True)
class _Client:
    n_tokens: int = 0
    n_items: int = 0
    latest: float = -math.inf


@dataclass(slots=True)
class _Tier:
    n_tokens: int = 0
    clients: dict[str, _Client] = field(default_factory=dict)


class Forecast:
    """Tokens ahead, and how waits compare with the time that those tokens take.

    Between the two lies all that is not known when an item comes: later ones with a better turn, batches that are not full, steps of
    generation in between. It is learned as one factor.
    """

    def __init__(self) -> None:
        self._tiers = [_Tier() for _ in Tier]
        self.factor = 1.0

    def push(self, tier: Tier, client: str, due_at: float, n_tokens: int) -> None:
        """One more waits."""
        line = self._tiers[tier]
        line.n_tokens += n_tokens
        account = line.clients.setdefault(client, _Client())
        account.n_tokens += n_tokens
        account.n_items += 1
        account.latest = max(account.latest, due_at)

    def remove(self, tier: Tier, client: str, n_tokens: int) -> None:
        """One of those waits no more."""
        line = self._tiers[tier]
        line.n_tokens -= n_tokens
        account = line.clients[client]
        account.n_tokens -= n_tokens
        account.n_items -= 1
        if account.n_items == 0:
            del line.clients[client]

    def tokens_ahead(self, tier: Tier, client: str, due_at: float, lead: float) -> int:
        """Tokens that go before a newcomer: of better tiers, of its client, and as many of each other client of its tier and its lead.

        `lead`: by how many tokens its client was served before others. Where something of its own client is due after it, none of that
        client's are counted: too little rather than too much.
        """
        line = self._tiers[tier]
        own = line.clients.get(client)
        own_all = 0 if own is None else own.n_tokens
        own_ahead = 0 if own is None or own.latest > due_at else own_all
        n_others = len(line.clients) - (own is not None)
        others = min(line.n_tokens - own_all, int(own_ahead + lead) * n_others)
        return sum(better.n_tokens for better in self._tiers[:tier]) + own_ahead + others

    def learn(self, expected_s: float, waited_s: float) -> None:
        """Take a wait beside the time that the tokens ahead of it were expected to take: the factor follows a quantile of their ratio."""
        if expected_s > 0.0:
            is_below = waited_s < self.factor * expected_s
            self.factor = min(_MOST, max(_LEAST, self.factor * math.exp(_STEP * (_SHARE_BELOW - is_below))))
