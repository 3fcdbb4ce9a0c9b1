"""Cells on disk, as the decode loop sees them: found when a request comes, read before it is scheduled, written behind its back.

Belongs to the decode thread. Files are the business of a thread (kv_thread.py), whose answers come through the loop's inbox.

    a request comes   its prompt begins like a file does, by more tokens than slots and host memory have: it is held until that is read
    cells are saved   to host memory, as a slot goes to another: a file is written
    nothing to do     cells of idle slots that no file has: a file is written, one a second
    the end           the same for all of them
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from runner.engine.cells import Cells, Slot
from runner.engine.kv import KvOp, Save
from runner.engine.memory import KvMemory
from runner.engine.placing import LEAST_SAVED
from runner.engine.prefix_index import PrefixIndex
from runner.engine.sequence import Sequence
from runner.serving.kv_files import Change, KvDirectory, KvEntry
from runner.serving.kv_format import SavedCheckpoint, SavedState
from runner.serving.kv_thread import KvThread
from runner.serving.loop import News
from runner.serving.prepare import Prepared

# For fewer tokens than this beyond those that memory has nobody waits for a disk.
LEAST_FETCHED: Final = 64
# What waits to be written may take so much memory, or as much as the largest state.
_MAX_BACKLOG_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a file held that a request waits for; None: nothing of use."""

    request_id: str
    file: "KvFile"
    state: SavedState | None


class HostStates(Protocol):
    """The back end's bytes."""

    def state(self, state_id: int) -> memoryview | None:
        """Of a saved state or checkpoint; None where it was never saved."""

    def slot_state(self, slot_id: int) -> memoryview | None:
        """Of a slot, as if it were saved; None where llama.cpp could not."""

    def adopt(self, state_id: int, data: memoryview) -> None:
        """Keep one that was read elsewhere."""


@dataclass(slots=True, eq=False)
class KvFile:
    """A file that can be found by how its tokens begin."""

    entry: KvEntry

    @property
    def domain(self) -> str:
        """See `Cells`."""
        return self.entry.domain

    @property
    def known(self) -> list[int]:
        """Its tokens."""
        return self.entry.tokens


