"""Where the executable must run: any directory, any user, any TMPDIR, and a model of any size."""

import os
import statistics
import subprocess
import time
from pathlib import Path

import pytest

from runner.bundle.locate import find_bundle
from runner.bundle.manifest import Manifest
from runner.bundle.pack import _tail
from tests.executable.conftest import Run, serving

FIVE_GB = 5 * 1000**3
PROMPT = ("run", "-p", "1, 2, 3, 4,", "--max-tokens", "2", "--ctx", "256", "--slots", "1")


def with_model_of(executable: Path, out: Path, n_bytes: int) -> Path:
    """The same program around a model that is one hole of `n_bytes`."""
    bundle = find_bundle(executable)
    assert bundle is not None
    data = executable.read_bytes()
    model_at = 1 << 17
    tail = _tail(bundle.bootloader_bytes, model_at, Manifest(name="hole", sha256="0" * 64, size=n_bytes))
    with out.open("wb") as file:
        file.write(data[: bundle.bootloader_bytes])
        file.seek(model_at + n_bytes)
        file.write(tail + data[bundle.pkg_offset :])
    out.chmod(0o755)
    return out


def test_start_time_does_not_depend_on_the_models_size(run: Run, executable: Path, tmp_path: Path) -> None:
    large = with_model_of(executable, tmp_path / "large", FIVE_GB)
    assert large.stat().st_size > FIVE_GB

    def seconds(file: Path) -> float:
        started = time.perf_counter()
        assert run("--version", file=file).code == 0
        return time.perf_counter() - started

    pairs = [(seconds(executable), seconds(large)) for _ in range(5)]
    small_s, large_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    assert large_s < 2 * small_s


def test_nothing_of_the_model_is_written_to_tmpdir(executable: Path, unpacked: Path) -> None:
    with serving(executable, unpacked):
        sizes = [path.stat().st_size for path in unpacked.rglob("*") if path.is_file()]
    assert max(sizes) < 10_000_000
    assert sum(sizes) < 60_000_000


def test_model_is_mapped_where_it_lies_and_shared(executable: Path, unpacked: Path) -> None:
    bundle = find_bundle(executable)
    assert bundle is not None
    assert bundle.model is not None
    with serving(executable, unpacked) as server:
        engine = server.tree[2]
        maps = [entry for entry in engine.memory_maps(grouped=False) if entry.path == str(executable)]
    assert sum(entry.rss for entry in maps) > bundle.model.length // 2
    assert sum(entry.private_dirty for entry in maps) < 1 << 20


def test_bare_environment_is_enough(run: Run) -> None:
    ended = run(*PROMPT, env={})
    assert (ended.code, bool(ended.out.strip())) == (0, True), ended


def test_missing_home_is_no_obstacle(run: Run, tmp_path: Path) -> None:
    ended = run(*PROMPT, env={"HOME": "/nonexistent", "TMPDIR": str(tmp_path)})
    assert (ended.code, bool(ended.out.strip())) == (0, True), ended


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_user_without_a_name_and_a_read_only_directory_are_no_obstacle(executable: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with_exe = Path("/var/tmp") / f"slotfile-test-{os.getpid()}"  # pytest's own directory is closed to other users
    with_exe.mkdir(mode=0o755)
    unpacked = with_exe / "tmp"
    try:
        unpacked.mkdir()
        unpacked.chmod(0o777)
        os.link(executable, with_exe / "app")
        done = subprocess.run(
            [with_exe / "app", *PROMPT],
            user=54321,
            group=54321,
            extra_groups=[],
            cwd=with_exe,
            env={"TMPDIR": str(unpacked)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, bool(done.stdout.strip())) == (0, True), done
        assert list(unpacked.iterdir()) == []
    finally:
        (with_exe / "app").unlink(missing_ok=True)
        unpacked.rmdir()
        with_exe.rmdir()


def test_noexec_tmp_ends_with_a_message_and_tmpdir_is_the_way_out(executable: Path, tmp_path: Path) -> None:
    noexec, other = tmp_path / "noexec", tmp_path / "other"
    noexec.mkdir()
    other.mkdir()

    def version(unpacked: Path) -> subprocess.CompletedProcess[str]:
        script = f'mount -t tmpfs -o noexec none "{noexec}" || exit 77; TMPDIR="{unpacked}" "{executable}" --version'
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    refused = version(noexec)
    if refused.returncode == 77 or "unshare" in refused.stderr:
        pytest.skip(f"this system lets nobody mount in a namespace: {refused.stderr.strip()}")
    assert refused.returncode != 0
    assert "failed to map" in refused.stderr
    assert version(other).stdout.startswith("slotfile ")
