"""One step's work as a value."""

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from runner.engine.kv import KvOp


class Chunk(NamedTuple):
    """Consecutive tokens of one slot: a single one while it decodes, a piece of the prompt while it prefills.

    `tokens[i]` gets the cell at position `pos + i`. Where `has_logits`, the last token's logits are sampled from.
    `is_prompt`: the tokens are a prompt's (or were generated before their cells were lost); else the last one that was sampled.
    """

    slot_id: int
    pos: int
    tokens: Sequence[int]
    has_logits: bool
    is_prompt: bool = False


class Split(Enum):
    """Which rows of a batch llama.cpp lets share a pass over the weights (a ubatch).

    ADJACENT: those of consecutive slots, as many of each as the shortest has (`split_equal` with `sequential`), where each slot has a
    region of cells. Where all share one pool, SIMPLE: all (`split_simple`), or, of memories with a recurrent state, EQUAL: of all slots
    as many of each as the shortest has (`split_equal`).
    """

    ADJACENT = "adjacent"
    EQUAL = "equal"
    SIMPLE = "simple"


class BatchPlan(NamedTuple):
    """What to do with the cells, then which rows to decode, in ascending slot id.

    `n_attended` cells of a shared pool are gone over for each row, whosever they are; 0: a row's own slot only.
    """

    kv_ops: tuple[KvOp, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    split: Split = Split.ADJACENT
    n_attended: int = 0

    @property
    def n_rows(self) -> int:
        """Tokens in the batch."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def n_prompt_rows(self) -> int:
        """Of these the tokens of prompts."""
        return sum(len(chunk.tokens) for chunk in self.chunks if chunk.is_prompt)

    @property
    def n_outputs(self) -> int:
        """Rows whose logits are sampled from."""
        return [chunk.has_logits for chunk in self.chunks].count(True)

    @property
    def n_passes(self) -> int:
        """How often llama.cpp goes over the weights for this batch (see `count_passes`)."""
        return count_passes([(chunk.slot_id, len(chunk.tokens)) for chunk in self.chunks], self.split)


def count_passes(rows: Sequence[tuple[int, int]], split: Split = Split.ADJACENT) -> int:
    """Passes (ubatches) for (slot id, number of tokens) in batch order.

    The rules of `llama_batch_allocr` in llama-batch.cpp, where a ubatch holds a whole batch. ADJACENT: a pass starts with the first slot
    that has tokens left, takes each following one whose id is the next number, and goes as deep as the shortest of them.
    """
    if len(rows) <= 1:
        return len(rows)
    if split is Split.SIMPLE:
        return 1
    if split is Split.EQUAL:
        return len({n for _, n in rows})
    if all(n == 1 for _, n in rows):
        # The step of every token: the number of runs of consecutive slots.
        return sum(i == 0 or slot_id != rows[i - 1][0] + 1 for i, (slot_id, _) in enumerate(rows))
    return sum(1 for _ in passes([Chunk(slot_id, 0, range(n), has_logits=False) for slot_id, n in rows], split))


def passes(chunks: Sequence[Chunk], split: Split = Split.ADJACENT, n_attended: int = 0) -> Iterator[tuple[int, int, int]]:
    """(rows, slots, longest context in tokens) of each pass; the rule is that of `count_passes`, `n_attended` that of `BatchPlan`."""
    left = [[chunk.slot_id, len(chunk.tokens), chunk.pos] for chunk in chunks]
    while left:
        group = [left[0]]
        for entry in left[1:]:
            if split is not Split.ADJACENT or entry[0] == group[-1][0] + 1:
                group.append(entry)
        depth = min(entry[1] for entry in group)
        n_rows = 0
        for entry in group:
            n = entry[1] if split is Split.SIMPLE else depth
            entry[1] -= n
            entry[2] += n
            n_rows += n
        yield n_rows, len(group), max(n_attended, *(entry[2] for entry in group))
        left = [entry for entry in left if entry[1] > 0]


class Outcome(Enum):
    """What llama_decode answered, in its own terms.

    DONE: all rows have their cells. NO_ROOM and INVALID: nothing changed. BROKEN (aborted or fatal): some cells may exist.
    """

    DONE = "done"
    NO_ROOM = "no room"
    INVALID = "invalid"
    BROKEN = "broken"
