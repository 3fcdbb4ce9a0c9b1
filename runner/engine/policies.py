"""Who is next: pure functions of the lines, one a tier, and of the number of turns since the last aged request."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

from runner.engine.line import Line
from runner.engine.places import aged_place, place_of
from runner.engine.sequence import Sequence

# Of so many slots given to others while an aged request of a lower tier waits, the next one is its own.
TURNS_BEFORE_AGED: Final = 3


def first_come(lines: Seq[Line], n_turns: int) -> Sequence | None:
    """By arrival alone."""
    return min((line.oldest for line in lines if line.oldest is not None), key=place_of, default=None)


def by_priority(lines: Seq[Line], n_turns: int) -> Sequence | None:
    """By arrival plus the tier's slack."""
    return min((line.oldest for line in lines if line.oldest is not None), key=aged_place, default=None)


def by_share(lines: Seq[Line], n_turns: int) -> Sequence | None:
    """The best tier's least charged client; now and then a request of a lower tier that has waited out the difference of the slacks."""
    best = next((line for line in lines if not line.is_empty), None)
    if best is None:
        return None
    chosen = best.least_charged
    if n_turns >= TURNS_BEFORE_AGED:
        aged = by_priority([line for line in lines if line.tier > best.tier], n_turns)
        if aged is not None and chosen is not None and aged_place(aged) < aged_place(chosen):
            return aged
    return chosen


Policy = Callable[[Seq[Line], int], Sequence | None]
POLICIES: Final[dict[str, Policy]] = {"fair": by_share, "priority": by_priority, "fcfs": first_come}
