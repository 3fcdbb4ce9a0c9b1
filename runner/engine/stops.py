"""Stop strings over a text that arrives in pieces.

stop    "9, 10, 11"
text    "7, 8, 9, 10"
        release ^ hold: it may still become the stop string
"""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string that becomes complete, however the text is split.

    Of two stop strings that end at the same character the longer one counts, so the result depends on the text alone
    and not on how it was cut into pieces.
    """

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return what can be released. Once `matched` is set, everything from the stop string on is gone."""
        if not self._stops:
            return text
        assert self.matched is None
        if not text:
            return ""
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            start, self.matched = match
            self._held = ""
            return buffer[:start]
        keep = self._n_held(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """Return what was held back: the generation ended and no stop string did."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _n_held(self, buffer: str) -> int:
        """The length of the longest tail of `buffer` that begins a stop string."""
        longest = min(len(buffer), max(map(len, self._stops)) - 1)
        for n in range(longest, 0, -1):
            tail = buffer[-n:]
            if any(stop.startswith(tail) for stop in self._stops):
                return n
        return 0
