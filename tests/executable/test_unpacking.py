"""What the start leaves in TMPDIR: one directory while the program runs, none after it, however it is ended."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.executable.conftest import serving


def test_front_and_engine_share_one_unpacked_directory(executable: Path, unpacked: Path) -> None:
    with serving(executable, unpacked) as process:
        commands = [child.cmdline() for child in psutil.Process(process.pid).children(recursive=True)]
        assert any("--engine-process" in command for command in commands)
        assert len(list(unpacked.glob("_MEI*"))) == 1


@pytest.mark.parametrize("target", ["parent", "child", "group"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: signal.Signals(number).name)
def test_nothing_is_left_after_a_signal(executable: Path, unpacked: Path, number: signal.Signals, target: str) -> None:
    with serving(executable, unpacked) as process:
        tree = psutil.Process(process.pid).children(recursive=True)
        if target == "group":
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid if target == "parent" else tree[0].pid, number)
        process.wait(timeout=5)
    wait_until_gone(tree)
    assert list(unpacked.iterdir()) == []


def test_nothing_is_left_after_the_programs_own_process_was_killed(executable: Path, unpacked: Path) -> None:
    """The bootloader's process outlives the one that Python runs in and cleans up after it."""
    with serving(executable, unpacked) as process:
        tree = psutil.Process(process.pid).children(recursive=True)
        os.kill(tree[0].pid, signal.SIGKILL)
        process.wait(timeout=5)
    wait_until_gone(tree)
    assert list(unpacked.iterdir()) == []


def wait_until_gone(tree: list[psutil.Process]) -> None:
    """Two seconds after the end no process of the tree is left."""
    deadline = time.monotonic() + 2
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in tree):
        assert time.monotonic() < deadline
        time.sleep(0.05)
