"""How many prompt rows a step may take, so that the streams that decode meanwhile keep their pace."""

# A new measurement counts for a quarter: three chunks after a change the estimate has mostly followed.
_NEW_SHARE = 0.25
_ROW_MULTIPLE = 32
_FIRST_ROWS = 64


class PromptBudget:
    """Sizes prompt chunks from the measured cost of a prompt row and of the decode step beside it.

    `target_gap_s` is the gap between two tokens of a stream that should not be exceeded while a prompt is computed.
    """

    def __init__(self, *, max_rows: int, target_gap_s: float) -> None:
        assert max_rows >= 1
        self._max_rows = max_rows
        self._target_gap_s = target_gap_s
        self._row_s: float | None = None
        self._decode_s = 0.0

    def n_rows(self, *, others_decode: bool) -> int:
        """Rows for the next chunk: all that fit a batch while nobody decodes, else what fits the target gap (at least 32).

        The first chunk of all is small: on a large model a full batch can take minutes, and nobody knows yet.
        """
        if self._row_s is None:
            return min(self._max_rows, _FIRST_ROWS)
        if not others_decode:
            return self._max_rows
        rows = int((self._target_gap_s - self._decode_s) / self._row_s)
        rows -= rows % _ROW_MULTIPLE
        return max(min(rows, self._max_rows), min(_ROW_MULTIPLE, self._max_rows))

    @property
    def longest_step_s(self) -> float | None:
        """What the slowest step should take: a full prompt chunk, or a decode step. None before a prompt was measured."""
        if self._row_s is None:
            return None
        return max(self._row_s * self._max_rows, self._decode_s)

    def learn_prompt(self, n_rows: int, seconds: float) -> None:
        """Take the measured time of a prompt chunk. Short chunks say little about the cost of a row and are left out."""
        if n_rows >= _ROW_MULTIPLE:
            self._row_s = _blend(self._row_s, seconds / n_rows)

    def learn_decode(self, seconds: float) -> None:
        """Take the measured time of a decode step."""
        self._decode_s = _blend(self._decode_s or None, seconds)


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _NEW_SHARE * (new - old)
