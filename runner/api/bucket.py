"""A client's tokens a minute."""


class TokenBucket:
    """Holds the tokens of one minute and gains them back evenly.

    What a request costs is known only while it runs, so a bucket may be overdrawn: then the next one waits until the debt is paid.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._size = float(per_minute)
        self._level = self._size
        self._at = now

    def level(self, now: float) -> float:
        """Tokens left; negative where it is overdrawn."""
        self._level = min(self._size, self._level + self._gain(now - self._at))
        self._at = now
        return self._level

    def take(self, n_tokens: int, now: float) -> None:
        """Take tokens out, or give some back (negative)."""
        self._level = min(self._size, self.level(now) - n_tokens)

    def is_full(self, now: float) -> bool:
        """Whether it says nothing of its client."""
        return self.level(now) >= self._size

    def wait_s(self, now: float, level: float) -> float:
        """Until it holds so many tokens, where nobody takes any."""
        return max(0.0, (level - self.level(now)) * 60.0 / self._size)

    def reset_s(self, now: float) -> float:
        """Until it is full."""
        return self.wait_s(now, self._size)

    def _gain(self, seconds: float) -> float:
        return max(0.0, seconds) * self._size / 60.0
