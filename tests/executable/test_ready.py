"""Ready is ready: from the first 200 on, a chat is answered at once."""

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from contextlib import closing
from pathlib import Path

from tests.executable.conftest import JSON, SMALL

POLL_S = 0.02
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 24, "temperature": 0}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    """Status and body; status 0 where nobody listens yet."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        try:
            connection.request(method, path, body, JSON)
            response = connection.getresponse()
            return response.status, response.read()
        except ConnectionError:
            return 0, b""


def test_first_200_is_followed_by_an_answer(executable: Path, unpacked: Path) -> None:
    port = free_port()
    command = [str(executable), "serve", "--port", str(port), *SMALL]
    environment = {"TMPDIR": str(unpacked), "HOME": str(unpacked.parent)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        seen: list[int] = []
        deadline = time.monotonic() + 60
        while 200 not in seen:
            assert time.monotonic() < deadline
            for path in ("/health", "/v1/models"):
                status, body = ask(port, "GET", path)
                seen.append(status)
                if status == 503:
                    assert json.loads(body)["error"]["code"] == "loading"
                if status == 200:
                    break
            else:
                time.sleep(POLL_S)
        status, body = ask(port, "POST", "/v1/chat/completions", json.dumps(CHAT))
        assert status == 200, body
        assert "Paris" in json.loads(body)["choices"][0]["message"]["content"]
        assert set(seen) <= {0, 503, 200}
        assert [ask(port, "GET", path)[0] for path in ("/health", "/v1/models")] == [200, 200]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
