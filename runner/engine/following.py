"""Who waits for the cells that another's prompt is computing.

A follower has a slot and counts as in PREFILL, but computes nothing until its leader has computed what both begin with; then it gets a copy
of that and goes on. A leader that is ended, parked or through with its prompt has no followers: they go on with what it left.
"""

from collections.abc import Callable, Iterable
from typing import Final

from runner.engine.places import Key, aged_place
from runner.engine.sequence import Sequence

# For fewer tokens nobody waits.
LEAST_FOLLOWED: Final = 16


class Following:
    """All pairs of one engine."""

    def __init__(self) -> None:
        self._leaders: dict[Sequence, tuple[Sequence, int]] = {}
        self._followers: dict[Sequence, list[Sequence]] = {}

    def root_of(self, sequence: Sequence) -> Sequence:
        """Itself, or the one behind whom it waits in the end."""
        while sequence in self._leaders:
            sequence = self._leaders[sequence][0]
        return sequence

    def follow(self, sequence: Sequence, leader: Sequence, n: int) -> None:
        """Wait until `leader` has computed `n` tokens: until its own leader has, where it gets those from there."""
        while leader in self._leaders and n <= self._leaders[leader][1]:
            leader = self._leaders[leader][0]
        self._leaders[sequence] = leader, n
        self._followers.setdefault(leader, []).append(sequence)

    def is_waiting(self, sequence: Sequence) -> bool:
        """Whether it computes nothing."""
        return sequence in self._leaders

    def n_awaited(self, sequence: Sequence) -> int:
        """How many first tokens it waits for; 0 where it has no leader."""
        return self._leaders[sequence][1] if sequence in self._leaders else 0

    def leave(self, sequence: Sequence) -> None:
        """It has no leader any more, if it had one."""
        leader, _ = self._leaders.pop(sequence, (None, 0))
        if leader is not None:
            self._followers[leader].remove(sequence)
            if not self._followers[leader]:
                del self._followers[leader]

    def ready(self, n_computed: Callable[[Sequence], int | None]) -> list[Sequence]:
        """Those whose leaders have computed enough, or (None) compute their prompts no more; they still wait until they leave."""
        found = []
        for sequence, (leader, n) in self._leaders.items():
            computed = n_computed(leader)
            if computed is None or computed >= n:
                found.append(sequence)
        return found

    def next_stop(self, leader: Sequence, at: int) -> int | None:
        """Where a chunk of the leader's prompt behind `at` tokens must end: a copy taken there needs not be cut."""
        stops = [n for follower in self._followers.get(leader, ()) if (n := self._leaders[follower][1]) > at]
        return min(stops, default=None)

    def is_awaited_at(self, leader: Sequence, n: int) -> bool:
        """Whether somebody waits for a copy of exactly the `n` tokens that it has computed."""
        return any(self._leaders[follower][1] == n for follower in self._followers.get(leader, ()))

    def place_of(self, sequence: Sequence) -> Key:
        """The best of its own place in the order of prompts and those of its followers."""
        return min(map(aged_place, [sequence, *self._all_behind(sequence)]))

    def led(self, tier: int) -> list[Sequence]:
        """The leaders of anybody of this tier or a better one."""
        return [leader for leader in self._followers if any(follower.tier <= tier for follower in self._all_behind(leader))]

    def _all_behind(self, leader: Sequence) -> Iterable[Sequence]:
        for follower in self._followers.get(leader, ()):
            yield follower
            yield from self._all_behind(follower)
