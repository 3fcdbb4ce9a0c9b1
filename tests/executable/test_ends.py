"""However a process of the tree ends: nobody is left behind, no port is kept, and a new engine goes on where the old one ended."""

import os
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.program import left_of
from tests.executable.conftest import Server, serving

ROOMY = ("--slots", "1", "--ctx", "4096", "--threads", "1")


def wait_for(server: Server, path: str, key: str, value: object) -> None:
    """Ask until the answer holds this."""
    deadline = time.monotonic() + 30
    while server.get(path)[key] != value:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_nothing_is_left(tree: list[psutil.Process], port: int) -> None:
    """Two seconds after the end."""
    assert left_of(tree, 2.0) == []
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0


def test_killed_bootloader_leaves_nothing_while_idle(executable: Path, unpacked: Path) -> None:
    with serving(executable, unpacked) as server:
        tree = server.tree
        server.process.kill()
        assert_nothing_is_left(tree[1:], server.port)


def test_killed_bootloader_leaves_nothing_during_a_stream(executable: Path, unpacked: Path) -> None:
    with serving(executable, unpacked, *ROOMY) as server, server.stream() as stream:
        tree = server.tree
        server.process.kill()
        assert_nothing_is_left(tree[1:], server.port)
        assert b'"error"' in stream.read()


def test_killed_bootloader_leaves_nothing_during_a_drain(executable: Path, unpacked: Path) -> None:
    with serving(executable, unpacked, *ROOMY, "--drain-timeout", "60") as server, server.stream() as stream:
        tree = server.tree
        server.process.terminate()
        wait_for(server, "/health", "status", "draining")
        server.process.kill()
        assert_nothing_is_left(tree[1:], server.port)
        assert b'"error"' in stream.read()


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5])
def test_bootloader_killed_during_the_start_leaves_nothing(executable: Path, unpacked: Path, delay_s: float) -> None:
    """Before the front could know its parent, too."""
    mark = f"{unpacked}-mark"
    command = [str(executable), "serve", "--port", "0", "--slots", "1", "--ctx", "256", "--log-file", mark]
    process = subprocess.Popen(command, env={"TMPDIR": str(unpacked), "HOME": mark}, stderr=subprocess.DEVNULL, start_new_session=True)
    time.sleep(delay_s)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 4  # what had only begun to start gets that far before it can end
    while session := [other for other in psutil.process_iter() if belongs_to(other, process.pid)]:
        assert time.monotonic() < deadline, [other.cmdline() for other in session]
        time.sleep(0.05)


def belongs_to(process: psutil.Process, session: int) -> bool:
    """Whether it is of the session, or an engine (which leads a session of its own) below it."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return os.getsid(process.pid) == session or any(os.getsid(parent.pid) == session for parent in process.parents())
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False


def test_killed_engine_fails_four_streams_and_answers_the_four_waiting_and_a_ninth(executable: Path, unpacked: Path) -> None:
    def answer(_: int) -> Any:
        return server.post("/v1/completions", {"prompt": "1, 2, 3,", "max_tokens": 3, "temperature": 0})

    options = ("--slots", "4", "--ctx", "2048", "--threads", "1")
    with serving(executable, unpacked, *options) as server, ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        streams = [stack.enter_context(server.stream(2000)) for _ in range(4)]
        waiting = [pool.submit(answer, number) for number in range(4)]
        wait_for(server, "/slots", "n_waiting", 4)
        engine = server.tree[2]
        engine.send_signal(signal.SIGKILL)
        for stream in streams:
            rest = stream.read().decode()
            assert '"code":"engine_stopped"' in rest.splitlines()[-2]
            assert "[DONE]" not in rest
        ninth = answer(9)
        texts = [future.result()["choices"][0]["text"] for future in waiting]
        assert [*texts, ninth["choices"][0]["text"]] == [" 4,"] * 5
        assert server.tree[2].pid != engine.pid
        assert server.get("/health") == {"status": "ok"}
