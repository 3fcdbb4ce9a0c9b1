"""What the scheduler asks of the KV cells before a batch is decoded.

A ticket stands for a sampler chain without a slot, a state id for cells (or a checkpoint) in host memory. What is refused leaves the slot
that it should have changed empty, and its tokens are computed again.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trim:
    """Drop the cells of `slot_id` at positions >= `keep`. May be refused."""

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
class Fork:
    """Give `target` the first `keep` cells of `source` in place of its own. May be refused.

    In partitioned mode llama.cpp copies the whole slot, whatever of it is used, and only at the next decode: until then nobody may save,
    load, copy or swap either of the two, nor fork into them.
    """

    source: int
    target: int
    keep: int


@dataclass(frozen=True, slots=True)
class Copy:
    """The same at once, through host memory: the used cells of `source` only, twice. May be refused."""

    source: int
    target: int
    keep: int


@dataclass(frozen=True, slots=True)
class Save:
    """Keep a copy of the cells of `slot_id` in host memory. May be refused: then nothing is kept, and the slot has its cells."""

    slot_id: int
    state_id: int


@dataclass(frozen=True, slots=True)
class Load:
    """Give `slot_id` the cells that were saved, in place of its own; they stay in host memory. May be refused."""

    state_id: int
    slot_id: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Keep in host memory what cannot be cut out of the cells of `slot_id` later: a sliding window's cells, a recurrent state.

    May be refused: then nothing is kept.
    """

    slot_id: int
    state_id: int


@dataclass(frozen=True, slots=True)
class Rewind:
    """Cut the cells of `slot_id` to the `keep` that there were at a checkpoint of the same tokens, and bring that back. May be refused."""

    state_id: int
    slot_id: int
    keep: int


@dataclass(frozen=True, slots=True)
class Shift:
    """Take `discard` cells behind the first `keep` out of `slot_id`, and let those behind them move up. May be refused.

    llama.cpp turns the keys at the next decode: until then nobody may save, load, copy or swap the slot. What is left is not what the
    tokens left would give anew: it was computed with what is gone.
    """

    slot_id: int
    keep: int
    discard: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody needs the state or checkpoint any more. Never refused, also where it was never saved."""

    state_id: int


@dataclass(frozen=True, slots=True)
class Park:
    """Keep the sampler chain of `slot_id` under `ticket`. Never refused."""

    slot_id: int
    ticket: str


@dataclass(frozen=True, slots=True)
class Unpark:
    """Give `slot_id` the chain that was kept under `ticket`. Never refused."""

    ticket: str
    slot_id: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the chain that is kept under `ticket`. Never refused."""

    ticket: str


KvOp = Trim | Swap | Fork | Copy | Save | Load | Checkpoint | Rewind | Shift | Forget | Park | Unpark | Drop
