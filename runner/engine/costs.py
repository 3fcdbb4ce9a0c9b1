"""What a step costs on this machine, learned from the steps that were made.

    decode step    passes, rows, rows x longest context     level for each (rows, passes)
    prompt step    passes, rows, rows x longest context     one level; chunks of few rows have a fit of their own
    cells moved    bytes

Rows of the two kinds have coefficients of their own: a decode row reads its cells alone, and needs logits. The longest context is that of
a pass, in tokens, padded as llama.cpp pads it.
"""

import math
from typing import NamedTuple

from runner.engine.batch import BatchPlan
from runner.engine.capacity import padded
from runner.engine.fit import Fit

# A chunk of fewer rows says little about a row of a prompt.
LEAST_ROWS = 8
# llama.cpp's flash attention has its fast kernel from so many rows a sequence on: behind 2,600 tokens 60 rows take 0.32 s and 64 take
# 0.17 s (docs/log.md).
FAST_ROWS = 64
# How much more of the context each of fewer rows costs, until it was measured behind one at least half as long.
_FEW_CELL_FACTOR = 5.0


class Rows(NamedTuple):
    """Rows of one kind in a step: how many, in how many passes, and the longest context of their slots."""

    n_rows: int
    n_passes: int
    longest: int

    @property
    def amounts(self) -> tuple[float, float, float]:
        """What a fit sees."""
        return float(self.n_passes), float(self.n_rows), float(self.n_rows * padded(self.longest))


class StepCosts:
    """All that one engine has learned. Seconds everywhere; None before there was a measurement."""

    def __init__(self) -> None:
        self._decode = Fit(3, first=1)
        self._prompt = Fit(3, first=1)
        self._few = Fit(3, first=1)
        self._move = Fit(1, first=0)
        self._longest = self._longest_few = 0

    def learn(self, plan: BatchPlan, seconds: float) -> None:
        """Take the time of the plan's rows, without that of its moves. A clock that has not moved teaches nothing."""
        if seconds <= 0.0:
            return
        prompts = [chunk for chunk in plan.chunks if chunk.is_prompt]
        decodes = plan.chunks if not prompts else [chunk for chunk in plan.chunks if not chunk.is_prompt]
        if decodes:
            longest = max(plan.n_attended, max([chunk.pos for chunk in decodes]) + 1)
            rows = Rows(len(decodes), plan.n_passes if not prompts else 1, longest)
            if prompts:
                seconds -= self.decode_s(rows) or 0.0
            else:
                self._decode.learn(rows.amounts, seconds, (rows.n_rows, rows.n_passes))
        if prompts and seconds > 0.0:
            n_rows = sum(len(chunk.tokens) for chunk in prompts)
            longest = max(plan.n_attended, *(chunk.pos + len(chunk.tokens) for chunk in prompts))
            self._longest = max(self._longest, longest)
            if n_rows >= LEAST_ROWS:
                is_few = max(len(chunk.tokens) for chunk in prompts) < FAST_ROWS
                fit = self._few if is_few else self._prompt
                self._longest_few = max(self._longest_few, longest * is_few)
                fit.learn(Rows(n_rows, max(1, plan.n_passes - bool(decodes)), longest).amounts, seconds)

    def learn_move(self, n_bytes: int, seconds: float) -> None:
        """Take the time of copies from or to host memory."""
        if n_bytes and seconds > 0.0:
            self._move.learn((float(n_bytes),), seconds)

    def decode_s(self, rows: Rows) -> float | None:
        """A step that gives each of so many sequences a token."""
        return self._decode.seconds(rows.amounts, rows[:2]) if self._decode.has_learned else None

    def known_decode_s(self, rows: Rows) -> float | None:
        """The same, where so many rows in so many passes were measured: a guess is off by a factor of two where kernels change."""
        return self.decode_s(rows) if self._decode.has_measured(rows[:2]) else None

    def prompt_s(self, rows: Rows) -> float | None:
        """A chunk of a prompt."""
        fit = self._fit_of(rows.n_rows)
        return fit.seconds(rows.amounts) if fit.has_learned else None

    def prompt_row_s(self) -> float | None:
        """A row of a prompt behind a short context, about, in chunks of the size that was seen."""
        rows = Rows(4 * FAST_ROWS, 1, 4 * FAST_ROWS) if self._prompt.has_learned else Rows(FAST_ROWS // 2, 1, FAST_ROWS)
        seconds = self.prompt_s(rows)
        return None if seconds is None else seconds / rows.n_rows

    def move_s(self, n_bytes: int) -> float | None:
        """To copy cells of so many bytes once."""
        return self._move.seconds((float(n_bytes),)) if self._move.has_learned else None

    def prompt_rows(self, seconds: float, at: int, *, few: bool = False) -> float | None:
        """How many rows of a prompt behind `at` tokens of context fit into the time; 0 where not even their pass does.

        Infinite where rows cost nothing beside their pass. `few`: as rows of a chunk of less than FAST_ROWS cost.
        """
        knows_few = 2 * self._longest_few >= at
        fit = self._few if few and knows_few else self._prompt
        if not fit.has_learned:
            return None
        pass_s, row_s, cell_s = fit.coefficients
        if few and not knows_few:
            cell_s *= _FEW_CELL_FACTOR
        left_s = seconds / fit.scale() - pass_s
        if left_s <= 0.0:
            return 0.0
        # rows (row_s + cell_s (at + rows)) = left_s, with half of the padding on top of the context.
        first_s = row_s + cell_s * (at + 128)
        # In the form that takes no difference of two numbers which may be nearly the same.
        twice_mean_s = first_s + math.sqrt(first_s * first_s + 4.0 * cell_s * left_s)
        return 2.0 * left_s / twice_mean_s if twice_mean_s > 0.0 else math.inf

    def rows_worth_a_pass(self, at: int) -> float:
        """How many rows of a prompt cost as much as the pass that they share: fewer than these waste more than half of it."""
        pass_s, row_s, cell_s = self._prompt.coefficients
        per_row_s = row_s + cell_s * padded(at + 1)
        return pass_s / per_row_s if per_row_s > 0.0 else math.inf

    def longest_step_s(self, max_rows: int) -> float | None:
        """What the slowest step should take: a whole batch of a prompt behind the longest context so far, or a decode step."""
        prompt_s = self.prompt_s(Rows(max_rows, 1, max(self._longest, max_rows)))
        return None if prompt_s is None else max(prompt_s, self._decode.level_s)

    def _fit_of(self, n_rows: int) -> Fit:
        return self._few if n_rows < FAST_ROWS and self._few.has_learned else self._prompt
