"""What a step costs: seconds = sum over passes (a + b rows + c slots x longest context) + d bytes moved.

`a` and `b` are not the same for all numbers of rows: kernels change. So they are given as the seconds of a pass at some numbers of
rows, with straight lines between. Fitted to SmolLM2-135M Q8_0 on 2 cores (docs/log.md, 2026-11-30):

    rows in a pass          1       2       4       8       512 (prompt)
    seconds, measured       0.0061  0.0159  0.0220  0.0258  0.465
    of it for the context   0.0005  0.0010  0.0020  0.0041  0.104

A decoding row takes 2.0 µs a token of its context (178 tokens/s without any, 84 at 3,000), a prompt row 0.4 µs (1,102 and 478).
"""

from itertools import pairwise
from typing import Self

import msgspec

from runner.engine.batch import BatchPlan, passes
from runner.engine.capacity import padded
from runner.errors import ConfigError

# Passes of more rows than this are computed, not looked up.
_N_LOOKED_UP = 1024


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`pass_s`: (rows, seconds) with rows ascending; `decode_cell_s` and `prompt_cell_s`: for a row and a token of the longest context.

    `byte_s`: to move a byte of KV cells. `model_bytes` a pass reads, `cell_bytes` are K and V of a token.
    """

    pass_s: tuple[tuple[int, float], ...] = ((1, 0.0056), (2, 0.0149), (4, 0.0200), (8, 0.0217), (512, 0.3610))
    decode_cell_s: float = 2.0e-6
    prompt_cell_s: float = 0.4e-6
    byte_s: float = 0.5e-9
    model_bytes: int = 145_000_000
    cell_bytes: int = 23_040

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The defaults with what `text`, a JSON object, says otherwise. Raises ConfigError."""
        try:
            costs = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError(f"The costs cannot be read: {error}", hint=_HINT) from error
        rows = [n for n, _ in costs.pass_s]
        if len(rows) < 2 or rows[0] < 1 or any(a >= b for a, b in pairwise(rows)):
            raise ConfigError("The costs name no two numbers of rows, or not in ascending order", hint=_HINT)
        numbers = (costs.decode_cell_s, costs.prompt_cell_s, costs.byte_s, costs.model_bytes, costs.cell_bytes)
        if min(seconds for _, seconds in costs.pass_s) <= 0 or min(numbers) < 0:
            raise ConfigError("A pass costs more than nothing, and nothing costs less", hint=_HINT)
        return costs


_HINT = """--costs '{"pass_s": [[1, 0.006], [8, 0.026], [512, 0.36]], "decode_cell_s": 2e-6}'"""


class StepCost:
    """The costs of one machine, ready to be asked once a step."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._pass_s = [0.0, *(self._between(n) for n in range(1, _N_LOOKED_UP))]

    def seconds(self, plan: BatchPlan) -> float:
        """What it takes to compute the rows of `plan`. A pass of one row a slot costs what decoding costs, any other what a prompt does."""
        chunks = plan.chunks
        if chunks and not chunks[0].is_prompt and chunks[-1].slot_id - chunks[0].slot_id == len(chunks) - 1 == plan.n_rows - 1:
            # The step of every token: all rows in one pass.
            n = len(chunks)
            return self.pass_s(n) + self.costs.decode_cell_s * n * padded(max([chunk.pos for chunk in chunks]) + 1)
        return sum(map(self._one_pass_s, passes(chunks)))

    def moved_s(self, n_cells: int) -> float:
        """What it takes to copy so many cells."""
        return n_cells * self.costs.cell_bytes * self.costs.byte_s

    def _one_pass_s(self, one: tuple[int, int, int]) -> float:
        n_rows, n_slots, longest = one
        cell_s = self.costs.decode_cell_s if n_rows == n_slots else self.costs.prompt_cell_s
        return self.pass_s(n_rows) + cell_s * n_rows * padded(longest)

    def pass_s(self, n_rows: int) -> float:
        """A pass without any context."""
        return self._pass_s[n_rows] if n_rows < _N_LOOKED_UP else self._between(n_rows)

    @property
    def worst_row_s(self) -> float:
        """No row in a step without context costs more than this, however many rows share it."""
        return max(seconds / n for n, seconds in ((n, self.pass_s(n)) for n in range(1, _N_LOOKED_UP)))

    def _between(self, n_rows: int) -> float:
        """On the line between the two numbers of rows around `n_rows`; beyond them the nearest line goes on."""
        points = self.costs.pass_s
        (n0, s0), (n1, s1) = next((pair for pair in pairwise(points) if n_rows <= pair[1][0]), points[-2:])
        return max(s0 + (s1 - s0) * (n_rows - n0) / (n1 - n0), 0.0)
