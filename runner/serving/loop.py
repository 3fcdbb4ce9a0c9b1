"""The decode loop: the one thread that touches llama.cpp's context."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from runner.engine.backend import Backend
from runner.engine.batch import BatchPlan, Outcome
from runner.engine.kv import Copy, Fork, KvOp, Load, Park, Save, Shift, Swap, Trim
from runner.engine.lifecycle import Reason, State
from runner.engine.scheduler import Scheduler, StepResult
from runner.engine.sequence import Sequence
from runner.serving.prepare import Prepared
from runner.serving.protocol import (
    FLUSH_S,
    Cancel,
    Counters,
    Delta,
    Failed,
    Finished,
    Flush,
    HostState,
    SlotState,
    Snapshot,
    Stamps,
    StepEvents,
)
from runner.serving.timings import GapHistogram

_SNAPSHOT_EVERY_S = 0.05
_QUEUE_EVERY_S = 0.25
_IDLE_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class News:
    """What the thread that reads and writes cells on disk has to tell, in words of its own."""

    what: object


class Disk(Protocol):
    """Cells on disk (kv_disk.py, which is imported only where there are some)."""

    def hold(self, prepared: Prepared) -> bool:
        """Whether the request waits for a file."""

    def release(self, request_id: str) -> Prepared | None:
        """The request waits no more; None where it does not."""

    def hear(self, news: News) -> Prepared | None:
        """Take news; returns the request that waits no more."""

    def save_behind(self, ops: Iterable[KvOp]) -> None:
        """Have written what these operations saved."""

    def save_idle(self) -> None:
        """Have an idle slot's cells written."""

    def close(self, timeout_s: float) -> None:
        """Have all written that is worth it, and wait so long."""


Message = Prepared | Cancel | Flush | News


@dataclass(slots=True)
class Totals:
    """Counters since the start; times in seconds."""

    n_steps: int = 0
    n_passes: int = 0
    n_decode_rows: int = 0
    n_prompt_rows: int = 0
    n_cached_tokens: int = 0
    n_swaps: int = 0
    n_parks: int = 0
    n_forks: int = 0
    n_saves: int = 0
    n_loads: int = 0
    n_shifts: int = 0
    n_violations: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NativeSeconds:
    """What the backend spent outside Python so far."""

    decode_s: float
    sample_s: float
    move_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.decode_s + self.sample_s + self.move_s


