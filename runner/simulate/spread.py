"""A distribution in bounded memory."""

import math
from collections import Counter
from typing import Final

# Neighbouring classes of a distribution are so far apart: a percentile is exact to 1 %.
_RATIO: Final = 1.02
_PER_E: Final = 1 / math.log(_RATIO)
_SMALLEST_S: Final = 1e-6
_NOTHING: Final = -(1 << 20)


class Spread:
    """A distribution of seconds in bounded memory: counts by logarithm, and the exact maximum."""

    __slots__ = ("counts", "max", "n")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.n = 0
        self.max = 0.0

    def add(self, seconds: float, n: int = 1) -> None:
        """Take a value, `n` times."""
        self.counts[int(math.log(seconds) * _PER_E // 1) if seconds > _SMALLEST_S else _NOTHING] += n
        self.n += n
        if seconds > self.max:
            self.max = seconds

    def absorb(self, other: "Spread") -> None:
        """Take all values of another."""
        self.counts.update(other.counts)
        self.n += other.n
        self.max = max(self.max, other.max)

    def percentile(self, share: float) -> float:
        """The value that `share` of all are not above; 0 for none."""
        left = share * self.n
        for key in sorted(self.counts):
            left -= self.counts[key]
            if left <= 0:
                return 0.0 if key == _NOTHING else min(math.exp((key + 0.5) / _PER_E), self.max)
        return self.max
