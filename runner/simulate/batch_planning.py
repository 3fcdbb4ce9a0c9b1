"""What deciding about a batch costs, and whether that grows with the number of items that wait. Real time, so never a test."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from runner.engine.batching.adaptive_batch import AdaptiveBatcher
from runner.engine.batching.items import BatchLimits, Item
from runner.engine.order import Owner
from runner.simulate.report import aligned

WAITING: Final = (10, 100_000)
N_BATCHES: Final = 2_000
_N_CLIENTS: Final = 10_000
_N_TOKENS: Final = 32
_PATIENCE_S: Final = 1e6
_PASS_S: Final = 0.03
_LIMITS: Final = BatchLimits(n_ubatch=512, max_batch_size=8, max_waiting=1 << 20)

T = TypeVar("T")


class BatchPlanning(msgspec.Struct, frozen=True, kw_only=True):
    """Medians in microseconds with so many waiting: to add an item, to decide about a batch of 8, to cancel one."""

    n_waiting: int
    add_us: float
    plan_us: float
    cancel_us: float


def measure(waiting: Sequence[int] = WAITING, n_batches: int = N_BATCHES) -> list[BatchPlanning]:
    """With few and with many waiting."""
    return [_measured(n_waiting, n_batches) for n_waiting in waiting]


def planning_table(found: list[BatchPlanning]) -> str:
    """A line each."""
    rows = [(f"{row.n_waiting:,}", f"{row.add_us:.1f}", f"{row.plan_us:.1f}", f"{row.cancel_us:.1f}") for row in found]
    return aligned(("waiting", "add, µs", "batch of 8, µs", "cancel, µs"), rows)


def planning_json(found: list[BatchPlanning]) -> str:
    """One array, indented."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def _measured(n_waiting: int, n_batches: int) -> BatchPlanning:
    bench = _Bench()
    for _ in range(n_waiting):
        bench.add()
    adds, plans, cancels = [], [], []
    for _ in range(n_batches):
        n_served, seconds = bench.batch()
        plans.append(seconds)
        adds += [bench.add() for _ in range(n_served + 1)]
        cancels.append(bench.cancel())
    return BatchPlanning(
        n_waiting=n_waiting,
        add_us=statistics.median(adds) * 1e6,
        plan_us=statistics.median(plans) * 1e6,
        cancel_us=statistics.median(cancels) * 1e6,
    )


class _Bench:
    """Items of one length with deadlines far away, each of the next client."""

    def __init__(self) -> None:
        self._batcher = AdaptiveBatcher(_LIMITS)
        self._now = 0.0
        self._n = 0

    def add(self) -> float:
        """Timed."""
        self._n += 1
        item = Item(str(self._n), _N_TOKENS, self._now, self._now + _PATIENCE_S, Owner(str(self._n % _N_CLIENTS)))
        return _timed(lambda: self._batcher.add(item, self._now))[1]

    def batch(self) -> tuple[int, float]:
        """Decide, timed, then pretend to compute: how many items, and the seconds of the decision."""
        decision, seconds = _timed(lambda: self._batcher.next_batch(self._now))
        self._now += _PASS_S
        self._batcher.complete(self._now, _PASS_S)
        return len(decision.batch), seconds

    def cancel(self) -> float:
        """Timed. The newest."""
        return _timed(lambda: self._batcher.cancel(str(self._n)))[1]


def _timed(do: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    found = do()
    return found, time.perf_counter() - started
