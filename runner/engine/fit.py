"""Learns what a kind of work costs from what it has cost: seconds = sum of coefficient x amount, and a level beside it."""

from collections.abc import Hashable, Sequence
from typing import Final

Amounts = tuple[float, ...]

# What an old measurement still counts when a new one comes: some dozens make the coefficients.
_DECAY: Final = 0.97
# How firmly the last coefficients are held on to, as a share of what the measurements weigh: where those say nothing (eight rows in
# every step: is it the pass or the rows?), the coefficients stay.
_HOLD: Final = 0.01
# A new measurement counts for a quarter of the level: three after a change it has mostly followed.
_NEW_SHARE: Final = 0.25
# What was measured is forgotten in some dozens of measurements: the coefficients are solved for well within these.
_SOLVE_EVERY: Final = 8
# No measurement counts for more than so many times what was expected: a machine that stood still for a moment is not slow.
MOST: Final = 4.0


class Fit:
    """Least squares with forgetting, by relative error, with no coefficient below zero.

    Beside the coefficients it keeps the level of each `key`: the seconds that work of this kind took lately. `seconds` goes from
    there along the coefficients, so that a kernel that is not linear costs no accuracy where it has been measured.
    """

    def __init__(self, n_amounts: int, *, first: int, most: float = MOST) -> None:
        """The first measurement is put on the amount number `first` alone. None counts for more than `most` times what was expected."""
        self._first = first
        self._most = most
        self._n = n_amounts
        self._moments = [[0.0] * n_amounts for _ in range(n_amounts)]
        self._targets = [0.0] * n_amounts
        self._coefficients = [0.0] * n_amounts
        self._n_unsolved = 0
        self._levels: dict[Hashable, tuple[Amounts, float]] = {}
        self._last_key: Hashable = None

    @property
    def has_learned(self) -> bool:
        """Whether there was a measurement."""
        return bool(self._levels)

    @property
    def coefficients(self) -> Sequence[float]:
        """Seconds for one of each amount."""
        self._solve()
        return self._coefficients

    def has_measured(self, key: Hashable) -> bool:
        """Whether there is a level of this kind."""
        return key in self._levels

    @property
    def level_s(self) -> float:
        """The seconds of what was measured last; 0.0 before."""
        return self._levels[self._last_key][1] if self._levels else 0.0

    def learn(self, amounts: Amounts, seconds: float, key: Hashable = None) -> None:
        """Take a measurement. Amounts and seconds are above zero where they are not nothing."""
        if self.has_learned:
            # Along the coefficients as they were solved for last: not every decode step has the time to solve them.
            expected = self._expected(amounts, key) or seconds
            seconds = min(seconds, self._most * expected)
            level = expected + _NEW_SHARE * (seconds - expected) if key in self._levels else seconds
        else:
            self._coefficients[self._first] = seconds / amounts[self._first]
            level = seconds
        self._levels[key] = amounts, level
        self._last_key = key
        by_second = [amount / seconds for amount in amounts]
        for row, share, i in zip(self._moments, by_second, range(self._n), strict=True):
            self._targets[i] = _DECAY * self._targets[i] + share
            for j, other in enumerate(by_second):
                row[j] = _DECAY * row[j] + share * other
        self._n_unsolved += 1
        if self._n_unsolved >= _SOLVE_EVERY:
            self._solve()

    def seconds(self, amounts: Amounts, key: Hashable = None) -> float:
        """What it should take. Only after a measurement; a key without one takes the level of the last that was measured."""
        assert self.has_learned
        return self.scale(key) * self._along(amounts)

    def scale(self, key: Hashable = None) -> float:
        """What the coefficients must be multiplied by to give the level, which was of amounts that they say something of."""
        self._solve()
        at, level = self._levels.get(key) or self._levels[self._last_key]
        return level / self._along(at)

    def _expected(self, amounts: Amounts, key: Hashable) -> float:
        """0.0 where the coefficients say nothing of these amounts, or of those of the level."""
        at, level = self._levels.get(key) or self._levels[self._last_key]
        along = self._along(at)
        return level * self._along(amounts) / along if along > 0.0 else 0.0

    def _along(self, amounts: Amounts) -> float:
        return sum(coefficient * amount for coefficient, amount in zip(self._coefficients, amounts, strict=True))

    def _solve(self) -> None:
        if self._n_unsolved:
            self._coefficients = self._solved()
            self._n_unsolved = 0

    def _solved(self) -> list[float]:
        """The normal equations, without the amounts whose coefficients would be negative."""
        free = [i for i in range(self._n) if self._moments[i][i] > 0.0]
        while free:
            found = self._solved_for(free)
            lowest = min(free, key=lambda i: found[i])
            if found[lowest] >= 0.0:
                return found
            free.remove(lowest)
        return self._coefficients

    def _solved_for(self, free: list[int]) -> list[float]:
        rows = []
        for i in free:
            held = _HOLD * self._moments[i][i]
            row = [self._moments[i][j] + (held if i == j else 0.0) for j in free]
            rows.append([*row, self._targets[i] + held * self._coefficients[i]])
        found = [0.0] * self._n
        for i, value in zip(free, _eliminated(rows), strict=True):
            found[i] = value
        return found


def _eliminated(rows: list[list[float]]) -> list[float]:
    """Solve n equations, each the factors and then the value, of a positive definite matrix: no pivoting."""
    n = len(rows)
    for i, row in enumerate(rows):
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            for j in range(i, n + 1):
                below[j] -= factor * row[j]
    values = [0.0] * n
    for i in range(n - 1, -1, -1):
        values[i] = (rows[i][n] - sum(rows[i][j] * values[j] for j in range(i + 1, n))) / rows[i][i]
    return values
