"""The server that is soaked: its options, its process, its log."""

import asyncio
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.soak.clients import ADMIN, KEYS
from tests.soak.vitals import Tree, find_tree

ROOT: Final = Path(__file__).resolve().parents[2]
KV_HOST_MIB: Final = 16
FAULT_RATE: Final = 0.005
READY_WITHIN_S: Final = 60.0
LISTENING: Final = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")
# One thread: on a machine with other work, two that meet after every operation wait for each other most of the time.
SETTINGS: Final = (
    "--threads 1 --slots 8 --ctx 1024 --port 0 --host 127.0.0.1 "
    "--max-queue 12 --max-queue-tokens 4000 --max-waiting-per-client 8 "
    "--tokens-per-minute 40000 --share-grace 0.2 --max-body 262144 --max-running-per-client 6 "
    f"--kv-host-mib {KV_HOST_MIB}"
).split()


@dataclass(frozen=True, slots=True)
class Plan:
    """What is soaked, and how. `executable` None: from source, with faults in the back end.

    `deadline_s` is the longest that a request may take, a third of it in the queue. `hangs`: an engine stands still for ever, which
    costs half a minute. Readers that stand still are cut off after a minute or two.
    """

    model: Path
    seconds: float
    seed: int
    executable: Path | None = None
    fault_rate: float = FAULT_RATE
    leak_kib: int = 0
    n_workers: int = 20
    deadline_s: float = 60.0
    hangs: bool = True
    n_still_readers: int = 2

    def command(self, directory: Path) -> list[str]:
        """The server's."""
        if self.executable is not None:
            program = [str(self.executable)]
        else:
            program = [sys.executable, "-m", "tests.soak.faulty_server", str(self.seed), str(self.fault_rate), str(self.leak_kib)]
        deadlines = ["--queue-timeout", str(self.deadline_s / 3), "--request-timeout", str(self.deadline_s)]
        files = ["--api-key-file", str(directory / "keys"), "--log-file", str(directory / "log")]
        return [*program, "serve", "-m", str(self.model), *SETTINGS, *deadlines, *files]


class Server:
    """The program under test."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self._log = directory / "log"
        (directory / "keys").write_text("".join(key.line for key in (*KEYS, ADMIN)), encoding="utf-8")
        self._process = subprocess.Popen(
            plan.command(directory), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.url = ""

    async def ready(self) -> None:
        """Wait until it says where it listens. Raises RuntimeError."""
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._log.exists() and (match := LISTENING.search(self.log)):
                self.url = match[1]
                return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"the server did not come up: {self.log[-2000:]}")

    @property
    def log(self) -> str:
        """All that it has logged."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._process.pid

    @property
    def tree(self) -> Tree:
        """Its processes."""
        return find_tree(self.pid)

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self._process.terminate()
        try:
            return self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
