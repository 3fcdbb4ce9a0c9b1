"""How fast work ends, whatever it is: what is said of the time to come where nothing else is known (see `waits.py`)."""

from collections import deque
from typing import Final

LEAST_S: Final = 1.0
MOST_S: Final = 600.0
# What an end costs before there was one; a server that has run for longer than this without an end is at least as slow as that.
FIRST_GUESS_S: Final = 2.0
# A moving average over what ended in this time of work, but over so many ends at least, and never over more than are kept.
WINDOW_S: Final = 60.0
MIN_ENDS: Final = 32
MAX_ENDS: Final = 4096


class Ends:
    """A moving average of ends and of their tokens by time. Only time in which there was work counts: an idle hour is not slow."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque()
        self._n_tokens = 0
        self._since = 0.0
        self._idle_s = 0.0
        self._idle_since: float | None = 0.0

    def began(self, now: float) -> None:
        """There is work."""
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None

    def ended(self, now: float, n_tokens: int) -> None:
        """One request has ended, which had so many tokens."""
        at = self._worked(now)
        self._ends.append((at, n_tokens))
        self._n_tokens += n_tokens
        while len(self._ends) > MAX_ENDS or (len(self._ends) > MIN_ENDS and self._ends[0][0] < at - WINDOW_S):
            self._drop_first()

    def idle(self, now: float) -> None:
        """There is no work left."""
        if self._idle_since is None:
            self._idle_since = now

    def wait_s(self, now: float, *, n_ends: float = 1.0, n_tokens: float = 0.0) -> float:
        """About the time until so many more requests, and so many more tokens, have ended: 1 to 600 seconds."""
        by_ends = self.estimate_s(now, n_ends)
        if by_ends is None:
            return _bounded(max(self._span_s(now), FIRST_GUESS_S))
        by_tokens = n_tokens * self._span_s(now) / self._n_tokens if self._n_tokens else 0.0
        return _bounded(max(by_ends, by_tokens))

    def estimate_s(self, now: float, n_ends: float) -> float | None:
        """About the time until so many more requests have ended, as it is; None before any has."""
        return n_ends * self._span_s(now) / len(self._ends) if self._ends else None

    def _span_s(self, now: float) -> float:
        return max(self._worked(now) - self._since, 0.001)

    def _worked(self, now: float) -> float:
        """The time with work in it, up to now."""
        return (now if self._idle_since is None else self._idle_since) - self._idle_s

    def _drop_first(self) -> None:
        """Forget the first end and those of the same instant: what is kept is what ended after it."""
        self._since = self._ends[0][0]
        while self._ends and self._ends[0][0] <= self._since:
            self._n_tokens -= self._ends.popleft()[1]


def _bounded(seconds: float) -> float:
    return min(max(seconds, LEAST_S), MOST_S)
