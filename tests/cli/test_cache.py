"""`slotfile cache` as typed."""

import calendar
import os
from pathlib import Path

import msgspec
import pytest

from runner.serving.kv_files import KvDirectory
from runner.serving.kv_folder import PrivateDirectory
from tests.cli.program import run
from tests.serving.kv_states import KEY, state

MIB = 1 << 20
NOON = calendar.timegm((2026, 5, 4, 12, 30, 0))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Three states of two models."""
    path = tmp_path / "kv"
    other = msgspec.structs.replace(KEY, model_id="other", n_streams=1, cache_type_v="f16")
    with_two, with_one = KvDirectory(path, KEY, 1 << 30, model_name="tiny"), KvDirectory(path, other, 1 << 30, model_name="big")
    with_two.write(state(seed=1, n_bytes=MIB, used_at=NOON))
    with_two.write(state(seed=2, n_bytes=MIB, used_at=NOON + 3600))
    with_one.write(state(seed=3, n_bytes=5 * MIB, used_at=NOON + 86_400))
    for directory in (with_two, with_one):
        directory.close()
    return path


def test_list_shows_what_is_there_by_model(kept: Path, tmp_path: Path) -> None:
    done = run("cache", "list", "--kv-dir", str(kept), home=tmp_path, env={"TZ": "UTC"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "big  1 file, 5.0 MiB  oldest 2026-05-05 12:30  1 slots of 4,096 tokens, f16/f16, llama.cpp b1",
        "tiny  2 files, 2.0 MiB  oldest 2026-05-04 12:30  4 slots of 4,096 tokens, f16/q8_0, llama.cpp b1",
    ]


def test_list_counts_what_cannot_be_used(kept: Path, tmp_path: Path) -> None:
    for path in kept.iterdir():
        path.write_bytes(path.read_bytes()[:2048])
    done = run("cache", "list", "--kv-dir", str(kept), home=tmp_path)
    assert done.stdout == "unusable: 3 files, 0.0 MiB\n"


def test_clear_deletes_what_is_ours_and_nothing_else(kept: Path, tmp_path: Path) -> None:
    temporary = kept / f".{KEY.digest}-{'3' * 32}.kv.{'4' * 16}.part"
    temporary.write_bytes(b"slotkv")
    strangers = {"notes.txt", "notes.kv", f"{KEY.digest}-{'1' * 32}.kv"}
    for name in strangers:
        (kept / name).write_bytes(b"mine")
    (kept / f"{KEY.digest}-{'5' * 32}.kv").symlink_to(kept / "notes.txt")
    os.mkfifo(kept / f"{KEY.digest}-{'6' * 32}.kv")
    writer = PrivateDirectory(kept)
    with writer.new_file(f"{KEY.digest}-{'7' * 32}.kv") as file:
        file.write(b"slotkv")
        done = run("cache", "clear", "--kv-dir", str(kept), home=tmp_path)
    writer.close()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"deleted 4 files, 7.0 MiB in {kept}\n", "")
    left = strangers | {f"{KEY.digest}-{digit * 32}.kv" for digit in "567"}
    assert {path.name for path in kept.iterdir()} == left
    assert run("cache", "clear", "--kv-dir", str(kept), home=tmp_path).stdout == f"deleted 1 file, 0.0 MiB in {kept}\n"


def test_directory_is_taken_from_the_environment(kept: Path, tmp_path: Path) -> None:
    done = run("cache", "clear", home=tmp_path, env={"SLOTFILE_KV_DIR": str(kept)})
    assert done.stdout == f"deleted 3 files, 7.0 MiB in {kept}\n"


def test_empty_directory_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    assert run("cache", "list", "--kv-dir", "kv", home=tmp_path).stdout == "nothing in kv\n"


@pytest.mark.parametrize("command", ["list", "clear"])
def test_directory_that_is_not_named_or_not_there_is_one_sentence_and_not_made(tmp_path: Path, command: str) -> None:
    done = run("cache", command, home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: No directory is named\nhint: --kv-dir DIR, or the variable SLOTFILE_KV_DIR\n"
    done = run("cache", command, "--kv-dir", "none", home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: The directory none cannot be used: No such file or directory\n"
    assert not (tmp_path / "none").exists()


def test_directory_that_others_can_write_is_refused(kept: Path, tmp_path: Path) -> None:
    kept.chmod(0o777)
    done = run("cache", "clear", "--kv-dir", str(kept), home=tmp_path)
    assert done.returncode == 1
    expected = f"Error: Other users can write into the directory {kept} (mode 0777); it must be 0700\nhint: chmod 700 {kept}\n"
    assert done.stderr == expected
    assert len(list(kept.iterdir())) == 3
