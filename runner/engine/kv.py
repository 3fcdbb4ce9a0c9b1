"""What the scheduler asks of the KV cells before a batch is decoded."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trim:
    """Drop the cells of `slot_id` at positions >= `keep`. May be refused: then the slot was emptied instead."""

    slot_id: int
    keep: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Exchange the cells and the sampler chains of two slots: nothing is lost, a cached prefix changes places with a sequence.

    May be refused: then both slots are empty.
    """

    source: int
    target: int


KvOp = Trim | Swap
