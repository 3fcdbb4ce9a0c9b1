"""A back end that counts: which cells there are, never what is in them. It fails where llama.cpp would abort or mix up answers."""

from collections.abc import Iterable, Sequence
from typing import Final

from runner.engine.batch import BatchPlan, Outcome
from runner.engine.kv import Copy, Drop, Forget, Fork, KvOp, Load, Park, Save, Swap, Trim, Unpark
from runner.engine.sampling import SamplingParams

TOKEN: Final = 1


class Mute:
    """A vocabulary whose tokens have no text and end nothing."""

    def piece(self, token: int) -> bytes:
        """Nothing."""
        return b""

    def is_eog(self, token: int) -> bool:
        """Never."""
        return False


class CountedCells:
    """Cells of slots 0 to n-1, by number."""

    def __init__(self, n_slots: int, *, n_ctx: int, n_batch: int) -> None:
        self._n_cells = [0] * n_slots
        self._chains: set[str] = set()
        self._states: dict[int, int] = {}
        self._n_ctx, self._n_batch = n_ctx, n_batch
        self._sampled: list[list[int]] = [[TOKEN] * n for n in range(n_slots + 1)]

    def apply(self, ops: Iterable[KvOp]) -> list[KvOp]:
        """Carry out all."""
        cells = self._n_cells
        for op in ops:
            match op:
                case Trim(slot_id, keep):
                    assert keep <= cells[slot_id], f"slot {slot_id}: {keep} of {cells[slot_id]} cells cannot be kept"
                    cells[slot_id] = keep
                case Swap(source, target):
                    cells[source], cells[target] = cells[target], cells[source]
                case Fork(source, target, keep) | Copy(source, target, keep):
                    assert source != target
                    assert keep <= cells[source]
                    cells[target] = keep
                case Save(slot_id, state_id):
                    assert state_id not in self._states, f"state {state_id} is saved twice"
                    self._states[state_id] = cells[slot_id]
                case Load(state_id, slot_id):
                    cells[slot_id] = self._states[state_id]
                case Forget(state_id):
                    self._states.pop(state_id, None)
                case Park(_, ticket):
                    assert ticket not in self._chains, f"{ticket} is parked twice"
                    self._chains.add(ticket)
                case Unpark(ticket) | Drop(ticket):
                    self._chains.remove(ticket)
        return []

    def decode(self, plan: BatchPlan) -> Outcome:
        """Make the cells. No position twice, none left out, none beyond the slot's end."""
        cells = self._n_cells
        n_rows, last = 0, -1
        for slot_id, pos, tokens, _, _ in plan.chunks:
            assert slot_id > last, "rows in ascending slot id, one chunk a slot"
            assert pos == cells[slot_id], f"slot {slot_id}: a chunk at {pos}, {cells[slot_id]} cells"
            n, last = len(tokens), slot_id
            n_rows += n
            cells[slot_id] = pos + n
            assert pos + n <= self._n_ctx
        assert 0 < n_rows <= self._n_batch
        return Outcome.DONE

    def sample(self, plan: BatchPlan) -> list[int]:
        """The same token for everybody."""
        n = 0
        for chunk in plan.chunks:
            n += chunk.has_logits
        return self._sampled[n]

    def open_sampler(self, slot_id: int, sampling: SamplingParams, prompt_tail: Sequence[int], *, ignore_eos: bool) -> None:
        """Nothing is sampled."""

    def n_cells(self, slot_id: int) -> int:
        """Cells that are there."""
        return self._n_cells[slot_id]

    def broken_invariant(self, slot_id: int, n_tokens: int) -> str | None:
        """By number."""
        n_cells = self._n_cells[slot_id]
        return None if n_cells == n_tokens else f"the slot has {n_cells} cells, its tokens are {n_tokens}"

    def n_moved(self, ops: Iterable[KvOp]) -> int:
        """Cells that these operations copy, asked before they are carried out."""
        n = 0
        for op in ops:
            match op:
                case Swap(source, target):
                    n += self._n_cells[source] + self._n_cells[target]
                case Save(slot_id):
                    n += self._n_cells[slot_id]
                case Load(state_id):
                    n += self._states.get(state_id, 0)
                case Copy(source):
                    n += 2 * self._n_cells[source]
                case Fork():
                    n += self._n_ctx
        return n

    @property
    def n_parked(self) -> int:
        """Chains that nobody has given back."""
        return len(self._chains)
