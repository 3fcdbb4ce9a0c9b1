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

    May be refused: then both slots are empty, and the chains have changed places all the same.
    """

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Park:
    """Keep the sampler chain of `slot_id` under `ticket` and, where `keeps_cells`, a copy of its cells in host memory.

    The slot keeps its cells. May be refused: then the chain alone is kept.
    """

    slot_id: int
    ticket: str
    keeps_cells: bool


@dataclass(frozen=True, slots=True)
class Unpark:
    """Give `slot_id` the chain that was kept under `ticket` and, where `has_cells`, its cells in place of what was there.

    May be refused: then the slot is empty, and has the chain.
    """

    ticket: str
    slot_id: int
    has_cells: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget what is kept under `ticket`. Never refused."""

    ticket: str


KvOp = Trim | Swap | Park | Unpark | Drop
