"""Runs the program as a person does: as a process with arguments, an environment and standard streams."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

COMMAND = [sys.executable, "-m", "runner"]
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60
LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A clean environment with its own home."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "HOME": str(home), "PYTHONPATH": str(ROOT), "TERM": "xterm", **(extra or {})}


def run(*arguments: str, home: Path, text: str | None = None, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run one command to its end; `text` is standard input (None: an empty one)."""
    return subprocess.run(
        [*COMMAND, *arguments],
        input=text or "",
        env=environment(home, env),
        cwd=home,
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        check=False,
    )


@dataclass
class Served:
    """A program that serves."""

    process: "subprocess.Popen[str]"
    url: str
    said: list[str]

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    @property
    def tree(self) -> list[psutil.Process]:
        """The processes of the program."""
        front = psutil.Process(self.process.pid)
        return [front, *front.children(recursive=True)]

    def signal(self, number: signal.Signals) -> None:
        """Send it one signal."""
        self.process.send_signal(number)

    def end(self) -> tuple[int, float, str]:
        """Wait for its end: exit code, seconds that took, and what it said meanwhile."""
        started_at = time.monotonic()
        _, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, time.monotonic() - started_at, err


def serve(*arguments: str, home: Path, **popen: Any) -> Served:
    """Start the program and wait until it says where it listens."""
    command = [*COMMAND, *arguments]
    process = subprocess.Popen(
        command, env=environment(home), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", **popen
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if match := LISTENING.search(line):
            return Served(process, match.group(1), said)
    raise AssertionError(f"it ended before it listened: {said}")


def left_of(processes: list[psutil.Process], within_s: float = 2.0) -> list[psutil.Process]:
    """Those that still run after this time. One that has ended and that nobody has waited for yet runs no more."""
    deadline = time.monotonic() + within_s
    while (running := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return running


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
