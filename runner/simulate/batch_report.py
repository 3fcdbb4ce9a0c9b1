"""What came of batching: rates, times to the answer, what was shed, and the gaps of the streams beside."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from runner.simulate.costs import Costs
from runner.simulate.report import Figures, aligned


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in one scenario. `of_full`: items a second as a share of what full batches give. `late`: served after the deadline.

    `latency_s`: from arrival to answer, of those served. `gap_s`: between two tokens of the streams beside; None without streams.
    """

    scenario: str
    policy: str
    n_served: int
    n_shed: int
    n_refused: int
    n_late: int
    items_s: float
    of_full: float
    items_a_batch: float
    latency_s: Figures
    gap_s: Figures | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A row for each scenario and policy."""

    n_items: int
    load: float
    seed: int
    max_wait_s: float
    max_batch_size: int
    n_ubatch: int
    costs: Costs
    rows: list[Row]

    def table(self) -> str:
        """For people."""
        title = f"{self.n_items:,} items a scenario, load {self.load:g}, seed {self.seed}"
        limits = f"{self.max_batch_size} items and {self.n_ubatch} tokens a batch, waits up to {self.max_wait_s * 1000:g} ms"
        return f"{title}; {limits}\n\n{aligned(_HEAD, [_cells(row) for row in self.rows])}\n\n{_LEGEND}"

    def json(self) -> str:
        """One object, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


_HEAD: Final = (
    "scenario",
    "policy",
    "items/s",
    "of full",
    "a batch",
    "latency p50/p95/p99/max, ms",
    "shed",
    "late",
    "gap p50/p95/p99/max, ms",
)
_LEGEND: Final = (
    "single: no batching. eager: what waits, without waiting for more. fixed: waits until full or for the longest wait. "
    "of full: items/s as a share of full batches. shed: told at once or before a batch that they would be late."
)


def _cells(row: Row) -> tuple[str, ...]:
    n = row.n_served + row.n_shed + row.n_refused
    return (
        row.scenario,
        row.policy,
        f"{row.items_s:,.1f}",
        f"{row.of_full:.2f}",
        f"{row.items_a_batch:.1f}",
        _ms(row.latency_s),
        f"{(row.n_shed + row.n_refused) / n:.1%}",
        f"{row.n_late / n:.1%}",
        "" if row.gap_s is None else _ms(row.gap_s),
    )


def _ms(figures: Figures) -> str:
    return " / ".join(f"{value * 1000:,.0f}" for value in (figures.p50, figures.p95, figures.p99, figures.max))


@dataclass(slots=True)
class Tally:
    """What happens, written down. `ends`: what became of each item, by its id: "served", "late", "shed" or "refused"."""

    latencies_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)

    def end(self, item_id: str, how: str) -> None:
        """An item ends once."""
        assert item_id not in self.ends, f"{item_id} ends twice"
        self.ends[item_id] = how

    def count(self, *how: str) -> int:
        """Items that ended so."""
        return sum(end in how for end in self.ends.values())


def figures(values: Iterable[float]) -> Figures:
    """Exact percentiles; 0 of none."""
    found = sorted(values) or [0.0]
    p50, p95, p99 = (found[min(len(found) - 1, int(share * len(found)))] for share in (0.5, 0.95, 0.99))
    return Figures(p50, p95, p99, found[-1])
