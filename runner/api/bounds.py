"""The bounds of one server: what waits for a slot, how much of it a client may have there, and a client's tokens a minute.

Whoever is over one hears so at once and is told when to ask again. Counts are known before a prompt is looked at; its tokens are
known once the engine has accepted it, which is still before anything was sent.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Final

from runner.api.bucket import TokenBucket
from runner.api.call import Call, Choice
from runner.api.outlook import Outlook
from runner.api.parameters import Generation
from runner.config import ServerConfig
from runner.engine.ends import LEAST_S, MOST_S, Ends
from runner.engine.room import over_queue, waiting_of_client
from runner.errors import InvalidRequest, Overloaded, RateLimited
from runner.serving.client import EngineClient

# Prompts are kept until their request ends: it may have to be given to another engine.
MAX_LIVE_BYTES: Final = 64 * 1024 * 1024
_BYTES_A_TOKEN: Final = 4  # of usual text; only until the engine has counted
_SWEEP_AT_LEAST: Final = 1024


@dataclass(slots=True)
class _Account:
    """One client: its sequences that are live and those of them that hold no slot, and its tokens a minute, where they are bounded."""

    bucket: TokenBucket | None
    n_live: int = 0
    n_waiting: int = 0
    charges: "dict[Call, _Charge]" = field(default_factory=dict)


@dataclass(slots=True)
class _Charge:
    """What one call has been charged: an estimate first, then what was counted."""

    n: int
    n_estimated: int
    n_charged: int = 0

    def owed(self, call: Call) -> int:
        """Prompt tokens, once for all answers to a prompt, and the tokens of the answers."""
        if not call.is_accepted:
            return self.n_estimated
        n_prompt = sum(choice.n_prompt for choice in call.choices[:: self.n])
        return n_prompt + sum(choice.n_completion for choice in call.choices)


class Bounds:
    """Admits requests, and follows them to their end. Belongs to the event loop's thread."""

    def __init__(self, config: ServerConfig, engine: EngineClient, clock: Callable[[], float] = monotonic) -> None:
        self._config = config
        self._engine = engine
        self._clock = clock
        self._ends = Ends()
        self._outlook = Outlook(engine, lambda: self._clock())
        self._accounts: dict[str, _Account] = {}
        self._sweep_at = _SWEEP_AT_LEAST
        # Sequences that hold no slot, in order of arrival, with their prompt's tokens: 0 until the engine has counted them.
        self._waiting: dict[Choice, int] = {}
        self._n_waiting_tokens = 0
        self._clients: dict[Choice, str] = {}
        self._n_bytes = 0

    # -- asked before a request is handed over -------------------------------------------------------------------------

    def admit(self, generation: Generation, n_slots: int) -> None:
        """Raises InvalidRequest for what never fits, RateLimited over the client's own bounds, Overloaded over the server's."""
        self._check_size(generation, n_slots)
        self._check_client_waiting(generation, n_slots)
        self._check_client_tokens(generation)
        self._check_queue(generation, n_slots)
        self._check_queue_tokens(n_slots)
        self._check_bytes(generation)

    def wait_s(self, choice: Choice, place: int) -> float | None:
        """About the time until a choice at this place gets its slot; None while nothing is known."""
        wait_s = self._outlook.wait_s(choice)
        return wait_s if wait_s is not None else self._ends.estimate_s(self._clock(), place)

    def mean_wait_s(self, n_waiting: int) -> float | None:
        """About the mean wait of so many that wait now; None while nothing is known."""
        wait_s = self._outlook.mean_wait_s()
        return wait_s if wait_s is not None else self._ends.estimate_s(self._clock(), (n_waiting + 1) / 2)  # the mean of the places 1 to n

    def headers(self, client: str) -> dict[str, str]:
        """What OpenAI's rate limit headers say of a client, of those bounds that are set."""
        config, now = self._config, self._clock()
        account = self._accounts.get(client)
        headers: dict[str, str] = {}
        if config.max_waiting_per_client:
            n_waiting = self._n_client_waiting(account)
            reset_s = self._client_wait_s(client, account, n_waiting) if n_waiting else 0.0
            headers |= _limit_headers("requests", config.max_waiting_per_client, config.max_waiting_per_client - n_waiting, reset_s)
        if config.tokens_per_minute:
            n_left, reset_s = config.tokens_per_minute, 0.0
            if account is not None and account.bucket is not None:
                self._settle(account)
                n_left, reset_s = math.floor(account.bucket.level(now)), account.bucket.reset_s(now)
            headers |= _limit_headers("tokens", config.tokens_per_minute, n_left, reset_s)
        return headers

    def _check_size(self, generation: Generation, n_slots: int) -> None:
        config, n_new = self._config, generation.n_choices
        n_waiting = min(config.max_queue, config.max_waiting_per_client or config.max_queue)
        if n_new > n_slots + n_waiting:
            param = "n" if generation.n > 1 else "prompt"
            raise InvalidRequest(f"This request asks for {n_new} answers; slots and queue hold {n_slots + n_waiting}", param=param)

    def _check_client_waiting(self, generation: Generation, n_slots: int) -> None:
        limit, n_new = self._config.max_waiting_per_client, generation.n_choices
        if not limit:
            return
        account = self._accounts.get(generation.owner.client)
        n_own = account.n_waiting if account is not None else 0
        n_waiting = waiting_of_client(n_own, n_new, self._engine.n_live, n_slots)
        if n_waiting > limit:
            text = f"{n_waiting} of your requests would wait with this one; a client may have {limit} waiting"
            raise RateLimited(text, retry_after_s=self._client_wait_s(generation.owner.client, account, n_waiting - limit))

    def _check_client_tokens(self, generation: Generation) -> None:
        limit, account = self._config.tokens_per_minute, self._accounts.get(generation.owner.client)
        if account is None or account.bucket is None:
            return
        self._settle(account)
        now = self._clock()
        if account.bucket.level(now) < 1:
            text = f"The {limit:,} tokens that a client may use in a minute are used up"
            raise RateLimited.in_tokens(text, retry_after_s=min(max(account.bucket.wait_s(now, 1.0), LEAST_S), MOST_S))

    def _check_queue(self, generation: Generation, n_slots: int) -> None:
        max_queue, n_live = self._config.max_queue, self._engine.n_live
        if n_over := over_queue(n_live, generation.n_choices, n_slots, max_queue):
            raise self._overloaded(f"{max(0, n_live - n_slots)} requests are waiting; the queue holds {max_queue}", n_ends=n_over)

    def _check_queue_tokens(self, n_slots: int) -> None:
        limit = self._config.max_queue_tokens
        if limit and (n_over := self._n_tokens_waiting(n_slots) - limit) >= 0:
            raise self._overloaded(_tokens_text(n_over + limit, limit), n_tokens=n_over + 1)

    def _check_bytes(self, generation: Generation) -> None:
        n_bytes = self._n_bytes + _kept_bytes(generation)
        if self._n_bytes and n_bytes > MAX_LIVE_BYTES:
            raise self._overloaded(f"All prompts together would have {n_bytes:,} bytes; the limit is {MAX_LIVE_BYTES:,}")

    # -- told of what becomes of it ------------------------------------------------------------------------------------

    def began(self, call: Call, generation: Generation) -> None:
        """A call is handed over; its choices are followed from now on."""
        client, now = generation.owner.client, self._clock()
        account = self._accounts.get(client) or self._open(client, now)
        self._n_bytes += _kept_bytes(generation)
        if account.bucket is not None:
            account.charges[call] = _Charge(generation.n, self._estimated_tokens(generation))
        for choice in call.choices:
            if not choice.is_over:  # an engine that is gone refuses at once
                self._ends.began(now)
                self._outlook.began(choice, client=client, tier=generation.tier, max_tokens=generation.max_tokens)
                account.n_live += 1
                account.n_waiting += 1
                self._waiting[choice] = 0
                self._clients[choice] = client

    def changed(self, choice: Choice) -> None:
        """A choice was accepted, was placed, waits again or is over. One that brings too many tokens into the queue is refused here."""
        if choice not in self._clients:
            return
        account = self._accounts[self._clients[choice]]
        is_waiting = not (choice.is_placed or choice.is_over)
        if is_waiting != (choice in self._waiting):
            account.n_waiting += 1 if is_waiting else -1
        self._n_waiting_tokens -= self._waiting.get(choice, 0)
        if is_waiting:
            self._waiting[choice] = choice.n_prompt
            self._n_waiting_tokens += choice.n_prompt
            self._refuse_over_tokens(choice)
        else:
            self._waiting.pop(choice, None)
        if choice.is_over:
            self._choice_over(choice, account)
        # After the books: estimates are allowed to be wrong, these are not.
        self._outlook.changed(choice)

    def over(self, call: Call, generation: Generation) -> None:
        """The engine has said its last word of a call."""
        client = generation.owner.client
        account = self._accounts[client]
        if (charge := account.charges.pop(call, None)) is not None:
            self._charge(account, call, charge)
        self._n_bytes -= _kept_bytes(generation)
        self._close_if_idle(client, account)

    def _refuse_over_tokens(self, choice: Choice) -> None:
        """The newest of those that wait goes, unless it is the only one: else a long prompt would find no moment to come in."""
        limit, info, call = self._config.max_queue_tokens, self._engine.info, choice.call
        if self._n_waiting_tokens <= limit or not limit or info is None or call.is_accepted or not choice.n_prompt:
            return
        n_own = sum(each.n_prompt for each in call.choices)
        n_tokens = self._n_tokens_waiting(info.n_slots)
        if n_tokens > max(limit, n_own):
            call.fail(self._overloaded(_tokens_text(n_tokens - choice.n_prompt, limit), n_tokens=n_tokens - limit))

    def _choice_over(self, choice: Choice, account: _Account) -> None:
        account.n_live -= 1
        del self._clients[choice]
        now = self._clock()
        if choice.is_placed:  # what never held a slot says nothing of how fast slots become free
            self._ends.ended(now, choice.n_prompt)
        if not self._clients:
            self._ends.idle(now)

    # -- counting ------------------------------------------------------------------------------------------------------

    def _n_tokens_waiting(self, n_slots: int) -> int:
        """Prompt tokens in the queue. Those at its head for whom slots are free are as good as placed."""
        n_placed = max(0, self._engine.n_live - len(self._waiting))
        return self._n_waiting_tokens - sum(islice(self._waiting.values(), max(0, n_slots - n_placed)))

    def _n_client_waiting(self, account: _Account | None) -> int:
        info = self._engine.info
        n_waiting = self._engine.n_live - (info.n_slots if info is not None else 0)
        return max(0, min(account.n_waiting if account is not None else 0, n_waiting))

    def _client_wait_s(self, client: str, account: _Account | None, n_own: int) -> float:
        """Until so many of a client's have left the queue; where that is not known, so many and its share of the others have ended."""
        known_s = self._outlook.client_s(client, n_own)
        share = max(1.0, self._engine.n_live / account.n_live) if account is not None and account.n_live else 1.0
        return self._told(known_s, n_ends=n_own * share)

    def _overloaded(self, text: str, *, n_ends: int = 1, n_tokens: int = 0) -> Overloaded:
        known_s = self._outlook.tokens_s(n_tokens) if n_tokens else self._outlook.room_s(n_ends)
        return Overloaded(text, retry_after_s=self._told(known_s, n_ends=n_ends, n_tokens=n_tokens))

    def _told(self, known_s: float | None, *, n_ends: float, n_tokens: float = 0.0) -> float:
        if known_s is None:
            return self._ends.wait_s(self._clock(), n_ends=n_ends, n_tokens=n_tokens)
        return min(max(known_s, LEAST_S), MOST_S)

    def _estimated_tokens(self, generation: Generation) -> int:
        """Of all prompts, by their size; none has more than a slot holds, for a long conversation may be cut."""
        n_tokens, info = generation.n_bytes // _BYTES_A_TOKEN, self._engine.info
        return n_tokens if info is None else min(n_tokens, len(generation.prompts) * info.n_ctx_slot)

    def _settle(self, account: _Account) -> None:
        """Charge what the client's calls have used since the last time; nothing is counted while tokens come."""
        for call, charge in account.charges.items():
            self._charge(account, call, charge)

    def _charge(self, account: _Account, call: Call, charge: _Charge) -> None:
        assert account.bucket is not None
        owed = charge.owed(call)
        account.bucket.take(owed - charge.n_charged, self._clock())
        charge.n_charged = owed

    def _open(self, client: str, now: float) -> _Account:
        if len(self._accounts) >= self._sweep_at:
            for name, account in list(self._accounts.items()):
                self._close_if_idle(name, account)
            self._sweep_at = max(_SWEEP_AT_LEAST, 2 * len(self._accounts))
        limit = self._config.tokens_per_minute
        account = self._accounts[client] = _Account(TokenBucket(limit, now) if limit else None)
        return account

    def _close_if_idle(self, client: str, account: _Account) -> None:
        """Forget a client of whom nothing is live and nothing is owed."""
        if not account.n_live and not account.charges and (account.bucket is None or account.bucket.is_full(self._clock())):
            del self._accounts[client]


def _kept_bytes(generation: Generation) -> int:
    return generation.n_bytes * generation.n


def _tokens_text(n_waiting: int, limit: int) -> str:
    return f"Prompts of {n_waiting:,} tokens are waiting; the queue holds {limit:,} tokens"


def _limit_headers(unit: str, limit: int, n_left: int, reset_s: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{unit}": str(limit),
        f"x-ratelimit-remaining-{unit}": str(max(0, n_left)),
        f"x-ratelimit-reset-{unit}": duration(reset_s),
    }


def duration(seconds: float) -> str:
    """As OpenAI writes one: `20ms`, `1.5s`, `6m0s`, `1h0m0s`."""
    ms = math.ceil(max(0.0, seconds) * 1000)
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest_ms / 1000:g}s"
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}" if minutes else text
