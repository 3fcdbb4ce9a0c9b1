"""Who decides what is computed together: the real one, and what others do."""

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from runner.engine.batching.adaptive_batch import AdaptiveBatcher
from runner.engine.batching.items import BatchLimits, Decision, Item


class Batcher(Protocol):
    """Whoever decides."""

    def add(self, item: Item, now: float) -> None:
        """See `AdaptiveBatcher`; so for the others."""

    def next_batch(self, now: float, gap_s: float | None = None) -> Decision:
        """What to compute."""

    def complete(self, now: float, seconds: float | None) -> None:
        """It is done."""

    def __len__(self) -> int:
        """Items that wait."""


class FixedBatcher:
    """What most servers do: in order of arrival, up to `size` items, and no sooner than full or `wait_s` after the first of them came."""

    def __init__(self, limits: BatchLimits, *, size: int, wait_s: float) -> None:
        self._n_ubatch, self._size, self._wait_s = limits.n_ubatch, size, wait_s
        self._waiting: deque[Item] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: Item, now: float) -> None:
        """Without a bound."""
        self._waiting.append(item)

    def next_batch(self, now: float, gap_s: float | None = None) -> Decision:
        """Whatever the gap and the deadlines."""
        if not self._waiting:
            return Decision()
        n = n_tokens = 0
        for item in self._waiting:
            if n == self._size or n_tokens + item.n_tokens > self._n_ubatch:
                break
            n, n_tokens = n + 1, n_tokens + item.n_tokens
        wake_at = self._waiting[0].arrived_at + self._wait_s
        if n == len(self._waiting) and n < self._size and now < wake_at:
            return Decision(wake_at=wake_at)
        return Decision(tuple(self._waiting.popleft() for _ in range(n)))

    def complete(self, now: float, seconds: float | None) -> None:
        """Learns nothing."""


POLICIES: Final[dict[str, Callable[[BatchLimits], Batcher]]] = {
    "adaptive": AdaptiveBatcher,
    "single": lambda limits: FixedBatcher(limits, size=1, wait_s=0.0),
    "eager": lambda limits: FixedBatcher(limits, size=limits.max_batch_size, wait_s=0.0),
    "fixed": lambda limits: FixedBatcher(limits, size=limits.max_batch_size, wait_s=limits.max_wait_s),
}
