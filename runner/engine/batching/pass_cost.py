"""What a pass without generation costs on this machine: seconds = fixed + per token x tokens, learned from the passes that were made."""

from typing import Final

from runner.engine.fit import Fit

# A new batch counts for so much in what is known about the sizes of batches.
_NEW_SHARE: Final = 0.05
# No pass counts as having taken more than so many times what was expected, or less than that part of it.
_MOST_RATIO: Final = 1.2
# How much of it the pace follows.
_FOLLOWS: Final = 0.25
# Sizes that differ by less than this share of their mean do not tell the fixed cost from the cost of a token.
_LEAST_SPREAD: Final = 0.1


class PassCost:
    """Learns by `fit.Fit`: relative least squares with forgetting, in which a pass that stood still for a moment counts for little.

    The fit tells the pass from its tokens and takes its time; the pace beside it follows a machine that has become slower or faster.
    """

    def __init__(self) -> None:
        self._fit = Fit(2, first=1)
        self._mean = self._mean_square = 0.0
        self._deviation = 0.0
        self._pace = 1.0

    @property
    def is_known(self) -> bool:
        """Whether a pass was measured."""
        return self._fit.has_learned

    @property
    def is_split(self) -> bool:
        """Whether batches of different sizes were measured lately: else nobody knows what of the time is the pass and what its tokens."""
        variance = self._mean_square - self._mean**2
        return variance > (_LEAST_SPREAD * self._mean) ** 2

    @property
    def caution(self) -> float:
        """By what factor a pass may take longer than expected where it must not be late: twice the usual deviation."""
        return 1.0 + 2.0 * self._deviation

    @property
    def fixed_s(self) -> float:
        """What a pass costs before its first token; 0.0 before one was measured."""
        return self._pace * self._fit.coefficients[0]

    @property
    def token_s(self) -> float:
        """What each token adds; 0.0 before a pass was measured."""
        return self._pace * self._fit.coefficients[1]

    def seconds(self, n_tokens: float, n_passes: float = 1) -> float:
        """What it should take to compute so many tokens in so many passes."""
        return self.fixed_s * n_passes + self.token_s * n_tokens

    def tokens_in(self, seconds: float) -> int:
        """The most tokens that a pass of so many seconds computes; 0 where not even one fits. Only after a pass was measured."""
        fixed_s, token_s = self.fixed_s, self.token_s
        if seconds < fixed_s + token_s:
            return 0
        return int(min((seconds - fixed_s) / token_s, MANY)) if token_s > 0.0 else MANY

    def learn(self, n_tokens: int, seconds: float) -> None:
        """Take the measured time of a pass. A clock that has not moved teaches nothing."""
        assert n_tokens > 0
        if seconds <= 0.0:
            return
        if self.is_known:
            ratio = min(max(seconds / self.seconds(n_tokens), 1.0 / _MOST_RATIO), _MOST_RATIO)
            self._deviation += _NEW_SHARE * (abs(ratio - 1.0) - self._deviation)
            self._pace *= ratio**_FOLLOWS
        self._fit.learn((1.0, float(n_tokens)), seconds)
        share = _NEW_SHARE if self._mean else 1.0
        self._mean += share * (n_tokens - self._mean)
        self._mean_square += share * (n_tokens**2 - self._mean_square)


# More tokens than any batch has.
MANY: Final = 1 << 31
