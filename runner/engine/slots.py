"""The slots: who holds one."""

from runner.engine.cells import Slot
from runner.engine.sequence import Sequence


class SlotPool:
    """All slots of the engine. The only writer of `slot.sequence`."""

    def __init__(self, n_slots: int) -> None:
        self.slots = tuple(Slot(slot_id=slot_id) for slot_id in range(n_slots))
        self._n_free = n_slots

    def __getitem__(self, slot_id: int) -> Slot:
        return self.slots[slot_id]

    @property
    def has_free(self) -> bool:
        """Whether a sequence can be placed."""
        return self._n_free > 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody holds a slot."""
        return self._n_free == len(self.slots)

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

    def exchange(self, a: Slot, b: Slot) -> None:
        """Let two slots change all that they hold."""
        a.sequence, b.sequence = b.sequence, a.sequence
        a.tokens, b.tokens = b.tokens, a.tokens
        a.marks, b.marks = b.marks, a.marks
        a.domain, b.domain = b.domain, a.domain
        a.session, b.session = b.session, a.session
        a.used_at, b.used_at = b.used_at, a.used_at
        a.is_shifted, b.is_shifted = b.is_shifted, a.is_shifted
        for slot in (a, b):
            if slot.sequence is not None:
                slot.sequence.slot_id = slot.slot_id

    def joins_a_run(self, slot: Slot) -> bool:
        """Whether a neighbour is busy."""
        return any(
            0 <= neighbour < len(self.slots) and not self.slots[neighbour].is_free for neighbour in (slot.slot_id - 1, slot.slot_id + 1)
        )