class EngineLoop:
    """Drives scheduler and backend. `inbox` may be filled from any thread; everything else belongs to `run`'s."""

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        *,
        clock: Callable[[], float],
        emit: Callable[[StepEvents], None],
        native: Callable[[], NativeSeconds],
        first_guess_s: float,
        checks_each_step: bool = False,
    ) -> None:
        """`checks_each_step`: what must hold of the cells is looked at after every step; else when there is nothing to do."""
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.totals = Totals()
        self._gaps = GapHistogram()
        self._scheduler, self._backend = scheduler, backend
        self._clock, self._emit, self._native = clock, emit, native
        self._first_guess_s, self._checks_each_step = first_guess_s, checks_each_step
        self.disk: Disk | None = None
        self.is_over = False
        self._events = _no_events()
        self._snapshot_at = self._queue_at = 0.0
        self._had_queue = False
        self._was_busy = True

    def run(self) -> None:
        """Step until the front says that it is enough; mostly the process ends with the front's own end."""
        # Before the first step, which may be the longest: the front learns what to expect of it.
        self._emit(StepEvents(snapshot=self._snapshot()))
        while not self.is_over:
            self.step()

    def step(self) -> None:
        """Take what arrived, compute one batch, tell what came of it."""
        started = self._clock()
        self._drain_inbox(started)
        plan = self._scheduler.plan(started)
        moved_s = 0.0
        refused = []
        if plan.kv_ops:
            refused = self._backend.apply(plan.kv_ops)
            self._count_moves(plan.kv_ops)
            moved_s = self._clock() - started
            if self.disk is not None:
                self.disk.save_behind(plan.kv_ops)
        if refused:
            plan = self._scheduler.without(plan, refused)
        self._open_samplers()
        outcome = self._backend.decode(plan) if plan.chunks else Outcome.DONE
        sampled = self._backend.sample(plan) if outcome is Outcome.DONE and plan.chunks else []
        cells = {chunk.slot_id: self._backend.n_cells(chunk.slot_id) for chunk in plan.chunks} if outcome is Outcome.BROKEN else None
        now = self._clock()
        self._count(plan)
        self._collect(self._scheduler.commit(plan, outcome, sampled, now, cells, moved_s=moved_s))
        self._send(now)
        if plan.chunks:
            self.totals.busy_s += self._clock() - started
        if self._checks_each_step or (plan.chunks and not self._scheduler.has_work):
            # After what this step brought is on its way: nobody waits for this.
            self._check_cells(now)
        if not self._scheduler.has_work:
            self._wait_for_work()

    def _check_cells(self, now: float) -> None:
        """Whatever does not hold costs one request: its slot's."""
        orders = {op.slot_id for op in self._scheduler.memory.orders if isinstance(op, Trim | Shift)}
        for slot in self._scheduler.pool.slots:
            if slot.slot_id in orders:
                continue  # its tokens are those that it will have
            why = self._backend.broken_invariant(slot.slot_id, len(slot.tokens))
            if why is not None:
                self.totals.n_violations += 1
                sys.stderr.write(f"Slot {slot.slot_id} is emptied: {why}\n")
                self._collect(self._scheduler.condemn(slot.slot_id, f"The slot's cells are damaged: {why}", now))
                self._send(now)

    # -- in ------------------------------------------------------------------------------------------------------------

    def _drain_inbox(self, now: float) -> None:
        while not self.inbox.empty():
            self._receive(self.inbox.get(), now)

    def _receive(self, message: Message, now: float) -> None:
        match message:
            case Prepared() if self.disk is not None and self.disk.hold(message):
                pass
            case Prepared():
                self._add(message)
            case Cancel(request_id):
                if self.disk is not None and (held := self.disk.release(request_id)) is not None:
                    self._add(held)
                ended = self._scheduler.cancel(request_id, now)
                if ended is not None:
                    self._events.finished.append(_finished(ended))
            case News() if self.disk is not None:
                if (held := self.disk.hear(message)) is not None:
                    self._add(held)
            case Flush():
                if self.disk is not None:
                    self.disk.close(FLUSH_S)
                self.is_over = True

    def _add(self, prepared: Prepared) -> None:
        self._scheduler.add(prepared.sequence)
        if prepared.echo:
            self._events.deltas.append(Delta(prepared.sequence.request_id, prepared.echo, 0))

    def _open_samplers(self) -> None:
        placed = self._scheduler.take_placed()
        if placed:
            # At once and not with the step's events: should this step end the process, the front must know who was in it.
            self._emit(StepEvents(placed=[sequence.request_id for sequence in placed]))
        for sequence in placed:
            if sequence.n_parks == 0:
                self.totals.n_cached_tokens += sequence.n_cached
            if sequence.slot_id is not None and sequence.n_parks == 0:  # a parked one's chain came back with it
                tail = sequence.tail(sequence.sampling.repeat_last_n)
                self._backend.open_sampler(sequence.slot_id, sequence.sampling, tail, ignore_eos=sequence.ignore_eos)

    def _wait_for_work(self) -> None:
        try:
            message = self.inbox.get(timeout=_IDLE_WAIT_S)
        except Empty:
            if self.disk is not None:
                self.disk.save_idle()
            return
        self._receive(message, self._clock())

    # -- out -----------------------------------------------------------------------------------------------------------

    def _count(self, plan: BatchPlan) -> None:
        totals = self.totals
        if plan.chunks:
            totals.n_steps += 1
            totals.n_passes += plan.n_passes
            n_prompt_rows = plan.n_prompt_rows
            totals.n_prompt_rows += n_prompt_rows
            totals.n_decode_rows += plan.n_rows - n_prompt_rows

    def _count_moves(self, ops: Iterable[KvOp]) -> None:
        totals = self.totals
        for op in ops:
            match op:
                case Swap():
                    totals.n_swaps += 1
                case Park():
                    totals.n_parks += 1
                case Fork() | Copy():
                    totals.n_forks += 1
                case Save():
                    totals.n_saves += 1
                case Load():
                    totals.n_loads += 1
                case Shift():
                    totals.n_shifts += 1

    def _collect(self, result: StepResult) -> None:
        events = self._events
        for sequence, text in result.texts:
            events.deltas.append(Delta(sequence.request_id, text, 1))
        events.finished.extend(map(_finished, result.ended))
        for gap_s in result.gaps_s:
            self._gaps.observe(gap_s)
        for sequence, why in result.failed:
            events.failed.append(Failed(sequence.request_id, "internal_error", why))

    def _send(self, now: float) -> None:
        is_busy = self._scheduler.has_work
        fell_idle = self._was_busy and not is_busy
        self._was_busy = is_busy
        events = self._events
        if fell_idle or now - self._snapshot_at >= _SNAPSHOT_EVERY_S:
            self._snapshot_at = now
            events.snapshot = self._snapshot()
        elif not (events.deltas or events.finished or events.failed):
            return
        self._emit(events)
        self._events = _no_events()

    def _snapshot(self) -> Snapshot:
        totals, native = self.totals, self._native()
        python_s = max(0.0, totals.busy_s - native.total_s)
        counters = Counters(
            n_steps=totals.n_steps,
            n_passes=totals.n_passes,
            n_decode_rows=totals.n_decode_rows,
            n_prompt_rows=totals.n_prompt_rows,
            n_cached_tokens=totals.n_cached_tokens,
            n_moves=totals.n_swaps,
            n_parks=totals.n_parks,
            n_forks=totals.n_forks,
            n_saves=totals.n_saves,
            n_loads=totals.n_loads,
            n_shifts=totals.n_shifts,
            n_violations=totals.n_violations,
            decode_s=native.decode_s,
            sample_s=native.sample_s,
            move_s=native.move_s,
            python_s=python_s,
            itl_s=self._gaps.sum_s,
            itl_counts=self._gaps.counts,
        )
        slots = [_slot_state(slot.slot_id, slot.sequence, len(slot.tokens)) for slot in self._scheduler.pool.slots]
        longest_step_s = self._scheduler.longest_step_s or self._first_guess_s
        scheduler = self._scheduler
        n_waiting, queue = len(scheduler.waiting), self._queue_order()
        host = scheduler.memory.host
        kept = HostState(len(host), host.used_bytes, host.limit_bytes, scheduler.parked_bytes)
        return Snapshot(slots, n_waiting, counters, longest_step_s, scheduler.n_parked, kept, queue, scheduler.memory.n_used_cells)

    def _queue_order(self) -> list[str] | None:
        """Now and then, and once when the queue has become empty."""
        waiting, now = self._scheduler.waiting, self._clock()
        if not waiting and not self._had_queue:
            return None
        if waiting and now - self._queue_at < _QUEUE_EVERY_S:
            return None
        self._queue_at, self._had_queue = now, bool(waiting)
        return waiting.preview()


def _no_events() -> StepEvents:
    return StepEvents(placed=[], deltas=[], finished=[], failed=[])


def _slot_state(slot_id: int, sequence: Sequence | None, n_cells: int) -> SlotState:
    if sequence is None:
        return SlotState(slot_id, "idle", "", n_cells, 0, 0, 0)
    state = "prefill" if sequence.state is State.PREFILL else "decode"
    return SlotState(slot_id, state, sequence.request_id, n_cells, len(sequence.prompt), sequence.n_cached, sequence.n_generated)


def _finished(sequence: Sequence) -> Finished:
    assert sequence.reason is not None
    assert sequence.reason is not Reason.ERROR
    times = sequence.times
    stamps = Stamps(times.arrived_at, times.prepared_at, times.admitted_at, times.first_token_at, times.finished_at, times.parked_s)
    return Finished(sequence.request_id, sequence.reason.value, len(sequence.prompt), sequence.n_cached, sequence.n_generated, stamps)
