"""What a simulated day was like: rates, waits, gaps between tokens, fairness and starvation."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from typing import Final, Self

import msgspec

from runner.engine.batch import BatchPlan
from runner.engine.lifecycle import Reason
from runner.engine.order import Tier
from runner.engine.scheduler import StepResult
from runner.engine.sequence import Sequence
from runner.simulate.costs import Costs
from runner.simulate.foresight import Told
from runner.simulate.limits import Bound, Limits
from runner.simulate.spread import Spread


class Figures(msgspec.Struct, frozen=True):
    """Seconds."""

    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, spread: Spread) -> Self:
        """The four that are shown."""
        return cls(spread.percentile(0.5), spread.percentile(0.95), spread.percentile(0.99), spread.max)


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """How long requests of one tier waited for their first slot, or until they were given up; `starved` is the share beyond the bound."""

    n: int
    wait_s: Figures
    starved: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy with one number of slots. Rates by the simulated clock; `jain` is None where fewer than two clients had work.

    Shares are taken by weight. `waits_told` are of those that waited, `retries_told` of those that a bound refused for longer than a
    second, `admitted` is the share of all refused that would be admitted when told to ask again; None where there was none.

    `lone_ttft_s` is of requests whose client had nothing else unfinished when they came: what those see who ask for little.
    """

    policy: str
    n_slots: int
    n_served: int
    n_cancelled: int
    n_failed: int
    seconds: float
    busy: float
    requests_s: float
    generated_tok_s: float
    prompt_tok_s: float
    n_steps: int
    rows_a_step: float
    passes_a_step: float
    n_parked: int
    longest_queue: int
    ttft_s: Figures
    lone_ttft_s: Figures
    itl_s: Figures
    wait_s: Figures
    starved: float
    tiers: dict[str, Waits]
    jain: float | None
    n_timed_out: int = 0
    n_refused: int = 0
    admitted: float | None = None
    waits_told: Told | None = None
    retries_told: Told | None = None


