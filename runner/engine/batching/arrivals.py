"""How soon another item comes, learned as a hazard: the rate of arrivals by the time since the last event.

The rate is kept apart for the time since an arrival and for the time since a batch was done, because the two differ exactly where it
matters. A client that sends one item at a time never sends while its item waits: after its arrival the rate is nothing, however fast
it asks again once it has its answer. Items that come in bursts follow one another closely, and then no more come. Clients that wait
for their answers come back soon after a batch.

A rate that is constant between two instants is estimated by arrivals over time at risk (the piecewise exponential model: Friedman,
"Piecewise exponential models for survival data with covariates", Annals of Statistics 10, 1982). The instants halve towards zero.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# Instants at which the rate may change; the last is the longest wait.
_N_BINS: Final = 12
# What an old event still counts when a new one comes: the last hundred make the rates.
_KEEP: Final = 0.99
# Time at risk before anything was seen, in widths of a bin: one arrival alone makes no rate.
_PRIOR: Final = 1.0

_ARRIVAL, _DONE = range(2)


@dataclass(slots=True)
class _Rate:
    """Arrivals over time, of which the old count less and less."""

    n: float = 0.0
    span_s: float = 0.0

    @property
    def a_second(self) -> float:
        return self.n / self.span_s if self.span_s > 0.0 else 0.0

    def count(self, n: int, span_s: float) -> None:
        self.n = self.n * _KEEP + n
        self.span_s = self.span_s * _KEEP + span_s


class Arrivals:
    """Two hazards of arrival, up to `horizon_s` after the last event. Time is what the caller says."""

    def __init__(self, horizon_s: float) -> None:
        assert horizon_s > 0.0
        self._ends = [horizon_s / 2.0 ** (_N_BINS - 1 - i) for i in range(_N_BINS)]
        self._arrived = [[0.0] * _N_BINS for _ in range(2)]
        self._at_risk_s = [[0.0] * _N_BINS for _ in range(2)]
        self._last_at: float | None = None
        self._after = _ARRIVAL
        self._last_arrival_at: float | None = None
        self._all, self._in_pass = _Rate(), _Rate()
        self._started_at: float | None = None
        self._n_in_pass = 0

    @property
    def rate(self) -> float:
        """Items a second lately, whatever came between; 0.0 before two have come at different instants."""
        return self._all.a_second

    @property
    def rate_in_pass(self) -> float:
        """Items a second lately, counted while a batch was computed only."""
        return self._in_pass.a_second

    def arrived(self, at: float) -> None:
        """An item has come. Those that come at the same instant are one event: nobody could have waited for the second."""
        if self._last_arrival_at is not None:
            self._all.count(1, max(0.0, at - self._last_arrival_at))
        self._last_arrival_at = at
        self._n_in_pass += 1
        if self._last_at is not None and at <= self._last_at:
            return
        self._close(at, is_arrival=True)

    def batch_started(self, at: float) -> None:
        """A batch is being computed from now on."""
        self._started_at = at
        self._n_in_pass = 0

    def batch_done(self, at: float) -> None:
        """It has been computed and its answers are out. Those that came meanwhile have been told before."""
        if self._started_at is not None:
            self._in_pass.count(self._n_in_pass, max(0.0, at - self._started_at))
            self._started_at = None
        self._close(at, is_arrival=False)

    def ahead(self, now: float) -> Iterator[tuple[float, float]]:
        """(seconds, rate) of the time to come: the rate holds for so many seconds, then the next one does. Ends at the horizon."""
        if self._last_at is None:
            return
        since_s = max(0.0, now - self._last_at)
        arrived, at_risk_s = self._arrived[self._after], self._at_risk_s[self._after]
        start_s = 0.0
        for i, end_s in enumerate(self._ends):
            if end_s > since_s:
                yield end_s - max(start_s, since_s), arrived[i] / (at_risk_s[i] + _PRIOR * (end_s - start_s))
            start_s = end_s

    def _close(self, at: float, *, is_arrival: bool) -> None:
        """The time since the last event was time at risk; forget a little of what was."""
        if self._last_at is not None:
            since_s = max(0.0, at - self._last_at)
            arrived, at_risk_s = self._arrived[self._after], self._at_risk_s[self._after]
            start_s = 0.0
            for i, end_s in enumerate(self._ends):
                is_in = start_s <= since_s < end_s
                arrived[i] = arrived[i] * _KEEP + (is_arrival and is_in)
                at_risk_s[i] = at_risk_s[i] * _KEEP + max(0.0, min(since_s, end_s) - start_s)
                start_s = end_s
        self._last_at = at
        self._after = _ARRIVAL if is_arrival else _DONE
