"""One generation inside the engine."""

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from runner.engine.detokenizer import Utf8Assembler
from runner.engine.lifecycle import TRANSITIONS, Reason, State
from runner.engine.order import NOBODY, Owner, Tier
from runner.engine.sampling import SamplingParams
from runner.engine.stops import StopMatcher


@dataclass(slots=True)
class Times:
    """Monotonic instants; 0.0 means: not reached. `admitted_at` is the first slot, `parked_s` the time without one after it."""

    arrived_at: float = 0.0
    prepared_at: float = 0.0
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    finished_at: float = 0.0
    parked_at: float = 0.0
    parked_s: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, how to continue it, and how far that has come.

    Only the scheduler moves `state` and `slot_id`. `pending` is the sampled token whose cell does not exist yet: the next
    decode step writes it. `n_cached` prompt tokens were found in the slot and not computed again. `place` is its place in the queue,
    fixed when it is first there; `charged` is what its owner was charged for it. `script` are the tokens whose cells must exist before
    it can go on: the prompt and, once it was parked while it decoded, what it had generated; cells of the first `n_kept` of them are in
    host memory while it is parked. `domain` is the trust domain within which cells are shared, `session` what the client calls its
    conversation; of a stateless one no cells are left at its end. The first `n_keep` tokens stay where its slot is shifted. Where all
    slots take cells from one pool, room for `n_reserved` was made when it got its slot.
    """

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_prompt: bool = True
    tier: Tier = Tier.NORMAL
    owner: Owner = NOBODY
    domain: str = ""
    session: str = ""
    is_stateless: bool = False
    n_keep: int = 0
    times: Times = field(default_factory=Times)
    state: State = State.QUEUED
    reason: Reason | None = None
    slot_id: int | None = None
    n_cached: int = 0
    n_generated: int = 0
    pending: int | None = None
    n_faults: int = 0
    n_parks: int = 0
    charged: float = 0.0
    n_kept: int = 0
    n_reserved: int = 0
    place: tuple[float, int] | None = None
    script: list[int] = field(init=False)
    _utf8: Utf8Assembler = field(default_factory=Utf8Assembler)
    # Characters of the answer behind each of its tokens, and of the text that was let out; kept only where there are stop strings.
    _ends: list[int] = field(default_factory=list)
    _n_shown: int = 0
    _stops: StopMatcher = field(init=False)

    def __post_init__(self) -> None:
        assert self.prompt, "an empty prompt has no logits to sample from"
        assert self.max_tokens >= 1
        self._stops = StopMatcher(self.stop)
        self.script = self.prompt

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended, for whatever reason."""
        return self.state is State.FINISHED

    def move_to(self, state: State) -> None:
        """Change state; anything but a transition of the table is our bug."""
        assert (self.state, state) in TRANSITIONS, f"{self.request_id}: {self.state} -> {state}"
        self.state = state

    def accept(self, token: int, piece: bytes, *, is_eog: bool) -> str:
        """Take one sampled token; return the text that became complete. Sets `reason` when this token ends the sequence."""
        self.n_generated += 1
        self.pending = token
        if is_eog and not self.ignore_eos:
            self.reason = Reason.STOP
            return self._stops.finish()
        piece_text = self._utf8.feed(piece)
        text = self._stops.feed(piece_text)
        if self.stop:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(piece_text))
            self._n_shown += len(text)
        if self._stops.matched is not None:
            self.reason = Reason.STOP
        elif self.n_generated >= self.max_tokens:
            self.reason = Reason.LENGTH
            text += self._stops.finish()
        return text

    def cut_short(self) -> str:
        """End it here, with `length`; returns the text that was held back."""
        self.reason = Reason.LENGTH
        return self._stops.finish()

    @property
    def n_shown_tokens(self) -> int:
        """Tokens of the answer that lie in its text whole: a client that comes back brings those. All but after a stop string."""
        return bisect_right(self._ends, self._n_shown) if self._stops.matched is not None else self.n_generated

    def tail(self, n: int) -> Seq[int]:
        """The last `n` tokens of the prompt: what the penalties see before the first token is generated."""
        return self.prompt[-n:] if n > 0 else ()
