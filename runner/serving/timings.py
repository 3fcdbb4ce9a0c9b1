"""The gaps between tokens, counted where they arise and shown by whoever is asked for metrics."""

from bisect import bisect_left
from typing import Final

ITL_BUCKETS_S: Final = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)


class GapHistogram:
    """Counts of gaps by bucket, an upper bound each and one beyond the last."""

    def __init__(self) -> None:
        self.counts = [0] * (len(ITL_BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, gap_s: float) -> None:
        """Count one gap."""
        self.counts[bisect_left(ITL_BUCKETS_S, gap_s)] += 1
        self.sum_s += gap_s
