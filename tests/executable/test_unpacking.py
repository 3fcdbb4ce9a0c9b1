"""What the start leaves in TMPDIR: one directory while the program runs, none after it, however it is ended."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.program import left_of
from tests.executable.conftest import Server, serving

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 0, signal.SIGHUP: 129}


def test_front_and_engine_share_one_unpacked_directory(executable: Path, unpacked: Path) -> None:
    with serving(executable, unpacked) as server:
        assert "--engine-process" in server.tree[2].cmdline()
        assert len(list(unpacked.glob("_MEI*"))) == 1
        assert list(unpacked.glob("_MEI*/libcrypto.so*")) == []


def test_openssl_is_unpacked_where_a_model_is_hashed(executable: Path, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    has_openssl = False
    with subprocess.Popen([executable, "info", "--verify"], env=environment, stdout=subprocess.PIPE) as process:
        while process.poll() is None:
            with suppress(FileNotFoundError):  # the directory goes at the end
                has_openssl |= any(tmp_path.glob("_MEI*/libcrypto.so*"))
    assert (process.returncode, has_openssl) == (0, True)


@pytest.mark.parametrize("target", ["parent", "child", "group"])
@pytest.mark.parametrize("number", EXIT_CODES, ids=lambda number: signal.Signals(number).name)
def test_signal_is_one_clean_end_and_leaves_nothing(executable: Path, unpacked: Path, number: signal.Signals, target: str) -> None:
    with serving(executable, unpacked) as server:
        tree = server.tree
        send(server, number, target)
        assert server.process.wait(timeout=5) == EXIT_CODES[number]
        assert server.process.stderr is not None
        assert server.process.stderr.read() == ""
    assert left_of(tree) == []
    assert list(unpacked.iterdir()) == []


def send(server: Server, number: signal.Signals, target: str) -> None:
    """A terminal signals the group; `kill` and a service manager one of the two processes."""
    if target == "group":
        os.killpg(server.process.pid, number)
    else:
        os.kill(server.tree[0 if target == "parent" else 1].pid, number)


def test_nothing_is_left_after_the_programs_own_process_was_killed(executable: Path, unpacked: Path) -> None:
    """The bootloader's process outlives the one that Python runs in and cleans up after it."""
    with serving(executable, unpacked) as server:
        tree = server.tree
        tree[1].kill()
        server.process.wait(timeout=5)
    assert left_of(tree) == []
    assert list(unpacked.iterdir()) == []