class _Account:
    """One client: what was computed for it, and how long it had something unfinished."""

    __slots__ = ("n_open", "n_tokens", "open_s", "since", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.n_open = self.n_tokens = 0
        self.open_s = self.since = 0.0


class Tally:
    """Writes down a simulation as it runs. Its memory grows with the clients and not with the requests."""

    def __init__(self, *, bound_s: float) -> None:
        self._bound_s = bound_s
        self._ttft, self._lone_ttft, self._itl = Spread(), Spread(), Spread()
        self._lone: set[str] = set()
        self._waits = {tier: Spread() for tier in Tier}
        self._n_starved: Counter[Tier] = Counter()
        self._reasons: Counter[Reason] = Counter()
        self._accounts: dict[str, _Account] = {}
        self._n_open = self._longest_queue = self._n_parked = self._n_refused = 0
        self._n_steps = self._n_passes = self._n_rows = self._n_prompt_rows = self._n_generated = 0
        self._busy_s = self._until = 0.0

    @property
    def n_ended(self) -> int:
        """Requests in their final state, or refused."""
        return self._reasons.total() + self._n_refused

    def arrived(self, sequence: Sequence, now: float) -> None:
        """See `machine.Witness`; so for the others."""
        account = self._accounts.get(sequence.owner.client)
        if account is None:
            account = self._accounts[sequence.owner.client] = _Account(sequence.owner.weight)
        if account.n_open == 0:
            account.since = now
            self._lone.add(sequence.request_id)
        account.n_open += 1
        self._n_open += 1
        self._longest_queue = max(self._longest_queue, self._n_open)

    def stepped(self, plan: BatchPlan, seconds: float, result: StepResult, now: float) -> None:
        """Count rows and passes, and the gaps of the streams that went on."""
        self._until = now
        self._busy_s += seconds
        if not plan.chunks:
            return
        self._n_steps += 1
        self._n_passes += plan.n_passes
        self._n_generated += len(result.texts)
        self._n_prompt_rows += plan.n_prompt_rows
        self._n_rows += plan.n_rows
        gaps = result.gaps_s
        if gaps:
            first, n = gaps[0], 0
            for gap in gaps:
                if gap == first:
                    n += 1  # most rows of a step were in the step before
                else:
                    self._itl.add(gap)
            self._itl.add(first, n)

    def ended(self, sequence: Sequence, now: float) -> None:
        """Book its wait, its first token and its client's share."""
        times = sequence.times
        assert sequence.reason is not None
        self._reasons[sequence.reason] += 1
        self._n_parked += sequence.n_parks
        wait_s = (times.admitted_at or now) - times.arrived_at
        self._waits[sequence.tier].add(wait_s)
        self._n_starved[sequence.tier] += wait_s > self._bound_s
        if sequence.n_generated:
            self._ttft.add(times.first_token_at - times.arrived_at)
            if sequence.request_id in self._lone:
                self._lone_ttft.add(times.first_token_at - times.arrived_at)
        self._lone.discard(sequence.request_id)
        account = self._accounts[sequence.owner.client]
        if times.admitted_at:
            # Those that were given up while their prompt was computed count as if it had been.
            account.n_tokens += len(sequence.prompt) - sequence.n_cached + sequence.n_generated
        account.n_open -= 1
        self._n_open -= 1
        if account.n_open == 0:
            account.open_s += now - account.since

    def refused(self, client: str, bound: Bound, now: float) -> None:
        """It is counted."""
        self._n_refused += 1

    def row(self, policy: str, n_slots: int) -> Row:
        """All figures."""
        seconds, n_steps = max(self._until, 1e-9), max(1, self._n_steps)
        n_served = self._reasons[Reason.STOP] + self._reasons[Reason.LENGTH]
        waits = [(tier, spread) for tier, spread in self._waits.items() if spread.n]
        return Row(
            policy=policy,
            n_slots=n_slots,
            n_served=n_served,
            n_cancelled=self._reasons[Reason.CANCELLED],
            n_failed=self._reasons[Reason.ERROR],
            n_refused=self._n_refused,
            seconds=self._until,
            busy=self._busy_s / seconds,
            requests_s=n_served / seconds,
            generated_tok_s=self._n_generated / seconds,
            prompt_tok_s=self._n_prompt_rows / seconds,
            n_steps=self._n_steps,
            rows_a_step=self._n_rows / n_steps,
            passes_a_step=self._n_passes / n_steps,
            n_parked=self._n_parked,
            longest_queue=max(0, self._longest_queue - n_slots),
            ttft_s=Figures.of(self._ttft),
            lone_ttft_s=Figures.of(self._lone_ttft),
            itl_s=Figures.of(self._itl),
            wait_s=Figures.of(_merged(spread for _, spread in waits)),
            starved=self._n_starved.total() / max(1, self._reasons.total()),
            tiers={
                tier.name.lower(): Waits(n=spread.n, wait_s=Figures.of(spread), starved=self._n_starved[tier] / spread.n)
                for tier, spread in waits
            },
            jain=jain([account.n_tokens / account.open_s / account.weight for account in self._accounts.values() if account.open_s > 0]),
        )


def jain(shares: list[float]) -> float | None:
    """Jain's index, (sum x)² / (n sum x²): 1 where all have the same, 1/n where one has all. None for fewer than two."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if len(shares) > 1 and squares else None


def _merged(spreads: Iterable[Spread]) -> Spread:
    whole = Spread()
    for spread in spreads:
        whole.absorb(spread)
    return whole


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One trace under several policies and numbers of slots."""

    trace: str
    n_requests: int
    n_clients: int
    load: float
    seed: int
    n_ctx_slot: int
    bound_s: float
    limits: Limits
    costs: Costs
    rows: list[Row]

    def json(self) -> str:
        """One object, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def table(self) -> str:
        """What was asked, then a line for each policy and number of slots, then the waits by tier where there are several."""
        head = f"{self.trace}: {self.n_requests:,} requests of {self.n_clients:,} clients, load {self.load:g}, seed {self.seed}"
        parts = [head, aligned(_COLUMNS, [_cells(row) for row in self.rows])]
        if any(len(row.tiers) > 1 for row in self.rows):
            tiers = [_tier_cells(row, name, waits) for row in self.rows for name, waits in row.tiers.items()]
            parts.append(aligned(_TIER_COLUMNS, tiers))
        if any(row.waits_told or row.n_refused for row in self.rows):
            parts.append(aligned(_TOLD_COLUMNS, [_told_cells(row) for row in self.rows]))
        parts.append(
            "Times in seconds: p50 / p95 / p99 / longest. Lone: the client had nothing else unfinished. "
            f"Starved: waited more than {self.bound_s:g} s for a slot. Jain: 1 is fair. Told / came: p10 / p50 / p90."
        )
        return "\n\n".join(parts)


_COLUMNS: Final = (
    *("policy", "slots", "tokens/s", "requests/s", "busy", "first token", "the same, lone", "token gap", "wait for a slot"),
    *("starved", "parked", "Jain"),
)
_TOLD_COLUMNS: Final = (
    *("policy", "slots", "waits told", "median error", "told / came", "within 2x"),
    *("refused", "timed out", "beyond 1 s", "Retry-After / came", "within 2x", "then admitted"),
)
_TIER_COLUMNS: Final = ("policy", "slots", "tier", "requests", "wait for a slot", "starved")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.policy,
        str(row.n_slots),
        f"{row.generated_tok_s:,.1f}",
        f"{row.requests_s:,.2f}",
        f"{row.busy:.0%}",
        _shown(row.ttft_s),
        _shown(row.lone_ttft_s),
        _shown(row.itl_s),
        _shown(row.wait_s),
        f"{row.starved:.2%}",
        f"{row.n_parked:,}",
        "" if row.jain is None else f"{row.jain:.3f}",
    )


def _tier_cells(row: Row, name: str, waits: Waits) -> tuple[str, ...]:
    return (row.policy, str(row.n_slots), name, f"{waits.n:,}", _shown(waits.wait_s), f"{waits.starved:.2%}")


def _told_cells(row: Row) -> tuple[str, ...]:
    waits, retries = row.waits_told, row.retries_told
    return (
        row.policy,
        str(row.n_slots),
        *(("", "", "", "") if waits is None else (f"{waits.n:,}", f"{waits.error_p50:.0%}", _ratios(waits), f"{waits.within_2:.0%}")),
        f"{row.n_refused:,}",
        f"{row.n_timed_out:,}",
        *(("", "", "") if retries is None else (f"{retries.n:,}", _ratios(retries), f"{retries.within_2:.0%}")),
        "" if row.admitted is None else f"{row.admitted:.0%}",
    )


def _ratios(told: Told) -> str:
    return f"{told.ratio_p10:.2f} / {told.ratio_p50:.2f} / {told.ratio_p90:.2f}"


def _shown(figures: Figures) -> str:
    return " / ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (figures.p50, figures.p95, figures.p99, figures.max))


def aligned(head: tuple[str, ...], rows: Rows[tuple[str, ...]]) -> str:
    """Columns two spaces apart, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in (head, *rows)
    ]
    return "\n".join(lines)
