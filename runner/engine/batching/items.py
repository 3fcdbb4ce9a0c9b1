"""What is batched without generation: an item, the limits of a batch, and what was decided."""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from runner.engine.order import NOBODY, Owner, Tier
from runner.errors import ConfigError

NEVER: Final = math.inf


@dataclass(frozen=True, slots=True)
class Item:
    """One input of a request, tokenised. `arrived_at` and `deadline` are monotonic instants; after `deadline` the answer is of no use."""

    item_id: str
    n_tokens: int
    arrived_at: float
    deadline: float = NEVER
    owner: Owner = NOBODY
    tier: Tier = Tier.NORMAL


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """`n_ubatch`: tokens that the context computes in one pass, and so the most an item or a batch may have.

    `max_wait_s`: what an item may be made to wait for company. `max_gap_wait_s`: what one that does not fit the gap waits beside
    streams. `max_waiting`: items. Raises ConfigError.
    """

    n_ubatch: int
    max_batch_size: int = 64
    max_wait_s: float = 0.05
    max_gap_wait_s: float = 1.0
    max_waiting: int = 4096

    def __post_init__(self) -> None:
        for name in ("n_ubatch", "max_batch_size", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("max_wait_s", "max_gap_wait_s"):
            if not 0.0 < getattr(self, name) < NEVER:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be a number of seconds above 0")


class Decision(NamedTuple):
    """`batch`: compute these now, in one pass, and say `complete`. `shed`: these are late, tell their clients.

    Without a batch: ask again at `wake_at`, or when an item comes; None: there is nothing to wait for. Beside streams ask every step.
    """

    batch: tuple[Item, ...] = ()
    shed: tuple[Item, ...] = ()
    wake_at: float | None = None

    @property
    def n_tokens(self) -> int:
        """Rows of the pass: nothing is padded."""
        return sum(item.n_tokens for item in self.batch)


@dataclass(slots=True)
class BatchCounts:
    """Items by what became of them, and batches. `refused`: the queue was full or the item too long; `too_late`: shed at `add`."""

    added: int = 0
    served: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    too_late: int = 0
    shed: int = 0
    batches: int = 0
    over_gap: int = 0
