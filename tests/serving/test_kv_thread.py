"""The thread of parked cells: in what order, within what memory, and how it ends."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.serving.kv_files import Change, KvDirectory, KvEntry
from runner.serving.kv_format import SavedState
from runner.serving.kv_thread import MAX_FETCHES, KvThread
from tests.serving.kv_states import KEY, content, state

WITHIN_S = 10.0
LARGE = 1 << 30


class Gate(KvDirectory):
    """A directory whose disk stands still until `opened` is set. Notes what it is asked for, in order."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, KEY, LARGE)
        self.opened, self.is_reached = threading.Event(), threading.Event()
        self.asked: list[tuple[str, int]] = []
        self.is_closed = False

    def _wait(self, what: str, tokens: list[int]) -> None:
        self.asked.append((what, tokens[0]))
        self.is_reached.set()
        assert self.opened.wait(WITHIN_S)

    def write(self, state: SavedState) -> Change:
        self._wait("write", state.tokens)
        return super().write(state)

    def read(self, entry: KvEntry) -> SavedState | None:
        self._wait("read", entry.tokens)
        return super().read(entry)

    def delete(self, entry: KvEntry) -> None:
        self._wait("delete", entry.tokens)
        super().delete(entry)

    def close(self) -> None:
        super().close()
        self.is_closed = True


class Rig:
    """A thread over a gate, and what it said."""

    def __init__(self, path: Path, max_backlog_bytes: int = LARGE) -> None:
        self.gate = Gate(path)
        self.changes: list[Change] = []
        self.fetched: list[SavedState | None] = []
        self.has_fetched = threading.Semaphore(0)
        self.thread = KvThread(self.gate, max_backlog_bytes=max_backlog_bytes, on_change=self.changes.append)

    def done(self, found: SavedState | None) -> None:
        """What a fetch calls."""
        self.fetched.append(found)
        self.has_fetched.release()

    def save(self, seed: int, n_bytes: int = 1000) -> SavedState:
        """Save a state that begins with its seed."""
        made = state(seed=seed, n_bytes=n_bytes)
        made.tokens[0] = seed
        self.thread.save(made)
        return made


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """With room for all."""
    rig = Rig(tmp_path / "kv")
    yield rig
    rig.gate.opened.set()
    assert rig.thread.close(WITHIN_S)


def test_saved_state_is_announced_and_fetched(rig: Rig) -> None:
    rig.gate.opened.set()
    saved = rig.save(1)
    entry = _first_added(rig)
    rig.thread.fetch(entry, rig.done)
    assert rig.has_fetched.acquire(timeout=WITHIN_S)
    assert content(rig.fetched[0]) == content(saved)


def test_whoever_saves_fetches_and_deletes_does_not_wait_for_the_disk(rig: Rig, tmp_path: Path) -> None:
    entry = _entry_on_disk(tmp_path)
    rig.save(1)
    rig.thread.fetch(entry, rig.done)
    rig.thread.delete(entry)
    assert (rig.changes, rig.fetched) == ([], [])


def test_what_a_request_waits_for_goes_before_saves(rig: Rig, tmp_path: Path) -> None:
    entry = _entry_on_disk(tmp_path)
    rig.save(1)
    assert rig.gate.is_reached.wait(WITHIN_S)
    rig.save(2)
    rig.save(3)
    rig.thread.fetch(entry, rig.done)
    rig.thread.delete(entry)
    rig.gate.opened.set()
    assert rig.thread.close(WITHIN_S)
    assert rig.gate.asked == [("write", 1), ("read", 99), ("delete", 99), ("write", 2), ("write", 3)]


def test_backlog_is_bounded_and_the_oldest_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path / "kv", max_backlog_bytes=3000)
    rig.save(1)
    assert rig.gate.is_reached.wait(WITHIN_S)
    for seed in (2, 3, 4, 5):
        rig.save(seed)
    rig.save(6, n_bytes=2500)  # more than what is left beside the one that is being written
    rig.save(7)
    rig.gate.opened.set()
    assert rig.thread.close(WITHIN_S)
    assert rig.gate.asked == [("write", 1), ("write", 7)]
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "The disk does not keep up: 1 states of 0.0 MiB are not saved"
    assert len(told) == 3


def test_backlog_shrinks_as_it_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path / "kv", max_backlog_bytes=1000)
    rig.gate.opened.set()
    for seed in range(1, 20):
        rig.save(seed)
        while len(rig.changes) < seed:
            threading.Event().wait(0.001)
    assert rig.thread.close(WITHIN_S)
    assert caplog.records == []


def test_too_many_fetches_are_told_at_once_that_there_is_nothing(rig: Rig, tmp_path: Path) -> None:
    entry = _entry_on_disk(tmp_path)
    rig.save(1)
    assert rig.gate.is_reached.wait(WITHIN_S)
    for _ in range(MAX_FETCHES):
        rig.thread.fetch(entry, rig.done)
    assert rig.fetched == []
    rig.thread.fetch(entry, rig.done)
    assert rig.fetched == [None]


def test_close_writes_all_that_was_saved_and_lets_go_of_the_directory(rig: Rig, tmp_path: Path) -> None:
    for seed in range(1, 6):
        rig.save(seed)
    rig.gate.opened.set()
    assert rig.thread.close(WITHIN_S)
    assert len(KvDirectory(tmp_path / "kv", KEY, LARGE).entries) == 5
    assert rig.gate.is_closed


def test_after_close_nothing_is_taken(rig: Rig, tmp_path: Path) -> None:
    entry = _entry_on_disk(tmp_path)
    rig.gate.opened.set()
    assert rig.thread.close(WITHIN_S)
    rig.save(1)
    rig.thread.delete(entry)
    rig.thread.fetch(entry, rig.done)
    assert (rig.fetched, rig.gate.asked) == ([None], [])


def test_close_waits_no_longer_than_it_may(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path / "kv")
    for seed in (1, 2, 3):
        rig.save(seed)
    assert rig.gate.is_reached.wait(WITHIN_S)
    assert not rig.thread.close(0.05)
    assert [record.getMessage() for record in caplog.records] == ["2 states are not saved: the disk took longer than 0.1 s"]
    rig.gate.opened.set()
    assert rig.thread.close(WITHIN_S)
    assert rig.gate.asked == [("write", 1)]


def test_bug_in_one_order_ends_neither_the_thread_nor_a_request(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = _entry_on_disk(tmp_path)
    rig.gate.opened.set()
    with monkeypatch.context() as patch:
        patch.setattr(KvDirectory, "read", lambda self, entry: 1 // 0)
        rig.thread.fetch(entry, rig.done)
        assert rig.has_fetched.acquire(timeout=WITHIN_S)
    assert rig.fetched == [None]
    rig.save(1)
    assert _first_added(rig).tokens[0] == 1
    assert [record.getMessage() for record in caplog.records] == ["A bug of ours: parked cells were not moved"]


def _entry_on_disk(tmp_path: Path) -> KvEntry:
    """Written beforehand by somebody else."""
    made = state(seed=99)
    made.tokens[0] = 99
    directory = KvDirectory(tmp_path / "kv", KEY, LARGE)
    entry = directory.write(made).added
    directory.close()
    assert entry is not None
    return entry


def _first_added(rig: Rig) -> KvEntry:
    for _ in range(int(WITHIN_S * 100)):
        if rig.changes:
            break
        threading.Event().wait(0.01)
    added = rig.changes[0].added
    assert added is not None
    return added
