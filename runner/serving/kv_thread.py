"""The thread that moves parked cells to disk and back: nobody who decodes waits for a disk."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from runner.serving.kv_files import Change, KvDirectory, KvEntry
from runner.serving.kv_format import SavedState

MIB: Final = 1 << 20
# More requests than this do not wait for a disk: what comes then is told at once that there is nothing.
MAX_FETCHES: Final = 1024

_LOG: Final = logging.getLogger("slotfile.kv")


class KvThread:
    """Owns a `KvDirectory` from the start on. `save`, `fetch`, `delete` and `close` are for any thread and never wait for the disk.

    `on_change` is called in the thread with what each write changed, `done` of a fetch with what it found. A request waits for what is
    fetched, so fetches and deletions go before saves, each kind in its order.
    """

    def __init__(self, directory: KvDirectory, *, max_backlog_bytes: int, on_change: Callable[[Change], None]) -> None:
        """Start it. `max_backlog_bytes` bounds what saves hold in memory, the one that is being written included."""
        self._directory, self._max_backlog_bytes, self._on_change = directory, max_backlog_bytes, on_change
        self._has_work = threading.Condition()
        self._orders: deque[Callable[[], None]] = deque()
        self._saves: deque[SavedState] = deque()
        self._backlog_bytes = 0
        self._is_closing = self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="kv files", daemon=True)
        self._thread.start()

    def save(self, state: SavedState) -> None:
        """Have a state written. Where the disk does not keep up the oldest that waits is not saved; after `close` none is."""
        with self._has_work:
            if self._is_closing:
                return
            self._saves.append(state)
            self._backlog_bytes += state.n_bytes
            dropped = self._drop_oldest()
            self._has_work.notify()
        if dropped:
            n_bytes = sum(state.n_bytes for state in dropped)
            _LOG.warning("The disk does not keep up: %d states of %.1f MiB are not saved", len(dropped), n_bytes / MIB)

    def fetch(self, entry: KvEntry, done: Callable[[SavedState | None], None]) -> None:
        """Have a state read. `done` is called once: at once with None where too many wait or `close` was called, else in the thread."""
        with self._has_work:
            is_taken = not self._is_closing and len(self._orders) < MAX_FETCHES
            if is_taken:
                self._orders.append(lambda: self._fetch(entry, done))
                self._has_work.notify()
        if not is_taken:
            done(None)

    def delete(self, entry: KvEntry) -> None:
        """Have a state removed."""
        with self._has_work:
            if not self._is_closing:
                self._orders.append(lambda: self._directory.delete(entry))
                self._has_work.notify()

    def close(self, timeout_s: float) -> bool:
        """Take nothing more, and wait until all is done. False where that took longer: what was not begun then never is."""
        with self._has_work:
            self._is_closing = True
            self._has_work.notify()
        self._thread.join(timeout_s)
        with self._has_work:
            self._is_given_up = True
            n_lost = len(self._saves)
        is_done = not self._thread.is_alive()
        if not is_done:
            _LOG.warning("%d states are not saved: the disk took longer than %.1f s", n_lost, timeout_s)
        return is_done

    def _drop_oldest(self) -> list[SavedState]:
        dropped = []
        while self._backlog_bytes > self._max_backlog_bytes and self._saves:
            dropped.append(self._saves.popleft())
            self._backlog_bytes -= dropped[-1].n_bytes
        return dropped

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:  # noqa: BLE001 - the edge of this thread: the states that come after it are moved all the same
                _LOG.exception("A bug of ours: parked cells were not moved")
        self._directory.close()

    def _next(self) -> Callable[[], None] | None:
        """What is to be done now; None: nothing ever again."""
        with self._has_work:
            while not (self._orders or self._saves or self._is_closing):
                self._has_work.wait()
            if self._is_given_up:
                return None
            if self._orders:
                return self._orders.popleft()
            if not self._saves:
                return None
            state = self._saves.popleft()
            return lambda: self._save(state)

    def _save(self, state: SavedState) -> None:
        try:
            change = self._directory.write(state)
        finally:
            with self._has_work:
                self._backlog_bytes -= state.n_bytes
        self._on_change(change)

    def _fetch(self, entry: KvEntry, done: Callable[[SavedState | None], None]) -> None:
        state = None
        try:
            state = self._directory.read(entry)
        finally:
            done(state)
