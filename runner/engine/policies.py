"""Who is next: pure functions of the lines, one a tier, and of the turns that others have had."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

from runner.engine.line import Line
from runner.engine.places import W, aged_place, place_of
from runner.engine.sequence import Sequence

# Of so many slots given to others while an aged request of a lower tier waits, the next one is its own.
TURNS_BEFORE_AGED: Final = 3
# Of so many slots given to others of its tier while a parked sequence waits, the next one goes to whoever was parked longest ago.
TURNS_BEFORE_PARKED: Final = 3


class Given(NamedTuple):
    """How many slots were given away since an aged request, and since a parked one, got the last."""

    since_aged: int = 0
    since_parked: int = 0


def first_come(lines: Seq[Line[W]], given: Given) -> W | None:
    """By arrival alone."""
    return min((line.oldest for line in lines if line.oldest is not None), key=place_of, default=None)


def by_priority(lines: Seq[Line[W]], given: Given) -> W | None:
    """By arrival plus the tier's slack."""
    return min((line.oldest for line in lines if line.oldest is not None), key=aged_place, default=None)


def by_share(lines: Seq[Line[W]], given: Given) -> W | None:
    """The best tier's least charged client, now and then whoever was parked there longest ago, whatever its client is charged.

    And now and then a request of a lower tier that has waited out the difference of the slacks.
    """
    best = next((line for line in lines if not line.is_empty), None)
    if best is None:
        return None
    is_parked_due = given.since_parked >= TURNS_BEFORE_PARKED and best.longest_parked is not None
    chosen = best.longest_parked if is_parked_due else best.least_charged
    if given.since_aged >= TURNS_BEFORE_AGED:
        aged = by_priority([line for line in lines if line.tier > best.tier], given)
        if aged is not None and chosen is not None and aged_place(aged) < aged_place(chosen):
            return aged
    return chosen


Policy = Callable[[Seq[Line[Sequence]], Given], Sequence | None]
POLICIES: Final[dict[str, Policy]] = {"fair": by_share, "priority": by_priority, "fcfs": first_come}
