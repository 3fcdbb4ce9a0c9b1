"""What the engine needs from whoever computes. `llama/backend.py` is the real one; the tests' fake models the cells."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from runner.engine.batch import BatchPlan, Outcome
from runner.engine.kv import KvOp
from runner.engine.sampling import SamplingParams


class Vocabulary(Protocol):
    """The two questions the engine has about a token."""

    def piece(self, token: int) -> bytes:
        """The bytes that `token` stands for in a text; empty for control tokens."""

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends a generation."""


class Backend(Protocol):
    """Cells, decode and sampling for slots 0 to n-1. Called from one thread only."""

    def apply(self, ops: Iterable[KvOp]) -> list[KvOp]:
        """Carry out `ops` in order; return those the cache refused (their slots are empty now)."""

    def decode(self, plan: BatchPlan) -> Outcome:
        """Compute the rows of `plan`. Never raises for what llama.cpp answers."""

    def sample(self, plan: BatchPlan) -> list[int]:
        """One token for each chunk with logits, in order. Only after `decode` returned DONE for the same plan."""

    def open_sampler(self, slot_id: int, sampling: SamplingParams, prompt_tail: Sequence[int], *, ignore_eos: bool) -> None:
        """Give a slot a new sampler chain in place of its last one; the penalties start with `prompt_tail`."""

    def n_cells(self, slot_id: int) -> int:
        """How many cells the slot really has: 0 when empty, else the largest position + 1."""

    def broken_invariant(self, slot_id: int, n_tokens: int) -> str | None:
        """What does not hold of a slot that should have the cells of so many tokens, as a sentence; None where all does."""
