"""Which items without generation (embeddings, scoring) are computed together, and when.

    order     best tier, in it the client that was charged least, in that the earliest due, then arrival (`turns`, as in the queue)
    size      `flow_time.first_lot` of those that wait, within `max_batch_size` items and `n_ubatch` tokens
    wait      `flow_time.worth_waiting_s` by the learned cost of a pass and the learned rate of arrivals; never longer than `max_wait_s`
    shed      at `add` where the forecast says too late; before a batch where even alone it would be late; never after it was computed
    gap       beside streams no batch takes longer than the gap that is left, but for one item in `max_gap_wait_s`

The aim is the least sum of times from arrival to answer, within the deadlines and the gap.

Nobody starves: who is next in order is in the next batch, however large it is. Where it does not fit the gap, smaller ones behind it may
go first, for `max_gap_wait_s` at most; then it is computed alone. So of those that do not fit the p-th waits p x `max_gap_wait_s`.
No operation looks at all who wait: a batch looks at no more than it holds, and `MAX_ASIDE` and `MAX_SHED` beside.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from runner.engine.batching.arrivals import Arrivals
from runner.engine.batching.expiry import Expiry
from runner.engine.batching.flow_time import first_lot, worth_waiting_s
from runner.engine.batching.forecast import Forecast
from runner.engine.batching.items import NEVER, BatchCounts, BatchLimits, Decision, Item
from runner.engine.batching.pass_cost import PassCost
from runner.engine.batching.turns import Turns
from runner.engine.order import Owner, Tier
from runner.errors import ContextLengthExceeded, Overloaded, TimedOut

# An item without a deadline is due so many seconds after its arrival: of one client's items, one with a later deadline waits for it.
DUE_S: Final = 30.0
# So many that do not fit a batch are passed over in favour of those behind them.
MAX_ASIDE: Final = 8
# So many late ones are given up in one decision; the next one goes on at once.
MAX_SHED: Final = 64
# A wait that is shorter than this is none.
_SHORTEST_WAIT_S: Final = 1e-5


@dataclass(slots=True, eq=False)
class _Entry:
    """An item that waits. `expected_s`: how long what was ahead of it should take when it came."""

    item: Item
    place: tuple[float, int]
    expected_s: float
    added_at: float
    blocked_at: float | None = None

    @property
    def tier(self) -> Tier:
        return self.item.tier

    @property
    def owner(self) -> Owner:
        return self.item.owner


@dataclass(slots=True)
class _Draft:
    """A batch in the making: `due_at` is the earliest deadline in it."""

    most_tokens: int
    entries: list[_Entry] = field(default_factory=list)
    n_tokens: int = 0
    due_at: float = NEVER

    def takes(self, item: Item, end_at: float) -> bool:
        """Whether the item fits, and nobody in the batch becomes late by its company. `end_at`: when the batch with it would be done."""
        is_in_time = not self.entries or end_at <= min(self.due_at, item.deadline)
        return self.n_tokens + item.n_tokens <= self.most_tokens and is_in_time

    def add(self, entry: _Entry) -> None:
        """It is part of the batch."""
        self.entries.append(entry)
        self.n_tokens += entry.item.n_tokens
        self.due_at = min(self.due_at, entry.item.deadline)


class AdaptiveBatcher:
    """Collects items into batches. Nothing here computes, and time is what the caller says: it never goes back.

    The caller: `add` what came, ask `next_batch`, compute its batch, `add` what came meanwhile, say `complete`, and again.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.cost = PassCost()
        self.counts = BatchCounts()
        self._arrivals = Arrivals(limits.max_wait_s)
        self._forecast = Forecast()
        self._turns: Turns[_Entry] = Turns()
        self._waiting: dict[str, _Entry] = {}
        self._n_tokens = 0
        self._expiry: Expiry[_Entry] = Expiry()
        self._blocked: deque[_Entry] = deque()
        self._over_gap_at = -NEVER
        self._running: tuple[_Entry, ...] = ()
        self._started_at = 0.0

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._waiting)

    # -- what comes and goes --------------------------------------------------------------------------------------------------------

    def add(self, item: Item, now: float) -> None:
        """Let an item wait. Raises ContextLengthExceeded, Overloaded, or TimedOut where its deadline cannot be met."""
        assert item.item_id not in self._waiting
        assert item.n_tokens >= 1
        self._arrivals.arrived(item.arrived_at)
        self._check_bounds(item)
        due_at = min(item.deadline, item.arrived_at + DUE_S)
        expected_s = self._expected_s(item, due_at, now)
        if self.cost.is_known:
            self._check_deadline(item, self._forecast.factor * expected_s + self.cost.seconds(item.n_tokens), now)
        self.counts.added += 1
        entry = _Entry(item, (due_at, self.counts.added), expected_s, now)
        self._waiting[item.item_id] = entry
        self._n_tokens += item.n_tokens
        self._turns.push(entry)
        self._forecast.push(item.tier, item.owner.client, due_at, item.n_tokens)
        if item.deadline < NEVER:
            self._expiry.push(item.deadline, self.counts.added, entry)

    def cancel(self, item_id: str) -> Item | None:
        """An item's client has left. None where it does not wait: what is being computed is computed to its end."""
        entry = self._waiting.get(item_id)
        if entry is None:
            return None
        self._turns.remove(entry)
        self._forget(entry)
        self.counts.cancelled += 1
        return entry.item

    def complete(self, now: float, seconds: float | None) -> None:
        """The batch is done, or, where `seconds` is None, has failed. `seconds`: what the pass took."""
        assert self._running, "no batch is being computed"
        if seconds is None:
            self.counts.failed += len(self._running)
        else:
            self.counts.served += len(self._running)
            self.cost.learn(sum(entry.item.n_tokens for entry in self._running), seconds)
        self._running = ()
        self._arrivals.batch_done(now)

    # -- the decision ---------------------------------------------------------------------------------------------------------------

    def next_batch(self, now: float, gap_s: float | None = None) -> Decision:
        """What to compute now. `gap_s`: seconds that a step beside streams has left; None: no stream runs."""
        assert not self._running, "a batch is being computed"
        shed = self._expired(now)
        if not self._waiting:
            return Decision(shed=_items(shed))
        overdue = None if gap_s is None else self._overdue(now)
        if overdue is None:
            wait_until = self._wait_until(now)
            if wait_until > now:
                return Decision(shed=_items(shed), wake_at=min(wait_until, self._next_shed_at))
        chosen = self._collect(now, gap_s, overdue, shed)
        if not chosen:
            return Decision(shed=_items(shed), wake_at=self._wake_at(now, is_cut_short=len(shed) >= MAX_SHED))
        self._running = tuple(chosen)
        self._started_at = now
        self._arrivals.batch_started(now)
        self.counts.batches += 1
        return Decision(_items(chosen), _items(shed))

    def _collect(self, now: float, gap_s: float | None, overdue: _Entry | None, shed: list[_Entry]) -> list[_Entry]:
        """Take as many in order as fit, and give up whom it is too late for. Who is overdue is first and fits."""
        most_tokens, most_items = self._most_tokens(gap_s), self._most_items(is_alone=gap_s is None)
        if overdue is not None and overdue.item.n_tokens > most_tokens:
            most_tokens = overdue.item.n_tokens
            self._over_gap_at = now
            self.counts.over_gap += 1
        draft = _Draft(most_tokens)
        aside: list[_Entry] = []
        while len(draft.entries) < most_items and draft.n_tokens < max(1, most_tokens) and len(aside) < MAX_ASIDE and len(shed) < MAX_SHED:
            entry = self._turns.take() if overdue is None else self._turns.pick(overdue)
            overdue = None
            if entry is None:
                break
            if self._late_at(entry) < now:
                self._turns.drop(entry)
                self._shed(entry, shed)
            elif draft.takes(entry.item, now + self.cost.caution * self.cost.seconds(draft.n_tokens + entry.item.n_tokens)):
                self._serve(entry, now)
                draft.add(entry)
            else:
                aside.append(entry)
        self._put_back(aside, most_tokens, now)
        return draft.entries

    def _put_back(self, aside: list[_Entry], most_tokens: int, now: float) -> None:
        """They wait on; those that are too long for the gap are counted as blocked by it from now on."""
        for entry in aside:
            self._turns.put_back(entry)
            if entry.item.n_tokens > most_tokens and entry.blocked_at is None:
                entry.blocked_at = now
                self._blocked.append(entry)

    def _most_tokens(self, gap_s: float | None) -> int:
        if gap_s is None or not self.cost.is_known:
            return self.limits.n_ubatch
        return min(self.limits.n_ubatch, self.cost.tokens_in(gap_s / self.cost.caution))

    def _most_items(self, *, is_alone: bool) -> int:
        """The first pass of all has one item: nobody knows yet what it takes. Until the fixed cost is known, batches are full.

        Beside streams too: between two batches each of them gets a token.
        """
        if not self.cost.is_known:
            return 1
        if not self.cost.is_split or not is_alone:
            return self.limits.max_batch_size
        n, fixed_s, item_s = len(self._waiting), self.cost.fixed_s, self._item_s
        full = min(self.limits.max_batch_size, self.limits.n_ubatch * n / self._n_tokens)
        load = self._arrivals.rate * (item_s + fixed_s / full)
        return min(self.limits.max_batch_size, first_lot(n, fixed_s, item_s, load))

    @property
    def _item_s(self) -> float:
        """What a mean one of those that wait adds to a pass."""
        return self.cost.token_s * self._n_tokens / len(self._waiting)

    def _wait_until(self, now: float) -> float:
        """Until when to wait for company; `now`: not at all."""
        n = len(self._waiting)
        gain_s = self.cost.fixed_s - n * self._item_s
        has_room = n < self.limits.max_batch_size and self._n_tokens * (n + 1) <= self.limits.n_ubatch * n
        if gain_s <= 0.0 or not has_room:
            return now
        n_pass = self._arrivals.rate_in_pass * self.cost.seconds(self._n_tokens)
        until = now + worth_waiting_s(self._arrivals.ahead(now), n + n_pass, gain_s)
        if until - now < _SHORTEST_WAIT_S:
            return now
        first_at = min(entry.item.arrived_at for entry in self._waiting.values())
        latest_end = min(entry.item.deadline for entry in self._waiting.values())
        until = min(until, first_at + self.limits.max_wait_s, latest_end - self.cost.seconds(self._n_tokens * (n + 1) / n))
        return until if until - now >= _SHORTEST_WAIT_S else now

    def _overdue(self, now: float) -> _Entry | None:
        """Who has waited so long for a gap that fits that it goes without, unless its deadline has passed over it."""
        return self._blocked[0] if self._overdue_at <= now <= self._late_at(self._blocked[0]) else None

    @property
    def _overdue_at(self) -> float:
        blocked = self._blocked
        while blocked and self._waiting.get(blocked[0].item.item_id) is not blocked[0]:
            blocked.popleft()
        if not blocked:
            return NEVER
        blocked_at = blocked[0].blocked_at
        assert blocked_at is not None
        return max(blocked_at, self._over_gap_at) + self.limits.max_gap_wait_s

    def _wake_at(self, now: float, *, is_cut_short: bool) -> float | None:
        if not self._waiting:
            return None
        return now if is_cut_short else _or_none(min(self._overdue_at, self._next_shed_at))

    # -- deadlines ------------------------------------------------------------------------------------------------------------------

    def _expired(self, now: float) -> list[_Entry]:
        """Give up those for whom even a pass of their own is too late."""
        shed: list[_Entry] = []
        while len(shed) < MAX_SHED and self._next_expiry_at < now:
            entry = self._expiry.first
            assert entry is not None
            self._turns.remove(entry)
            self._shed(entry, shed)
        return shed

    @property
    def _next_expiry_at(self) -> float:
        """When the next one that waits becomes late."""
        first = self._expiry.first
        return NEVER if first is None else self._late_at(first)

    @property
    def _next_shed_at(self) -> float:
        """The first instant at which it can be given up."""
        return math.nextafter(self._next_expiry_at, NEVER)

    def _late_at(self, entry: _Entry) -> float:
        """After this instant even a pass of its own would end too late."""
        return entry.item.deadline - self.cost.seconds(entry.item.n_tokens)

    def _shed(self, entry: _Entry, shed: list[_Entry]) -> None:
        self._forecast.learn(entry.expected_s, max(0.0, entry.item.deadline - entry.added_at))
        self._forget(entry)
        self.counts.shed += 1
        shed.append(entry)

    def _expected_s(self, item: Item, due_at: float, now: float) -> float:
        """How long what goes before it should take, if it were computed in full batches and nothing else were done."""
        seconds = 0.0
        if self._running:
            n_tokens = sum(entry.item.n_tokens for entry in self._running)
            seconds = max(0.0, self._started_at + self.cost.seconds(n_tokens) - now)
        if not self._waiting:
            return seconds
        lead = self._turns.lead(item.tier, item.owner.client)
        n_tokens = self._forecast.tokens_ahead(item.tier, item.owner.client, due_at, lead)
        return seconds + self._full_batches_s(n_tokens)

    def _full_batches_s(self, n_tokens: int) -> float:
        n_items = n_tokens * len(self._waiting) / self._n_tokens
        n_passes = max(n_tokens / self.limits.n_ubatch, n_items / self.limits.max_batch_size)
        return self.cost.seconds(n_tokens, n_passes)

    def _check_bounds(self, item: Item) -> None:
        if item.n_tokens > self.limits.n_ubatch:
            self.counts.refused += 1
            raise ContextLengthExceeded(
                f"The input has {item.n_tokens:,} tokens; {self.limits.n_ubatch:,} can be computed at once: shorten it or split it"
            )
        if len(self._waiting) >= self.limits.max_waiting:
            self.counts.refused += 1
            raise Overloaded(
                f"{len(self._waiting):,} inputs wait and the queue holds no more: try again later",
                retry_after_s=self._full_batches_s(self._n_tokens),
            )

    def _check_deadline(self, item: Item, takes_s: float, now: float) -> None:
        if now + takes_s > item.deadline:
            self.counts.too_late += 1
            raise TimedOut(
                f"The answer would take about {takes_s:.3g} s and is wanted within {max(0.0, item.deadline - now):.3g} s: "
                "allow more time or try again later",
                retry_after_s=takes_s,
            )

    # -- books ----------------------------------------------------------------------------------------------------------------------

    def _serve(self, entry: _Entry, now: float) -> None:
        """It is part of the batch."""
        self._turns.serve(entry, entry.item.n_tokens)
        self._forecast.learn(entry.expected_s, now - entry.added_at)
        self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        item = entry.item
        del self._waiting[item.item_id]
        self._n_tokens -= item.n_tokens
        self._forecast.remove(item.tier, item.owner.client, item.n_tokens)
        self._expiry.discard(entry.place[1])


def _items(entries: Iterable[_Entry]) -> tuple[Item, ...]:
    return tuple(entry.item for entry in entries)


def _or_none(at: float) -> float | None:
    return None if at == NEVER else at
