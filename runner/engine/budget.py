"""How many prompt rows a step may take, so that the streams that decode meanwhile keep their pace."""

from typing import Final

from runner.engine.costs import FAST_ROWS, Rows, StepCosts

# Of a chunk beside streams, as long as the context is short.
LEAST_CHUNK: Final = 32
# From this context on, fewer rows than FAST_ROWS cost as much as those or more.
_LONG_CONTEXT: Final = 1024
# Finer steps of a chunk's size cost nothing a row (docs/log.md); coarser ones leave more of the gap unused.
_MULTIPLE: Final = 16
_EVEN_MULTIPLE: Final = 4


class PromptBudget:
    """Sizes prompt chunks by what steps cost here.

    `target_gap_s` is the gap between two tokens of a stream that should not be exceeded while a prompt is computed. `fixed_rows`, where
    it is not 0, is the size whatever it costs.
    """

    def __init__(self, costs: StepCosts, *, max_rows: int, target_gap_s: float, fixed_rows: int = 0) -> None:
        assert max_rows >= 1
        self._costs = costs
        self.max_rows = max_rows
        self._target_gap_s = target_gap_s
        self._fixed_rows = fixed_rows

    def n_rows(self, at: int, decode: Rows | None) -> int:
        """Rows for the next chunk, of a prompt with `at` tokens of context, beside the decode step that comes with it.

        All that fit a batch while nobody decodes; else what fits the target gap, but so many at least that the chunk is not mostly the
        cost of its pass. The first chunk of all is small: on a large model a full batch can take minutes, and nobody knows yet.
        """
        fitting = self._costs.prompt_rows(self._target_gap_s - self._decode_s(decode), at)
        if fitting is None:
            return min(self.max_rows, FAST_ROWS)
        if decode is None:
            return self.max_rows
        if self._fixed_rows:
            return min(self._fixed_rows, self.max_rows)
        rows = int(min(max(fitting, self._costs.rows_worth_a_pass(at)), self.max_rows))
        return min(max(rows - rows % _MULTIPLE, _least(at)), self.max_rows)

    def chunk_rows(self, n_left: int, n_rows: int, at: int, decode: Rows | None) -> int:
        """Of `n_rows` those for a prompt that has `n_left` to go: as many chunks as it takes, of one size.

        Behind a long context none is left over that is just too small for the fast kernel, and where that cannot be, it is as small as
        its own cost demands.
        """
        even = -(-n_left // -(-n_left // n_rows))
        n = min(n_left, n_rows, max(_least(at), -(-even // _EVEN_MULTIPLE) * _EVEN_MULTIPLE))
        if at < _LONG_CONTEXT:
            return n
        if 0 < n_left - n < FAST_ROWS <= n_left - FAST_ROWS:
            n = min(n, n_left - FAST_ROWS)
        if n < FAST_ROWS and decode is not None and not self._fixed_rows:
            fitting = self._costs.prompt_rows(self._target_gap_s - self._decode_s(decode), at, few=True)
            n = n if fitting is None else min(n, max(_MULTIPLE, int(min(fitting, n))))
        return n

    @property
    def longest_step_s(self) -> float | None:
        """What the slowest step should take: a full prompt chunk, or a decode step. None before a prompt was measured."""
        return self._costs.longest_step_s(self.max_rows)

    def _decode_s(self, decode: Rows | None) -> float:
        return 0.0 if decode is None else self._costs.decode_s(decode) or 0.0


def _least(at: int) -> int:
    return FAST_ROWS if at >= _LONG_CONTEXT else LEAST_CHUNK
