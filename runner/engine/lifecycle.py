"""The states of a sequence and the only transitions between them."""

from enum import Enum, StrEnum
from typing import Final


class State(Enum):
    """Where a sequence is. A slot is held in PREFILL and DECODE and nowhere else.

    PARKED: it had a slot and waits for the next one; its cells are kept in host memory or will be computed again.
    """

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    PARKED = "parked"
    FINISHED = "finished"


class Reason(StrEnum):
    """Why a sequence ended. STOP and LENGTH are the `finish_reason` of the wire, the others end in an error or nothing."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


TRANSITIONS: Final[frozenset[tuple[State, State]]] = frozenset(
    {
        (State.QUEUED, State.PREFILL),
        (State.QUEUED, State.FINISHED),
        (State.PREFILL, State.DECODE),
        (State.PREFILL, State.PARKED),
        (State.PREFILL, State.FINISHED),
        (State.DECODE, State.PARKED),
        (State.DECODE, State.FINISHED),
        (State.PARKED, State.PREFILL),
        (State.PARKED, State.DECODE),
        (State.PARKED, State.FINISHED),
    }
)
