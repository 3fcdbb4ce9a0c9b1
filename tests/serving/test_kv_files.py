"""Parked cells on disk: what was written is what is read, or nothing is; and nothing that goes wrong reaches the caller."""

import ctypes
import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.errors import ConfigError
from runner.serving import kv_files
from runner.serving.kv_files import KvDirectory
from runner.serving.kv_folder import PrivateDirectory
from runner.serving.kv_format import MAGIC, SavedCheckpoint, SavedState, encode_header
from tests.cli.program import ROOT
from tests.serving.kv_states import DOMAIN, KEY, SESSION, content, state

LARGE = 1 << 30
OTHER = msgspec.structs.replace(KEY, llama_cpp_version="b2")

Opener = Callable[..., KvDirectory]


@pytest.fixture(params=[True, False], ids=["by descriptor", "by path"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens a directory as systems with openat do it, and as the others."""
    directories: list[KvDirectory] = []

    def private(path: Path) -> PrivateDirectory:
        return PrivateDirectory(path, has_dir_fd=request.param)

    def open_directory(max_bytes: int = LARGE, *, key: object = KEY, now: float = 5000.0) -> KvDirectory:
        assert isinstance(key, type(KEY))
        directories.append(KvDirectory(tmp_path / "kv", key, max_bytes, model_name="tiny", clock=lambda: now))
        return directories[-1]

    monkeypatch.setattr(kv_files, "PrivateDirectory", private)
    yield open_directory
    for directory in directories:
        directory.close()


@pytest.fixture
def only_file(opened: Opener, tmp_path: Path) -> Path:
    """The file of one state with a checkpoint."""
    assert opened().write(state(checkpoints=(7,))).added is not None
    (path,) = (tmp_path / "kv").iterdir()
    return path


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, without the directory."""
    return [record.getMessage() for record in caplog.records if record.name == "slotfile.kv"]


def names(tmp_path: Path) -> set[str]:
    """What lies in the directory."""
    return {path.name for path in (tmp_path / "kv").iterdir()}


def test_state_is_there_after_a_restart(opened: Opener) -> None:
    first, second = state(checkpoints=(3, 20)), state(seed=2, n_bytes=200_000, domain="", session="", used_at=2000.0)
    directory = opened()
    written = [directory.write(first).added, directory.write(second).added]
    assert directory.entries == written
    again = opened()
    entries = sorted(again.entries, key=lambda entry: entry.used_at)
    assert [(e.tokens, e.domain, e.session, e.positions, e.n_bytes, e.used_at) for e in entries] == [
        (first.tokens, DOMAIN, SESSION, (3, 20), 200, 1000.0),
        (second.tokens, "", "", (), 200_000, 2000.0),
    ]
    assert [content(again.read(entry)) for entry in entries] == [content(first), content(second)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=3000),
    st.sampled_from(["", DOMAIN]),
    st.sampled_from(["", SESSION]),
    st.binary(max_size=70_000),
    st.lists(st.tuples(st.integers(0, 3000), st.binary(max_size=300)), max_size=4),
)
def test_what_is_written_is_read(
    tmp_path: Path, tokens: list[int], domain: str, session: str, cells: bytes, checkpoints: list[tuple[int, bytes]]
) -> None:
    saved = tuple(SavedCheckpoint(pos, memoryview(data)) for pos, data in checkpoints)
    written = SavedState(tokens, domain, session, memoryview(cells), saved, 1.0)
    directory = KvDirectory(tmp_path / "kv", KEY, LARGE)
    entry = directory.write(written).added
    assert entry is not None
    assert content(directory.read(entry)) == content(written)
    (found,) = KvDirectory(tmp_path / "kv", KEY, LARGE).entries
    assert (found.tokens, found.positions) == (tokens, tuple(pos for pos, _ in checkpoints))
    directory.delete(entry)
    assert names(tmp_path) == set()
    directory.close()


def test_cells_may_be_an_array_of_native_code_and_come_back_writable(opened: Opener) -> None:
    cells = (ctypes.c_uint8 * 100_000)(*range(100))
    directory = opened()
    entry = directory.write(SavedState([1, 2], "", "", memoryview(cells), (), 1.0)).added
    assert entry is not None
    found = directory.read(entry)
    assert found is not None
    back = (ctypes.c_uint8 * 100_000).from_buffer(found.cells)
    assert bytes(back) == bytes(cells)


def test_directory_and_files_are_for_their_owner_alone(opened: Opener, only_file: Path) -> None:
    assert stat.S_IMODE(only_file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file.stat().st_mode) == 0o600


def test_names_are_digests_of_domain_and_tokens(opened: Opener, tmp_path: Path) -> None:
    directory = opened()
    for domain in ("", DOMAIN):
        for seed in (1, 2):
            directory.write(state(seed=seed, domain=domain))
    assert len(names(tmp_path)) == 4
    assert all(kv_files.is_state_name(name) and name.startswith(KEY.digest) for name in names(tmp_path))


@pytest.mark.parametrize("text", ["team-a", "key:0123abcd", "192.168.0.7", "ABCD", "abc"])
def test_domain_and_session_in_the_clear_never_reach_the_disk(opened: Opener, tmp_path: Path, text: str) -> None:
    directory = opened()
    for plain in (state(domain=text), state(session=text)):
        with pytest.raises(AssertionError, match="is no digest"):
            directory.write(plain)
    assert names(tmp_path) == set()


def test_tokens_that_grow_after_the_write_change_no_entry(opened: Opener) -> None:
    written = state(n_tokens=5)
    entry = opened().write(written).added
    written.tokens.append(6)
    assert entry is not None
    assert len(entry.tokens) == 5


def test_state_that_is_there_is_only_touched(opened: Opener, tmp_path: Path) -> None:
    directory = opened()
    entry = directory.write(state()).added
    (path,) = (tmp_path / "kv").iterdir()
    before = path.stat().st_ino
    change = directory.write(state(used_at=3000.0))
    assert (change.added, change.gone) == (entry, [])
    assert (path.stat().st_ino, path.stat().st_mtime) == (before, 3000.0)


@pytest.mark.parametrize("other", [state(session=""), state(checkpoints=(5,)), state(n_bytes=50)], ids=["session", "checkpoints", "cells"])
def test_same_tokens_with_something_new_take_the_files_place(opened: Opener, other: SavedState) -> None:
    directory = opened()
    old = directory.write(state()).added
    change = directory.write(other)
    assert change.gone == [old]
    assert directory.entries == [change.added]
    assert change.added is not None
    assert content(directory.read(change.added)) == content(other)


def test_every_flipped_byte_is_found(opened: Opener, only_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = only_file.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        only_file.write_bytes(damaged)
        caplog.clear()
        directory = opened()
        for entry in directory.entries:
            assert directory.read(entry) is None, f"byte {at}"
        assert directory.entries == []
        directory.close()
        assert len(said(caplog)) == 1, f"byte {at}"
        assert only_file.exists() == (at < len(MAGIC)), f"byte {at}: what is ours and damaged goes, what is not ours stays"


def test_every_truncated_file_is_found_and_deleted(opened: Opener, only_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = only_file.read_bytes()
    for length in [*range(len(whole)), len(whole) + 1, 2 * len(whole)]:
        only_file.write_bytes((whole + whole)[:length])
        caplog.clear()
        directory = opened()
        assert directory.entries == [], f"{length} bytes"
        directory.close()
        assert len(said(caplog)) == 1
        assert not only_file.exists()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_under_a_name_of_ours_are_ignored(tmp_path: Path, data: bytes) -> None:
    directory = tmp_path / "kv"
    directory.mkdir(mode=0o700, exist_ok=True)
    for rest in (data, MAGIC + data, MAGIC + b"\1\0\0\0" + data):
        (directory / f"{KEY.digest}-{'0' * 32}.kv").write_bytes(rest)
        opened = KvDirectory(directory, KEY, LARGE)
        assert opened.entries == []
        opened.close()


def test_file_that_is_damaged_while_the_program_runs_is_not_loaded(
    opened: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = opened()
    entry = directory.write(state(n_bytes=100_000)).added
    (path,) = (tmp_path / "kv").iterdir()
    with path.open("r+b") as file:
        file.seek(50_000)
        file.write(b"!!!")
    assert entry is not None
    assert directory.read(entry) is None
    assert said(caplog) == [f"The file {path.name} in {path.parent} is ignored: its cells were altered"]
    assert (directory.entries, names(tmp_path)) == ([], set())


def test_file_under_another_name_of_ours_is_not_loaded(opened: Opener, only_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    only_file.rename(only_file.with_name(f"{KEY.digest}-{'0' * 32}.kv"))
    assert opened().entries == []
    assert "it holds other tokens than its name says" in said(caplog)[0]


def test_file_with_a_number_that_is_no_token_is_not_loaded(opened: Opener, only_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    strange = state()
    strange.tokens[3] = 1 << 40
    only_file.write_bytes(encode_header(KEY, "tiny", strange) + bytes(strange.cells))
    assert opened().entries == []
    assert "its header cannot be read" in said(caplog)[0]


def test_files_of_another_key_do_not_hinder_and_are_not_read(opened: Opener, only_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = opened(key=OTHER)
    assert other.entries == []
    assert other.write(state()).added is not None
    assert [len(opened().entries), len(opened(key=OTHER).entries)] == [1, 1]
    assert said(caplog) == []


def test_file_of_another_key_under_this_ones_name_is_refused(opened: Opener, only_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    only_file.rename(only_file.with_name(only_file.name.replace(KEY.digest, OTHER.digest)))
    assert opened(key=OTHER).entries == []
    assert "it is of another model or other settings" in said(caplog)[0]


def test_longest_unused_goes_first_and_the_bound_holds(opened: Opener, tmp_path: Path) -> None:
    size = _file_bytes(opened, tmp_path)
    directory = opened(3 * size)
    entries = [directory.write(state(seed=seed, used_at=1000.0 + seed)).added for seed in (1, 2, 3)]
    assert entries[0] is not None
    assert directory.read(entries[0]) is not None  # of use now, at 5000
    change = directory.write(state(seed=4, used_at=1004.0))
    assert change.gone == [entries[1]]
    assert directory.entries == [entries[0], entries[2], change.added]
    assert sum(path.stat().st_size for path in (tmp_path / "kv").iterdir()) <= 3 * size


def test_recency_survives_a_restart_and_counts_over_all_keys(opened: Opener, tmp_path: Path) -> None:
    size = _file_bytes(opened, tmp_path)
    directory, other = opened(key=KEY), opened(key=OTHER)
    other.write(state(seed=1, used_at=1001.0))
    directory.write(state(seed=2, used_at=1002.0))
    other.write(state(seed=3, used_at=1003.0))
    again = opened(2 * size)
    (kept,) = again.entries
    change = again.write(state(seed=4, used_at=1004.0))
    assert change.gone == [kept]
    assert [entry.tokens for entry in opened(key=OTHER).entries] == [state(seed=3).tokens]


def test_file_from_the_future_goes_first(opened: Opener, tmp_path: Path) -> None:
    size = _file_bytes(opened, tmp_path)
    directory = opened(2 * size)
    future, now = directory.write(state(seed=1, used_at=1e9)).added, directory.write(state(seed=2, used_at=1000.0)).added
    assert directory.write(state(seed=3, used_at=1001.0)).gone == [future]
    assert now in directory.entries
    assert all(entry.used_at <= 5000.0 for entry in opened().entries)


def test_state_larger_than_the_bound_is_not_written_and_costs_nothing_else(
    opened: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = opened(100_000)
    small = directory.write(state()).added
    change = directory.write(state(seed=2, n_bytes=200_000))
    assert (change.added, change.gone, directory.entries) == (None, [], [small])
    assert said(caplog) == ["A state of 0.2 MiB is not saved: --kv-dir-mib is 0.1"]


def test_what_is_not_ours_is_neither_counted_nor_deleted(opened: Opener, tmp_path: Path) -> None:
    size = _file_bytes(opened, tmp_path)
    strangers = {"notes.txt", f"{KEY.digest}-{'1' * 32}.kv", f"{OTHER.digest}-{'1' * 32}.kv", ".hidden.part"}
    for name in strangers:
        (tmp_path / "kv" / name).write_bytes(b"x" * 10 * size)
        os.utime(tmp_path / "kv" / name, (1, 1))
    directory = opened(2 * size)
    for seed in range(1, 5):
        assert directory.write(state(seed=seed, used_at=1000.0 + seed)).added is not None
    assert len(directory.entries) == 2
    assert names(tmp_path) == strangers | {entry.name for entry in directory.entries}


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_no_regular_file_is_not_opened(opened: Opener, only_file: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    target = only_file.parent / "target"
    only_file.rename(target)
    before = target.read_bytes()
    match kind:
        case "link":
            only_file.symlink_to(target)
        case "pipe":
            os.mkfifo(only_file)
        case _:
            only_file.mkdir()
    directory = opened()
    assert directory.entries == []
    assert len(said(caplog)) == 1
    assert only_file.name in said(caplog)[0]
    directory.write(state(checkpoints=(7,)))  # in its place where the system lets us
    assert target.read_bytes() == before
    assert not only_file.is_symlink()


def test_entry_whose_file_became_a_link_is_not_followed(opened: Opener, tmp_path: Path) -> None:
    directory = opened()
    entry = directory.write(state()).added
    (path,) = (tmp_path / "kv").iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert entry is not None
    assert directory.read(entry) is None


@pytest.mark.parametrize(("mode", "others"), [(0o777, True), (0o770, True), (0o702, True), (0o755, False), (0o700, False)])
def test_directory_that_others_can_write_is_refused(opened: Opener, tmp_path: Path, mode: int, others: bool) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    if not others:
        opened()
        return
    with pytest.raises(ConfigError, match=rf"Other users can write into the directory .*kv \(mode 0{mode:o}\); it must be 0700") as failed:
        opened()
    assert failed.value.hint == f"chmod 700 {tmp_path / 'kv'}"


def test_directory_of_another_user_is_refused(opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ConfigError, match=r"belongs to user \d+; --kv-dir takes one of user 4711 alone"):
        opened()


def test_directory_that_is_a_link_or_a_file_is_refused(opened: Opener, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "kv").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is a symbolic link; --kv-dir names the directory itself"):
        opened()
    (tmp_path / "kv").unlink()
    (tmp_path / "kv").write_text("x")
    with pytest.raises(ConfigError, match="is no directory"):
        opened()


def test_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"The directory .*file/kv cannot be used: Not a directory"):
        KvDirectory(tmp_path / "file" / "kv", KEY, LARGE)


def test_full_disk_is_one_line_and_leaves_nothing(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = opened()
    kept = directory.write(state(seed=2)).added
    with _full_disk(monkeypatch, after_bytes=60_000):
        assert directory.write(state(n_bytes=100_000)).added is None
    assert said(caplog) == [f"The directory {tmp_path / 'kv'} took no state of 20 tokens: No space left on device"]
    assert kept is not None
    assert names(tmp_path) == {kept.name}
    assert directory.write(state(n_bytes=100_000)).added is not None


def test_limit_of_the_system_on_a_files_size_is_one_line(tmp_path: Path) -> None:
    script = (
        "import resource, logging\n"
        "from pathlib import Path\n"
        "from runner.serving.kv_files import KvDirectory\n"
        "from tests.serving.kv_states import KEY, state\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        f"directory = KvDirectory(Path({str(tmp_path / 'kv')!r}), KEY, 1 << 30)\n"
        "print(directory.write(state(n_bytes=100_000)).added)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert (done.stdout, done.stderr) == ("None\n", f"The directory {tmp_path / 'kv'} took no state of 20 tokens: File too large\n")
    assert names(tmp_path) == set()


def test_lost_permission_is_one_line_each(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = opened()
    entry = directory.write(state()).added
    assert entry is not None

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    assert directory.write(state(seed=2)).added is None
    assert directory.read(entry) is None
    assert [line.partition(" kv ")[0].rpartition("kv ")[2] for line in said(caplog)] == [
        "took no state of 20 tokens: Permission denied",
        "gave no state of 20 tokens: Permission denied",
    ]


def test_vanished_files_are_missed_once(opened: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slotfile.kv")
    directory = opened()
    first, second, third = (directory.write(state(seed=seed)).added for seed in (1, 2, 3))
    for path in (tmp_path / "kv").iterdir():
        path.unlink()
    assert first is not None
    assert second is not None
    assert directory.read(first) is None
    directory.delete(second)
    change = directory.write(state(seed=4))
    assert (change.gone, directory.entries) == ([third], [change.added])
    assert said(caplog) == [
        f"The directory {tmp_path / 'kv'} gave no state of 20 tokens: No such file or directory",
        f"1 states in {tmp_path / 'kv'} were deleted by others",
    ]


def test_vanished_directory_is_no_fault(opened: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = opened()
    entry = directory.write(state()).added
    assert entry is not None
    (tmp_path / "kv" / entry.name).unlink()
    (tmp_path / "kv").rmdir()
    assert directory.write(state(seed=2)).added is None
    assert directory.read(entry) is None
    assert len(said(caplog)) <= 3


def test_path_that_leads_elsewhere_meanwhile_changes_nothing(tmp_path: Path) -> None:
    directory = KvDirectory(tmp_path / "kv", KEY, LARGE)
    (tmp_path / "kv").rename(tmp_path / "moved")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "theirs")
    entry = directory.write(state()).added
    assert entry is not None
    assert [path.name for path in (tmp_path / "moved").iterdir()] == [entry.name]
    assert list((tmp_path / "theirs").iterdir()) == []
    directory.close()


def test_two_writers_of_the_same_states_never_show_half_of_one(tmp_path: Path) -> None:
    """Each writes, reads and deletes what the other writes, reads and deletes, in a directory too small for all."""
    states = [state(seed=seed, n_bytes=300_000) for seed in range(6)]
    contents = [content(one) for one in states]
    wrong: list[object] = []

    def work(order: int) -> None:
        directory = KvDirectory(tmp_path / "kv", KEY, 1_300_000)
        for turn in range(60):
            entry = directory.write(states[(turn * order) % 6]).added
            found = directory.read(entry) if entry is not None else None
            if found is not None and content(found) not in contents:
                wrong.append(turn)
            if entry is not None and turn % 7 == 0:
                directory.delete(entry)
        directory.close()

    threads = [threading.Thread(target=work, args=(order,)) for order in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    left = KvDirectory(tmp_path / "kv", KEY, LARGE)
    assert all(content(left.read(entry)) in contents for entry in left.entries)
    assert names(tmp_path) == {entry.name for entry in left.entries}
    left.close()


WRITER = """
import sys
from pathlib import Path
from runner.serving.kv_files import KvDirectory
from tests.serving.kv_states import KEY, state
directory = KvDirectory(Path(sys.argv[1]), KEY, 1 << 30)
states = [state(seed=seed, n_bytes=4_000_000) for seed in range(3)]
print("ready", flush=True)
while True:
    for one in states:
        entry = directory.write(one).added
        directory.delete(entry)
"""


def test_writer_that_is_killed_at_any_moment_leaves_no_half_state(tmp_path: Path) -> None:
    contents = [content(state(seed=seed, n_bytes=4_000_000)) for seed in range(3)]
    for delay_ms in range(0, 40, 4):
        with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "kv"], cwd=ROOT, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(delay_ms / 1000)
            writer.send_signal(signal.SIGKILL)
        directory = KvDirectory(tmp_path / "kv", KEY, LARGE)
        assert names(tmp_path) == {entry.name for entry in directory.entries}
        for entry in directory.entries:
            assert content(directory.read(entry)) in contents
            directory.delete(entry)
        directory.close()


KILLED_HALFWAY = """
import os, signal, sys
from pathlib import Path
from runner.serving import kv_files
from tests.serving.kv_states import KEY, state
def write_half(file, parts):
    file.write(b"".join(parts)[:50_000])
    os.kill(os.getpid(), signal.SIGKILL)
kv_files.write_all = write_half
kv_files.KvDirectory(Path(sys.argv[1]), KEY, 1 << 30).write(state(n_bytes=100_000))
"""


def test_half_a_file_of_a_killed_writer_is_never_an_entry_and_is_swept_at_the_next_start(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_HALFWAY, tmp_path / "kv"], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = names(tmp_path)
    assert kv_files.is_temporary_name(left)
    directory = KvDirectory(tmp_path / "kv", KEY, LARGE)
    assert (directory.entries, names(tmp_path)) == ([], set())
    directory.close()


def test_temporary_of_a_writer_that_lives_is_left_alone(opened: Opener, tmp_path: Path) -> None:
    name = f"{KEY.digest}-{'2' * 32}.kv"
    opened()
    writer = PrivateDirectory(tmp_path / "kv")
    with writer.new_file(name) as file:
        file.write(MAGIC)
        (temporary,) = names(tmp_path)
        opened()
        assert names(tmp_path) == {temporary}
    assert names(tmp_path) == {name}
    writer.close()


WITHOUT_POSIX = """
import os, pathlib, subprocess, sys, tempfile
import hypothesis, msgspec, pytest
for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "geteuid"):
    delattr(os, name)
os.supports_dir_fd = os.supports_fd = os.supports_follow_symlinks = set()
sys.platform, sys.modules["fcntl"] = "win32", None
from runner.serving.kv_files import KvDirectory
from tests.serving.kv_states import KEY, content, state
path = pathlib.Path(sys.argv[1])
for directory in (KvDirectory(path, KEY, 1 << 30), KvDirectory(path, KEY, 1 << 30)):
    entry = directory.write(state()).added
    assert content(directory.read(entry)) == content(state())
"""


def test_system_without_any_of_posix_keeps_states_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, tmp_path / "kv"], cwd=ROOT, capture_output=True, encoding="utf-8", check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(names(tmp_path)) == 1


def _file_bytes(opened: Opener, tmp_path: Path) -> int:
    """What the file of a `state()` takes."""
    directory = opened()
    entry = directory.write(state(seed=1)).added
    assert entry is not None
    size = (tmp_path / "kv" / entry.name).stat().st_size
    directory.delete(entry)
    return size


@contextmanager
def _full_disk(monkeypatch: pytest.MonkeyPatch, after_bytes: int) -> Iterator[None]:
    """Every file takes so many bytes and no more."""
    original = PrivateDirectory.new_file

    class Full(FileIO):
        def write(self, data: object, /) -> int:
            assert isinstance(data, memoryview)
            room = after_bytes - self.tell()
            if room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data[:room]) or 0

    @contextmanager
    def new_file(self: PrivateDirectory, name: str) -> Iterator[FileIO]:
        with original(self, name) as file, Full(file.fileno(), "wb", closefd=False) as full:
            yield full

    with monkeypatch.context() as patch:
        patch.setattr(PrivateDirectory, "new_file", new_file)
        yield
