"""The slots: who holds one, which tokens lie in its cells, and which one a new sequence should get."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from runner.engine.prefix import n_shared
from runner.engine.sequence import Sequence

# A cached token is worth this share of a token that must be computed now, and half of it after each half-life without use:
# its owner may come back, the newcomer is here.
CACHED_TOKEN_WORTH = 0.25
CACHE_HALF_LIFE_S = 120.0
# What a slot away from the busy ones costs, in computed tokens: until it is moved, each decode step needs one more pass.
APART_COST = 8.0


@dataclass(slots=True, eq=False)
class Slot:
    """One llama.cpp sequence id. `tokens[i]` lies in the cell at position i; only the scheduler changes it."""

    slot_id: int
    tokens: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    used_at: float = 0.0

    @property
    def is_free(self) -> bool:
        """Whether no sequence holds the slot (its cells may still be worth something)."""
        return self.sequence is None


@dataclass(frozen=True, slots=True)
class Placement:
    """A free slot for a prompt, and how many of its first tokens are already there."""

    slot: Slot
    keep: int


class SlotPool:
    """All slots of the engine. The only writer of `slot.sequence`."""

    def __init__(self, n_slots: int) -> None:
        self.slots = tuple(Slot(slot_id) for slot_id in range(n_slots))
        self._n_free = n_slots

    def __getitem__(self, slot_id: int) -> Slot:
        return self.slots[slot_id]

    @property
    def has_free(self) -> bool:
        """Whether a sequence can be placed."""
        return self._n_free > 0

    def place(self, prompt: Seq[int], *, may_reuse: bool, now: float, needs_logits: bool = True) -> Placement | None:
        """The free slot that costs least: tokens to compute, cached tokens of others lost, distance from the busy slots.

        Where it `needs_logits`, the last token is always decoded again: they seed the first sample.
        """
        most = len(prompt) - needs_logits
        best: tuple[float, float, int] | None = None
        chosen: Placement | None = None
        nobody_is_busy = self._n_free == len(self.slots)
        for slot in self.slots:
            if not slot.is_free:
                continue
            keep = min(n_shared(slot.tokens, prompt), most) if may_reuse else 0
            n_lost = len(slot.tokens) - keep
            worth = CACHED_TOKEN_WORTH * 0.5 ** (max(0.0, now - slot.used_at) / CACHE_HALF_LIFE_S)
            cost = (len(prompt) - keep) + n_lost * worth + (0.0 if nobody_is_busy or self._joins_a_run(slot) else APART_COST)
            rank = (cost, slot.used_at, slot.slot_id)
            if best is None or rank < best:
                best, chosen = rank, Placement(slot, keep)
        return chosen

    def bind(self, slot: Slot, sequence: Sequence) -> None:
        """Give a free slot to a sequence."""
        assert slot.is_free
        slot.sequence = sequence
        sequence.slot_id = slot.slot_id
        self._n_free -= 1

    def release(self, slot: Slot, now: float) -> None:
        """Take a slot back; its cells stay as a prefix cache."""
        assert slot.sequence is not None
        slot.sequence.slot_id = None
        slot.sequence = None
        slot.used_at = now
        self._n_free += 1

    def exchange(self, busy: Slot, free: Slot) -> None:
        """Let a sequence and its tokens change places with a free slot's."""
        sequence = busy.sequence
        assert sequence is not None
        assert free.is_free
        busy.sequence, free.sequence = None, sequence
        busy.tokens, free.tokens = free.tokens, busy.tokens
        busy.used_at, free.used_at = free.used_at, busy.used_at
        sequence.slot_id = free.slot_id

    def _joins_a_run(self, slot: Slot) -> bool:
        return any(
            0 <= neighbour < len(self.slots) and not self.slots[neighbour].is_free for neighbour in (slot.slot_id - 1, slot.slot_id + 1)
        )
