"""Items without generation: who sends which, and when. One function of a seed for each scenario."""

import random
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from runner.config import DEFAULT_ITL_TARGET_S
from runner.engine.batching.items import NEVER, BatchLimits
from runner.simulate.costs import Costs

_BURST: Final = 16
# Items of a burst come within so many seconds.
_BURST_S: Final = 0.002
_THINK_S: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated. `target_gap_s`: as of the prompt budget."""

    n_items: int
    load: float = 0.9
    seed: int = 1
    n_clients: int = 100
    limits: BatchLimits = field(default_factory=lambda: BatchLimits(n_ubatch=512))
    target_gap_s: float = DEFAULT_ITL_TARGET_S
    costs: Costs = field(default_factory=Costs)


class Arrival(NamedTuple):
    """An item to come. `patience_s`: its deadline, counted from its arrival. Ordered by time, then by number."""

    at: float
    number: int
    client: int
    n_tokens: int
    patience_s: float = NEVER


class Scenario(NamedTuple):
    """`n_loops` clients each send the next item `_THINK_S` after an answer; 0: items come by themselves, `burst` at a time."""

    n_loops: int = 0
    burst: int = 1
    has_long: bool = False
    patience_s: float = NEVER
    has_streams: bool = False


SCENARIOS: Final = {
    "lonely": Scenario(n_loops=1),
    "loops": Scenario(n_loops=8),
    "poisson": Scenario(),
    "bursts": Scenario(burst=_BURST),
    "mixed": Scenario(has_long=True),
    "deadlines": Scenario(patience_s=1.0),
    "streams": Scenario(has_streams=True),
}


class Source:
    """Draws the arrivals of a scenario."""

    def __init__(self, scenario: Scenario, setup: Setup, between_s: float) -> None:
        self._random = random.Random(setup.seed)  # noqa: S311
        self._scenario, self._setup, self._between_s = scenario, setup, between_s
        self._n = 0

    @property
    def n_left(self) -> int:
        """Items that have not been sent."""
        return self._setup.n_items - self._n

    def start(self) -> list[Arrival]:
        """All that come by themselves, in order of time; or the first of each client that waits for its answer."""
        if self._scenario.n_loops:
            return [self._one(0.0, client) for client in range(min(self._scenario.n_loops, self.n_left))]
        found: list[Arrival] = []
        at = 0.0
        while self.n_left:
            at += self._random.expovariate(1.0) * self._between_s * self._scenario.burst
            found += [self._one(at + self._offset(), self._client()) for _ in range(min(self._scenario.burst, self.n_left))]
        return found

    def reply(self, client: int, now: float) -> Arrival | None:
        """What a client that waited for its answer sends now."""
        if not self._scenario.n_loops or not self.n_left:
            return None
        return self._one(now + self._random.expovariate(1.0 / _THINK_S), client)

    def _one(self, at: float, client: int) -> Arrival:
        self._n += 1
        return Arrival(at, self._n, client, self.tokens(), self._scenario.patience_s)

    def tokens(self) -> int:
        """The length of an item: 8 to 64 tokens, or of any length with half of them below 60."""
        if not self._scenario.has_long:
            return self._random.randrange(8, 65)
        return max(1, min(self._setup.limits.n_ubatch, int(self._random.lognormvariate(4.1, 1.0))))

    def _client(self) -> int:
        return self._random.randrange(self._setup.n_clients)

    def _offset(self) -> float:
        return self._random.random() * _BURST_S if self._scenario.burst > 1 else 0.0
