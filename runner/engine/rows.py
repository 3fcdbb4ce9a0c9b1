"""Which rows a step computes.

A step is either one token for every decoding sequence, or a chunk of a prompt. They take turns, so a stream waits for at most one chunk,
whose size the budget chooses. They share a step only where that is cheaper by what passes cost here: where slots have cells of their own
llama.cpp would mostly split them into the same passes, and chain a chunk with its decoding neighbours so that those pay for the longer
context (docs/decisions).
"""

from collections.abc import Sequence as Seq
from collections.abc import Set
from typing import Final

from runner.engine.batch import BatchPlan, Chunk, Split, count_passes, passes
from runner.engine.budget import PromptBudget
from runner.engine.capacity import padded
from runner.engine.cells import Slot
from runner.engine.costs import Rows, StepCosts
from runner.engine.memory import KvMemory
from runner.engine.sequence import Sequence

# Of decode steps that are all alike.
_LEARN_EVERY: Final = 8


class RowChooser:
    """Chooses from the running sequences, and learns what the choice has cost."""

    def __init__(self, memory: KvMemory, costs: StepCosts, budget: PromptBudget) -> None:
        self._memory, self._costs, self._budget = memory, costs, budget
        self._split = memory.kind.split
        self._prompt_is_due = False
        # Rows of the last step where it was one of streams alone, and how many steps like it came since one was learned from.
        self._n_alike = self._n_unlearned = 0

    @property
    def prompt_is_due(self) -> bool:
        """Whether the streams have had their turn."""
        return self._prompt_is_due

    def decode_chunks(self, decoding: Seq[Sequence]) -> list[Chunk]:
        """A token for each."""
        return sorted(map(self.decode_chunk, decoding))

    def prompt_chunks(self, prefilling: list[Sequence], decoding: Seq[Sequence]) -> list[Chunk]:
        """Prompts, beside the streams where that is cheaper than a step of their own."""
        prefilling.sort(key=self._memory.following.place_of)
        decode = self.decode_chunks(decoding)
        first = self._slot_of(prefilling[0])
        beside = self._rows_of(decode) if decode else None
        n_rows = self._budget.n_rows(self._context_of(first), beside)
        chunks = self._adjacent_chunks(prefilling, n_rows, beside)
        joined = sorted([*decode, *chunks])
        return joined if decode and self._is_cheaper(joined, decode, chunks) else chunks

    def learn(self, plan: BatchPlan, seconds: float) -> None:
        """Take the time that a plan's rows took. Of decode steps that are all alike every eighth is enough: they have no time for more."""
        chunks = plan.chunks
        if not chunks:
            return
        n_prompt_rows = plan.n_prompt_rows
        self._prompt_is_due = n_prompt_rows < plan.n_rows
        is_alike = n_prompt_rows == 0 and len(chunks) == self._n_alike
        self._n_unlearned = self._n_unlearned + 1 if is_alike else 0
        self._n_alike = 0 if n_prompt_rows else len(chunks)
        if self._n_unlearned % _LEARN_EVERY == 0:
            self._costs.learn(plan, seconds)

    def prompt_chunk(self, sequence: Sequence, n_rows: int) -> Chunk:
        """The next so many tokens of a prompt, or all that are left."""
        slot = self._slot_of(sequence)
        pos = len(slot.tokens)
        script = sequence.script
        end = min(self._stop_of(sequence, pos), pos + n_rows)
        return Chunk(slot.slot_id, pos, script[pos:end], has_logits=end == len(script) and sequence.pending is None, is_prompt=True)

    def decode_chunk(self, sequence: Sequence) -> Chunk:
        """The token that was sampled last."""
        slot = self._slot_of(sequence)
        assert sequence.pending is not None
        return Chunk(slot.slot_id, len(slot.tokens), (sequence.pending,), has_logits=True)

    def _stop_of(self, sequence: Sequence, pos: int) -> int:
        """Where the chunk behind `pos` must end: before the last token too, where a checkpoint is taken there."""
        n_script = len(sequence.script)
        end = n_script - 1 if self._memory.kind.needs_marks and pos < n_script - 1 else n_script
        stop = self._memory.following.next_stop(sequence, pos)
        return end if stop is None else min(end, stop)

    def _adjacent_chunks(self, prefilling: Seq[Sequence], n_rows: int, beside: Rows | None) -> list[Chunk]:
        """The first prompt's chunk, and of prompts that share its passes what the budget leaves.

        Where only adjacent slots do, another prompt would be a pass of its own, and may as well have a step of its own.
        """
        ids = {self._slot_of(sequence).slot_id for sequence in prefilling}
        run = _run_around(self._slot_of(prefilling[0]).slot_id, ids) if self._split is Split.ADJACENT else ids
        chunks: list[Chunk] = []
        for sequence in prefilling:
            slot = self._slot_of(sequence)
            if n_rows > 0 and slot.slot_id in run:
                n_left = len(sequence.script) - len(slot.tokens)
                chunks.append(self.prompt_chunk(sequence, self._budget.chunk_rows(n_left, n_rows, self._context_of(slot), beside)))
                n_rows -= len(chunks[-1].tokens)
        return sorted(chunks)

    def _is_cheaper(self, joined: list[Chunk], decode: list[Chunk], prompt: list[Chunk]) -> bool:
        """Whether one step takes fewer passes than the two, and less time by what such passes have taken here.

        Never where a stream would pay for a longer context than the longest of theirs: what that costs is not known before.
        """
        if sum(len(chunk.tokens) for chunk in joined) > self._budget.max_rows:
            return False
        if padded(self._longest(prompt)) > padded(self._longest(decode)):
            return False
        if self._n_passes(joined) >= self._n_passes(decode) + self._n_passes(prompt):
            return False
        apart_s = _sum([self._costs.known_decode_s(self._rows_of(decode)), *self._passes_s(prompt)])
        together_s = _sum(self._passes_s(joined))
        return apart_s is not None and together_s is not None and together_s < apart_s

    def _pass_s(self, one: tuple[int, int, int]) -> float | None:
        n_rows, n_slots, longest = one
        rows = Rows(n_rows, 1, longest)
        return self._costs.known_decode_s(rows) if n_rows == n_slots else self._costs.prompt_s(rows)

    def _passes_s(self, chunks: Seq[Chunk]) -> list[float | None]:
        return [*map(self._pass_s, passes(chunks, self._split, self._memory.n_attended))]

    def _n_passes(self, chunks: Seq[Chunk]) -> int:
        return count_passes([(chunk.slot_id, len(chunk.tokens)) for chunk in chunks], self._split)

    def _rows_of(self, decode: Seq[Chunk]) -> Rows:
        return Rows(len(decode), self._n_passes(decode), self._longest(decode))

    def _longest(self, chunks: Seq[Chunk]) -> int:
        return max(self._memory.n_attended, *(chunk.pos + 1 for chunk in chunks))

    def _context_of(self, slot: Slot) -> int:
        return max(self._memory.n_attended, len(slot.tokens))

    def _slot_of(self, sequence: Sequence) -> Slot:
        assert sequence.slot_id is not None
        return self._memory.pool[sequence.slot_id]


def _sum(parts: Seq[float | None]) -> float | None:
    """None where one of them is not known."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _run_around(slot_id: int, ids: Set[int]) -> range:
    """The consecutive ids around `slot_id`."""
    first = last = slot_id
    while first - 1 in ids:
        first -= 1
    while last + 1 in ids:
        last += 1
    return range(first, last + 1)
