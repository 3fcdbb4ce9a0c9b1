"""The prepare thread: a Submit becomes a Sequence, or is refused, without the decode thread noticing."""

import os
import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from runner.engine.prefix import n_shared
from runner.engine.sequence import Sequence, Times
from runner.errors import ContextLengthExceeded, InvalidRequest, RunnerError
from runner.llama.vocabulary import Vocabulary
from runner.serving.length import certainly_too_long, fewest_tokens, n_word_starts, text_bytes
from runner.serving.protocol import Accepted, ChatPrompt, FromEngine, Prompt, Refused, Submit, TextPrompt, TokenPrompt
from runner.serving.truncation import Fitted, Message, fit, reserved, split

if TYPE_CHECKING:
    from runner.llama.template import ChatTemplate

_NO_TEMPLATE = "This model has no chat template: use /v1/completions, or start with --chat-template"
_N_SEEDS = 2**32 - 1
# A template may print the time: what it made is not kept for long.
_N_RECENT, _RECENT_S = 4, 5.0
# Of a slot: what a template may make of messages that fit one before its text is taken for too long. It writes some tokens around each.
_MOST_WRITTEN = 8
# Tokens at the start that stay when a slot is shifted: without the first ones a model loses its way (docs/log.md).
_LEAST_KEPT = 16


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the decode thread gets: the sequence, and the text it should send first (`echo`). `n_dropped` messages are not in the prompt."""

    sequence: Sequence
    echo: str
    n_dropped: int = 0


@dataclass(frozen=True, slots=True)
class _Known:
    """What became of a prompt that was to leave `n_reserved` tokens free."""

    prompt: Prompt
    n_reserved: int
    at: float
    found: Fitted | InvalidRequest

    def answer(self) -> Fitted:
        """The same again."""
        if isinstance(self.found, InvalidRequest):
            raise type(self.found)(self.found.message, param=self.found.param)
        return Fitted(list(self.found.tokens), self.found.n_dropped)


class Preparer:
    """Renders, tokenises and checks. Owns the template; shares the vocabulary with the decode thread."""

    def __init__(
        self, vocabulary: Vocabulary, template: "ChatTemplate | None", *, n_ctx_slot: int, seed: int | None, can_shift: bool = False
    ) -> None:
        """`can_shift`: an answer may be longer than its slot has room for."""
        self._vocabulary, self._template = vocabulary, template
        self._n_ctx_slot, self._can_shift = n_ctx_slot, can_shift
        self._seed = seed
        self._recent: deque[_Known] = deque(maxlen=_N_RECENT)
        self._random = random.Random(int.from_bytes(os.urandom(8)))  # noqa: S311 - sampling seeds are no secrets

    def prepare(self, submit: Submit, arrived_at: float, now: float) -> Prepared:
        """Raises InvalidRequest (ContextLengthExceeded where the prompt does not fit)."""
        truncates = isinstance(submit.prompt, ChatPrompt) and submit.prompt.truncates
        fitted = self._fitted(submit.prompt, reserved(submit.max_tokens, self._n_ctx_slot) if truncates else 0, now)
        tokens = fitted.tokens
        room = self._n_ctx_slot - len(tokens)
        # Without a limit it ends where the slot does: nothing goes on for ever that nobody has asked for.
        max_tokens = room if submit.max_tokens is None else submit.max_tokens
        shifts = self._can_shift and max_tokens > room
        sampling = msgspec.structs.replace(submit.sampling, seed=self._seed_for(submit))
        sequence = Sequence(
            request_id=submit.request_id,
            prompt=tokens,
            sampling=sampling,
            max_tokens=max_tokens if shifts else min(max_tokens, room),
            stop=submit.stop,
            ignore_eos=submit.ignore_eos,
            cache_prompt=submit.cache_prompt,
            tier=submit.tier,
            owner=submit.owner,
            domain=submit.domain,
            session=submit.session,
            is_stateless=submit.is_stateless,
            n_keep=self._n_keep(submit.prompt, tokens) if shifts else 0,
            times=Times(arrived_at=arrived_at, prepared_at=now),
        )
        return Prepared(sequence, self._echo(submit, tokens), fitted.n_dropped)

    def _n_keep(self, prompt: Prompt, tokens: list[int]) -> int:
        """What stays of a slot's beginning when it is shifted: the messages of the system, but a quarter of the slot at most."""
        n_head = n_shared(self._head_of(prompt.messages), tokens) if isinstance(prompt, ChatPrompt) else 0
        return min(max(n_head, _LEAST_KEPT), self._n_ctx_slot // 4)

    def _head_of(self, messages: Seq[Message]) -> list[int]:
        """All that the template writes before the first text of a user."""
        try:
            return self._chat_tokens([*split(messages)[0], {"role": "user", "content": ""}])
        except InvalidRequest:
            return []  # a template that wants more than that: the least is kept

    def _seed_for(self, submit: Submit) -> int:
        """The request's seed, else the server's, else a new one; 32 bits, as llama.cpp takes them (the last value means none)."""
        seed = submit.sampling.seed if submit.sampling.seed is not None else self._seed
        if seed is None:
            seed = self._random.randrange(_N_SEEDS)
        return (seed + submit.seed_offset) % _N_SEEDS

    def _fitted(self, prompt: Prompt, n_reserved: int, now: float) -> Fitted:
        """From what was found a moment ago, where that was the same prompt: the answers of one request, or a client that insists."""
        if isinstance(prompt, TokenPrompt):
            return self._computed(prompt, n_reserved)
        for known in self._recent:
            if now - known.at < _RECENT_S and known.n_reserved == n_reserved and known.prompt == prompt:
                return known.answer()
        try:
            fitted = self._computed(prompt, n_reserved)
        except InvalidRequest as error:
            self._recent.appendleft(_Known(prompt, n_reserved, now, error))
            raise
        known = _Known(prompt, n_reserved, now, fitted)
        self._recent.appendleft(known)
        return known.answer()

    def _computed(self, prompt: Prompt, n_reserved: int) -> Fitted:
        fitted = self._tokenized(prompt, n_reserved)
        n_prompt, n_ctx = len(fitted.tokens), self._n_ctx_slot
        param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        if not n_prompt:
            raise InvalidRequest("The prompt is empty: it has no token to continue from", param=param)
        if n_prompt >= n_ctx:
            without = " without its earlier turns" if fitted.n_dropped else ""
            text = f"The prompt has {n_prompt:,} tokens{without}; a slot holds {n_ctx:,}, and one at least must be left for the answer"
            raise ContextLengthExceeded(text, param=param)
        return fitted

    def _tokenized(self, prompt: Prompt, n_reserved: int) -> Fitted:
        match prompt:
            case ChatPrompt(messages, truncates):
                if truncates:
                    return fit(messages, room=self._n_ctx_slot - n_reserved, cost=self._cost, tokenize=self._chat_tokens)
                return Fitted(self._chat_tokens(messages))
            case TextPrompt(text):
                self._check_length(text, param="prompt")
                return Fitted(self._vocabulary.with_bos(self._vocabulary.tokenize(text, parse_special=True)))
            case TokenPrompt(tokens):
                self._check_ids(tokens)
                return Fitted(tokens)

    def _chat_tokens(self, messages: Seq[Message], *, is_short: bool = False) -> list[int]:
        if self._template is None:
            raise InvalidRequest(_NO_TEMPLATE, param="messages")
        from runner.llama.template import tokenize_chat  # jinja2; the load imports it in a thread of its own

        check_length = partial(self._check_length, n_slots=_MOST_WRITTEN if is_short else 1)
        return tokenize_chat(self._template, self._vocabulary, messages, check_length)

    def _cost(self, message: Message) -> int:
        """About a message's tokens. Of a text that certainly does not fit a slot only that is said."""
        from runner.llama.template import texts_of

        return 1 + sum(map(self._text_cost, texts_of(message)))

    def _text_cost(self, text: str) -> int:
        n_tokens = self._fewest_tokens(text)
        return n_tokens if n_tokens >= self._n_ctx_slot else len(self._vocabulary.tokenize(text, parse_special=False))

    def _check_length(self, text: str, param: str = "messages", n_slots: int = 1) -> None:
        """Refuse before the tokeniser what cannot fit (so many slots): on some texts it takes seconds a megabyte."""
        n_tokens = self._fewest_tokens(text)
        if n_tokens >= self._n_ctx_slot * n_slots:
            raise certainly_too_long(n_tokens, self._n_ctx_slot, param)

    def _fewest_tokens(self, text: str) -> int:
        facts = self._vocabulary.facts
        n_bytes, n_starts = text_bytes(text, facts.unknown_bytes), n_word_starts(text)
        return fewest_tokens(n_bytes, facts.longest_piece_bytes, n_starts, facts.word_starts_per_token)

    def _check_ids(self, tokens: list[int]) -> None:
        if len(tokens) >= self._n_ctx_slot:
            return  # refused for its length: no need to look at them
        n_vocab = self._vocabulary.n_tokens
        if tokens and not 0 <= min(tokens) <= max(tokens) < n_vocab:
            token = next(token for token in tokens if not 0 <= token < n_vocab)
            raise InvalidRequest(f"The prompt contains the token id {token}; this model's ids go from 0 to {n_vocab - 1}", param="prompt")

    def _echo(self, submit: Submit, tokens: list[int]) -> str:
        if not submit.echo:
            return ""
        return submit.prompt.text if isinstance(submit.prompt, TextPrompt) else self._vocabulary.text_of(tokens)


class PrepareThread:
    """Takes Submits in order of arrival. A Cancel that overtakes its Submit here is not lost."""

    def __init__(
        self, preparer: Preparer, *, clock: Callable[[], float], done: Callable[[Prepared], None], emit: Callable[[FromEngine], None]
    ) -> None:
        self._preparer, self._clock, self._done, self._emit = preparer, clock, done, emit
        self._inbox: SimpleQueue[tuple[Submit, float]] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending: set[str] = set()
        self._cancelled: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="prepare", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, submit: Submit) -> None:
        """Queue one request (reader thread)."""
        with self._lock:
            self._pending.add(submit.request_id)
        self._inbox.put((submit, submit.arrived_at or self._clock()))

    def cancel(self, request_id: str) -> bool:
        """Whether the request was still here: then it never reaches the decode thread."""
        with self._lock:
            if request_id in self._pending:
                self._cancelled.add(request_id)
                return True
            return False

    def _run(self) -> None:
        # At the decode threads' own priority: a lower one was tried, and a thread that is set aside while it holds the GIL keeps the
        # decode thread waiting (docs/log.md).
        while True:
            submit, arrived_at = self._inbox.get()
            self._pass_on(submit.request_id, self._answer(submit, arrived_at))

    def _answer(self, submit: Submit, arrived_at: float) -> Prepared | Refused:
        request_id = submit.request_id
        if request_id in self._cancelled:
            return Refused(request_id, "request_cancelled", "The request was cancelled", None)
        try:
            return self._preparer.prepare(submit, arrived_at, self._clock())
        except RunnerError as error:
            return Refused(request_id, error.code, error.message, error.param)
        except Exception as error:  # noqa: BLE001 - a fault in one request must not end the thread that serves all
            sys.stderr.write(f"Request {request_id} could not be prepared:\n{traceback.format_exc()}")
            sys.stderr.flush()
            return Refused(request_id, "internal_error", f"The request could not be prepared: {type(error).__name__}", None)

    def _pass_on(self, request_id: str, answer: Prepared | Refused) -> None:
        with self._lock:
            self._pending.discard(request_id)
            if request_id in self._cancelled:
                self._cancelled.discard(request_id)
                answer = Refused(request_id, "request_cancelled", "The request was cancelled", None)
            if isinstance(answer, Prepared):
                # Under the lock: a Cancel that no longer finds the request here must find it in the decode thread's inbox.
                self._emit(Accepted(request_id, len(answer.sequence.prompt), answer.n_dropped))
                self._done(answer)
                return
        self._emit(answer)
