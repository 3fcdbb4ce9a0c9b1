"""What every request came to, and what must not be: lost requests, undocumented answers, texts in the wrong hands."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from runner.errors import RunnerError

WORD: Final = re.compile(r"Q[A-Z]{7}")
MOST_SHOWN: Final = 20
# An answer of so many characters has had room for a word.
LONG_ENOUGH: Final = 16


def documented() -> dict[str, int]:
    """Codes of errors and their statuses."""
    kinds = [RunnerError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.code: kind.status for kind in kinds}


DOCUMENTED: Final = documented()
# Any request may meet these: the queue is full, a bound of its client, a deadline, an engine that ends, a fault that was injected.
ALWAYS: Final = frozenset(
    {"server_overloaded", "rate_limit_exceeded", "timeout", "engine_stopped", "engine_crashed", "internal_error", "request_cancelled"}
)


@dataclass(slots=True)
class Sent:
    """One generation that a client asked for: what it is, and what it came to.

    `outcome`: done, refused (an error before the stream), broken (an error event), left (by its client), or None so far. `expects` are
    the codes that it may get beside `ALWAYS`. `word` is the request's own, which no other answer may hold.
    """

    request_id: str
    kind: str
    n_choices: int
    expects: frozenset[str] = frozenset()
    word: str = ""
    outcome: str | None = None
    status: int | None = None
    code: str | None = None
    texts: list[str] = field(default_factory=list)


class Ledger:
    """All requests of a soak, and the violations."""

    def __init__(self, tell: Callable[[str], None] = lambda what: None) -> None:
        """`tell` hears of each violation at once."""
        self._tell = tell
        self.violations: list[str] = []
        self.n_violations = 0
        self.outcomes: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.n_cut_off = 0
        self.n_with_own_word = self.n_with_word = 0
        self._open: dict[str, Sent] = {}
        self._closed: dict[str, Sent] = {}
        self._words: dict[str, str] = {}

    def violate(self, what: str) -> None:
        """Note what must not be."""
        self.n_violations += 1
        if len(self.violations) < MOST_SHOWN:
            self.violations.append(what)
            self._tell(f"violation: {what}")

    @property
    def n_open(self) -> int:
        """Requests without an outcome."""
        return len(self._open)

    def send(self, sent: Sent) -> Sent:
        """One is about to go out."""
        assert sent.request_id not in self._open
        self._open[sent.request_id] = sent
        self.kinds[sent.kind] += 1
        if sent.word:
            self._words[sent.word] = sent.request_id
        return sent

    def close(self, sent: Sent, outcome: str, *, status: int | None = None, code: str | None = None) -> None:
        """Its only outcome."""
        if self._open.pop(sent.request_id, None) is None:
            self.violate(f"{sent.kind} {sent.request_id}: a second outcome: {outcome} after {sent.outcome}")
            return
        sent.outcome, sent.status, sent.code = outcome, status, code
        self._closed[sent.request_id] = sent
        self.outcomes[f"{outcome} {code or ''}".strip()] += 1
        if code is not None:
            self._check_code(sent, code, status)
        self._check_words(sent)

    def _check_code(self, sent: Sent, code: str, status: int | None) -> None:
        if code not in DOCUMENTED or (status is not None and status != 200 and DOCUMENTED[code] != status):
            self.violate(f"{sent.kind} {sent.request_id}: status {status} with the code {code!r}, which the reference does not have")
        elif code not in ALWAYS | sent.expects:
            self.violate(f"{sent.kind} {sent.request_id}: {code} with status {status}, which nothing explains")

    def _check_words(self, sent: Sent) -> None:
        """Each prompt makes the model say a word of its own: who reads another's has another's answer."""
        for text in sent.texts:
            found = set(WORD.findall(text))
            for word in found - {sent.word}:
                if word in self._words:
                    self.violate(f"{sent.kind} {sent.request_id}: its answer holds {word}, which is {self._words[word]}'s")
            if sent.word and sent.outcome == "done" and len(text) >= LONG_ENOUGH:
                self.n_with_word += 1
                self.n_with_own_word += sent.word in found

    # -- at the end ----------------------------------------------------------------------------------------------------

    def check_all_ended(self) -> None:
        """Nothing is lost."""
        for sent in self._open.values():
            self.violate(f"{sent.kind} {sent.request_id}: no outcome")

    def check_words_live(self) -> None:
        """A check that never sees a word proves nothing."""
        if self.n_with_own_word < self.n_with_word / 4:
            self.violate(f"only {self.n_with_own_word} of {self.n_with_word} answers hold the word that their prompts repeat")

    def check_log(self, lines: Iterable[str], metrics: Mapping[str, float]) -> tuple[int, int]:
        """One line a request, with the status that its client saw; sequences that ended in the metrics as many as were begun.

        Returns both numbers of sequences.
        """
        seen: dict[str, dict[str, str]] = {}
        for line in lines:
            fields = access_fields(line)
            if (request_id := fields.get("id", "")) not in self._closed:
                continue
            if request_id in seen:
                self.violate(f"{request_id}: two lines in the access log")
            seen[request_id] = fields
        for request_id, sent in self._closed.items():
            self._compare(sent, seen.get(request_id))
        n_begun = sum(self._closed[request_id].n_choices for request_id, fields in seen.items() if "n_prompt" in fields)
        n_ended = round(total(metrics, "slotfile_request_success_total") + total(metrics, "slotfile_request_failure_total"))
        if n_begun != n_ended:
            self.violate(f"the access log tells of {n_begun} sequences that began, the metrics of {n_ended} that ended")
        return n_begun, n_ended

    def _compare(self, sent: Sent, fields: Mapping[str, str] | None) -> None:
        if sent.outcome == "left":
            return
        if fields is None:
            self.violate(f"{sent.kind} {sent.request_id}: {sent.outcome}, but no line in the access log")
        elif fields["status"] != str(sent.status):
            self.violate(f"{sent.kind} {sent.request_id}: its client saw {sent.status}, the access log says {fields['status']}")
        elif sent.code is not None and fields["reason"] != sent.code:
            self.violate(f"{sent.kind} {sent.request_id}: its client saw {sent.code}, the access log says {fields['reason']}")


def access_fields(line: str) -> dict[str, str]:
    """The fields of a line of the access log; none for any other line."""
    _, mark, rest = line.partition(" slotfile.access ")
    return dict(part.partition("=")[::2] for part in rest.split()) if mark else {}


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus' text as name and labels -> value."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def total(metrics: Mapping[str, float], name: str) -> float:
    """The sum over all labels."""
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name)
