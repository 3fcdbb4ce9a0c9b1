"""Tokens whose cells exist: in a slot, or as a copy in host memory."""

from dataclasses import dataclass, field

from runner.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Mark:
    """A checkpoint: what is needed to cut the cells back to the first `pos` lies in host memory."""

    pos: int
    state_id: int
    n_bytes: int


@dataclass(slots=True, eq=False)
class Cells:
    """`tokens[i]` lies in the cell at position i. Only `KvMemory` and its `SlotPool` change it.

    `domain` is the trust domain of whoever's tokens they are, `session` a name of its choice, `used_at` when they were of use last.
    """

    tokens: list[int] = field(default_factory=list)
    domain: str = ""
    session: str = ""
    used_at: float = 0.0
    marks: list[Mark] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        """What it has, and will have."""
        return self.tokens


@dataclass(slots=True, eq=False)
class Slot(Cells):
    """The cells of one llama.cpp sequence id. `is_pending`: a copy from or to them, or a shift of theirs, is queued in llama.cpp.

    `is_shifted`: they were computed with tokens that are gone, so they are of use to their own sequence and to nobody else.
    """

    slot_id: int = -1
    sequence: Sequence | None = None
    is_pending: bool = False
    is_shifted: bool = False

    @property
    def is_free(self) -> bool:
        """Whether no sequence holds the slot (its cells may still be worth something)."""
        return self.sequence is None

    @property
    def known(self) -> list[int]:
        """A prompt that is being computed counts whole; of a shifted slot nobody may know."""
        if self.is_shifted:
            return []
        script = self.sequence.script if self.sequence is not None else self.tokens
        return script if len(script) > len(self.tokens) else self.tokens


@dataclass(slots=True, eq=False)
class HostCells(Cells):
    """A copy in host memory. That of a parked sequence, its `owner`, and one that is pinned are never given up for others.

    `worth` orders those that may be, `is_in_use` while one is being copied from.
    """

    state_id: int = -1
    n_bytes: int = 0
    worth: float = 0.0
    owner: Sequence | None = None
    is_pinned: bool = False
    is_in_use: bool = False

    @property
    def may_go(self) -> bool:
        """Whether it may be given up for another."""
        return self.owner is None and not (self.is_pinned or self.is_in_use)
