"""The built executable: `make exe` makes it, `make test` makes it before it runs these tests."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILT = ROOT / "dist" / "smollm2-135m"


@dataclass(frozen=True)
class Ended:
    """How one run of the executable ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The lines that name an error."""
        return [line for line in self.err.splitlines() if line.startswith("Error: ")]


Run = Callable[..., Ended]


@pytest.fixture(scope="session")
def executable() -> Path:
    if not BUILT.is_file():
        pytest.fail(f"{BUILT.relative_to(ROOT)} is not built: `make exe` builds it", pytrace=False)
    return BUILT


@pytest.fixture
def run(executable: Path, tmp_path: Path) -> Run:
    """Run the executable, or another file, with a HOME and a TMPDIR of its own."""
    unpacked = tmp_path / "tmp"
    unpacked.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(unpacked)}

    def start(*arguments: str | Path, file: Path = executable, timeout_s: float = 60, env: dict[str, str] | None = None) -> Ended:
        command = [str(file), *(str(argument) for argument in arguments)]
        done = subprocess.run(
            command,
            env=environment if env is None else env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return start


@contextmanager
def serving(executable: Path, unpacked: Path) -> Iterator[subprocess.Popen[str]]:
    """The server, ready, as the leader of a process group of its own."""
    command = [str(executable), "serve", "--port", "0", "--slots", "1", "--ctx", "256"]
    environment = {"TMPDIR": str(unpacked), "HOME": str(unpacked.parent)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "listening" in line:
                break
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    directory = tmp_path / "tmp"
    directory.mkdir()
    return directory