class KvDisk:
    """The files of one engine."""

    def __init__(
        self,
        directory: KvDirectory,
        memory: KvMemory,
        states: HostStates,
        *,
        tell: Callable[[News], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`tell` puts a message in the loop's inbox, from any thread. `clock` is that of `Cells.used_at`."""
        self._memory, self._states, self._tell = memory, states, tell
        self._clock, self._wall_clock = clock, wall_clock
        self._index: PrefixIndex[KvFile] = PrefixIndex()
        self._files: dict[str, KvFile] = {}
        self._held: dict[str, Prepared] = {}
        for entry in sorted(directory.entries, key=lambda entry: -len(entry.tokens)):
            if self._goes_on(entry.tokens, entry.domain):
                directory.delete(entry)  # the process ended between the newer file and this
            else:
                self._take_in(entry)
        backlog = max(_MAX_BACKLOG_BYTES, 2 * memory.kind.state_bytes(memory.kind.slot_cells))
        self._thread = KvThread(directory, max_backlog_bytes=backlog, on_change=lambda change: tell(News(change)))

    @property
    def n_held(self) -> int:
        """Requests that wait for a file."""
        return len(self._held)

    # -- requests ------------------------------------------------------------------------------------------------------

    def hold(self, prepared: Prepared) -> bool:
        """Whether the request waits for a file; `Fetched` will come then."""
        file = self._file_for(prepared.sequence)
        if file is None:
            return False
        request_id = prepared.sequence.request_id
        self._held[request_id] = prepared
        self._thread.fetch(file.entry, lambda state: self._tell(News(Fetched(request_id, file, state))))
        return True

    def release(self, request_id: str) -> Prepared | None:
        """The request waits no more; None where it does not."""
        return self._held.pop(request_id, None)

    def hear(self, news: News) -> Prepared | None:
        """Take what the thread has to tell; returns the request that waits no more."""
        match news.what:
            case Fetched() as fetched:
                self._adopt(fetched)
                return self.release(fetched.request_id)
            case Change() as change:
                self._note(change)
        return None

    # -- files ---------------------------------------------------------------------------------------------------------

    def save_behind(self, ops: Iterable[KvOp]) -> None:
        """Have those conversations written that these operations saved. Those of parked sequences go on soon."""
        for op in ops:
            if isinstance(op, Save):
                cells = self._memory.host.get(op.state_id)
                if cells is not None and cells.owner is None:
                    self._save(cells, self._states.state(op.state_id))

    def save_idle(self, *, all_of_them: bool = False) -> None:
        """Have the cells of an idle slot written that no file has, or of all."""
        for slot in self._memory.pool.slots:
            if (slot.is_free or all_of_them) and self._is_worth_a_file(slot):
                self._save(slot, self._states.slot_state(slot.slot_id))
                if not all_of_them:
                    return

    def close(self, timeout_s: float) -> None:
        """Have everything written that is worth it, and wait for that so long."""
        self.save_idle(all_of_them=True)
        for cells in self._memory.host:
            if cells.owner is None and not self._has_file(cells):
                self._save(cells, self._states.state(cells.state_id))
        self._thread.close(timeout_s)

    def _adopt(self, fetched: Fetched) -> None:
        """Take what was read into host memory, where it may be found by whoever comes."""
        state = fetched.state
        if state is None:
            self._forget(fetched.file)
            return
        sizes = [(checkpoint.pos, checkpoint.data.nbytes) for checkpoint in state.checkpoints]
        cells = self._memory.adopt(state.tokens, state.domain, state.session, self._clock(), sizes)
        if cells is None:
            return
        self._states.adopt(cells.state_id, state.cells)
        for mark, checkpoint in zip(cells.marks, state.checkpoints, strict=True):
            self._states.adopt(mark.state_id, checkpoint.data)

    def _note(self, change: Change) -> None:
        """Files whose conversation goes on in the new one are deleted."""
        for entry in change.gone:
            if (file := self._files.get(entry.name)) is not None:
                self._forget(file)
        added = change.added
        if added is None or added.name in self._files:
            return
        for older in self._index.prefixes_of(added.tokens, added.domain):
            self._thread.delete(older.entry)
            self._forget(older)
        self._take_in(added)

    def _file_for(self, sequence: Sequence) -> KvFile | None:
        if not sequence.cache_prompt:
            return None
        file, n = next(self._index.matches(sequence.script, sequence.domain, 1), (None, 0))
        return file if n >= self._memory.n_had(sequence) + LEAST_FETCHED else None

    def _is_worth_a_file(self, slot: Slot) -> bool:
        if slot.is_pending or slot.is_shifted or (slot.sequence is not None and slot.sequence.is_stateless):
            return False
        return len(slot.tokens) >= LEAST_SAVED and not self._has_file(slot)

    def _save(self, cells: Cells, data: memoryview | None) -> None:
        marks = [(mark.pos, self._states.state(mark.state_id)) for mark in cells.marks]
        if data is None:
            return
        checkpoints = tuple(SavedCheckpoint(pos, part) for pos, part in marks if part is not None)
        used_at = self._wall_clock() - (self._clock() - cells.used_at)
        self._thread.save(SavedState(list(cells.tokens), cells.domain, cells.session, data, checkpoints, used_at))

    def _has_file(self, cells: Cells) -> bool:
        return self._goes_on(cells.tokens, cells.domain)

    def _goes_on(self, tokens: list[int], domain: str) -> bool:
        """Whether a file has these tokens, and maybe more."""
        return any(n == len(tokens) for _, n in self._index.matches(tokens, domain, 1))

    def _take_in(self, entry: KvEntry) -> None:
        file = self._files[entry.name] = KvFile(entry)
        self._index.put(file)

    def _forget(self, file: KvFile) -> None:
        if self._files.pop(file.entry.name, None) is not None:
            self._index.discard(file)
