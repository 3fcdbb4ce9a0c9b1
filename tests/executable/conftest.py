"""The built executable: `make exe` makes it, `make test` makes it before it runs these tests."""

import http.client
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILT = ROOT / "dist" / "smollm2-135m"
LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
JSON = {"Content-Type": "application/json"}


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


@dataclass(frozen=True)
class Server:
    """The executable as a server: the bootloader's process, which leads a process group of its own, and the port."""

    process: "subprocess.Popen[str]"
    port: int

    @property
    def tree(self) -> list[psutil.Process]:
        """Bootloader, front, engine."""
        bootloader = psutil.Process(self.process.pid)
        (front,) = bootloader.children()
        return [bootloader, front, *front.children()]

    def get(self, path: str) -> Any:
        """A JSON answer, whatever its status."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, object]) -> Any:
        """A JSON answer, whatever its status."""
        return self._ask("POST", path, json.dumps(body))

    @contextmanager
    def stream(self, max_tokens: int = 3000) -> Iterator[http.client.HTTPResponse]:
        """An answer that is being streamed; its first text has come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = {"prompt": "1, 2, 3,", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        response = connection.getresponse()
        while not response.readline().startswith(b"data: "):
            assert response.status == 200
        try:
            yield response
        finally:
            response.close()
            connection.close()

    def _ask(self, method: str, path: str, body: str | None) -> Any:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body, JSON)
            return json.loads(connection.getresponse().read())


SMALL = ("--slots", "1", "--ctx", "256", "--threads", "1")


@contextmanager
def serving(executable: Path, unpacked: Path, *options: str) -> Iterator[Server]:
    """The server, ready."""
    command = [str(executable), "serve", "--port", "0", *(options or SMALL)]
    environment = {"TMPDIR": str(unpacked), "HOME": str(unpacked.parent)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    try:
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "it ended before it listened"
            found = LISTENING.search(line)
        yield Server(process, int(found[1]))
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
