"""The program as a server: how it starts, and that nothing of it is left when it ends, however it ends."""

import http.client
import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from tests.cli.program import COMMAND, Served, environment, left_of, run, serve

SMALL = ("--threads", "1", "--slots", "2", "--ctx", "512", "--port", "0")
MAX_END_S = 2.0


class Starter(Protocol):
    """Starts a program that the test need not end."""

    def __call__(self, *arguments: str, home: Path, **popen: Any) -> Served:
        """As `serve`."""


@pytest.fixture
def start() -> Iterator[Starter]:
    programs: list[Served] = []

    def started(*arguments: str, home: Path, **popen: Any) -> Served:
        programs.append(serve(*arguments, home=home, **popen))
        return programs[-1]

    yield started
    for program in programs:
        reap(program)


@pytest.fixture
def served(start: Starter, smollm2_path: Path, tmp_path: Path) -> Served:
    return start("serve", "-m", str(smollm2_path), *SMALL, home=tmp_path)


def reap(program: Served) -> None:
    """End whatever a failed test left."""
    with suppress(psutil.NoSuchProcess):
        for process in program.tree:
            process.kill()
    program.process.wait()
    for stream in (program.process.stdout, program.process.stderr):
        assert stream is not None
        stream.close()


@contextmanager
def stream_of(program: Served, max_tokens: int = 400) -> Iterator[http.client.HTTPResponse]:
    """An answer that is being streamed: its first token has come."""
    connection = http.client.HTTPConnection("127.0.0.1", program.port, timeout=30)
    body = {"prompt": "1, 2, 3, 4,", "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    while not (line := response.readline()).startswith(b"data: "):
        assert line.startswith(b":") or not line.strip()
    yield response
    response.close()
    connection.close()


def idle_connection_of(program: Served) -> http.client.HTTPConnection:
    """A browser tab that keeps its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", program.port, timeout=30)
    connection.request("GET", "/health")
    connection.getresponse().read()
    return connection


def waiting_request_of(program: Served) -> socket.socket:
    """A request without stream, in its prefill or waiting for a slot."""
    body = json.dumps({"prompt": "word " * 400, "max_tokens": 100, "ignore_eos": True}).encode()
    client = socket.create_connection(("127.0.0.1", program.port), timeout=30)
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    client.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    return client


def is_port_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def assert_nothing_left(tree: list[psutil.Process], port: int) -> None:
    assert left_of(tree, MAX_END_S) == []
    assert is_port_free(port)


def test_start_says_what_was_chosen_and_listens_only_then(served: Served) -> None:
    words = [line.partition(" INFO slotfile ")[2].strip() for line in served.said]
    assert words[0] == "slotfile 0.1.0"
    assert words[2].startswith("2 slots x 512 tokens, KV cache ")
    assert words[3].startswith("CPU only, CPU library ")
    assert words[-1] == f"listening on {served.url} and http://[::1]:{served.port}"
    idle_connection_of(served).close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 129)])
def test_signal_is_one_clean_end(served: Served, number: signal.Signals, code: int) -> None:
    tree = served.tree
    assert len(tree) == 2
    served.signal(number)
    returncode, took_s, said = served.end()
    assert (returncode, said) == (code, "")
    assert took_s < MAX_END_S
    assert_nothing_left(tree, served.port)


def test_signal_twice_at_once_is_one_end(served: Served) -> None:
    served.signal(signal.SIGINT)
    served.signal(signal.SIGINT)
    returncode, _, said = served.end()
    assert (returncode, said) == (130, "")


def test_open_streams_and_idle_connections_hold_nothing_up(served: Served) -> None:
    tree = served.tree
    with stream_of(served) as stream, closing(idle_connection_of(served)), waiting_request_of(served):
        served.signal(signal.SIGINT)
        returncode, took_s, _ = served.end()
        assert returncode == 130
        assert took_s < MAX_END_S
        assert b'"error"' in stream.read()
    assert_nothing_left(tree, served.port)


def test_full_queue_and_a_prompt_that_is_computed_hold_nothing_up(start: Starter, smollm2_path: Path, tmp_path: Path) -> None:
    served = start("serve", "-m", str(smollm2_path), *SMALL, "--max-queue", "6", home=tmp_path)
    tree = served.tree
    clients = [waiting_request_of(served) for _ in range(8)]
    with waiting_request_of(served) as refused, ExitStack() as stack:
        for client in clients:
            stack.enter_context(client)
        assert refused.recv(64).startswith(b"HTTP/1.1 503 ")  # two are computed, six wait
        served.signal(signal.SIGINT)
        returncode, took_s, _ = served.end()
        assert returncode == 130
        assert took_s < MAX_END_S
        assert {client.recv(64)[:13] for client in clients} == {b"HTTP/1.1 503 "}
    assert_nothing_left(tree, served.port)


def test_drain_lets_a_running_answer_end_and_refuses_new_ones(start: Starter, smollm2_path: Path, tmp_path: Path) -> None:
    program = start("serve", "-m", str(smollm2_path), *SMALL, "--drain-timeout", "30", home=tmp_path)
    with stream_of(program, max_tokens=50) as stream:
        program.signal(signal.SIGTERM)
        rest = stream.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"error"' not in rest
    returncode, _, _ = program.end()
    assert returncode == 0


def test_second_signal_ends_a_drain(start: Starter, smollm2_path: Path, tmp_path: Path) -> None:
    program = start(
        "serve",
        "-m",
        str(smollm2_path),
        "--threads",
        "1",
        "--slots",
        "1",
        "--ctx",
        "4096",
        "--port",
        "0",
        "--drain-timeout",
        "60",
        home=tmp_path,
    )
    with stream_of(program, max_tokens=4000):
        program.signal(signal.SIGTERM)
        time.sleep(0.5)
        assert program.process.poll() is None
        program.signal(signal.SIGTERM)
        returncode, took_s, _ = program.end()
    assert returncode == 0
    assert took_s < MAX_END_S


def test_killed_front_takes_its_engine_with_it(served: Served) -> None:
    tree = served.tree
    with stream_of(served):
        served.signal(signal.SIGKILL)
        served.end()
        assert_nothing_left(tree, served.port)


def test_nohup_is_respected(start: Starter, smollm2_path: Path, tmp_path: Path) -> None:
    program = start(
        "serve", "-m", str(smollm2_path), *SMALL, home=tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    program.signal(signal.SIGHUP)
    idle_connection_of(program).close()
    program.signal(signal.SIGINT)
    assert program.end()[0] == 130


def test_port_in_use_is_told_before_the_model_loads(smollm2_path: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started_at = time.monotonic()
        done = run("serve", "-m", str(smollm2_path), "--port", str(port), home=tmp_path)
        assert time.monotonic() - started_at < 2
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: Port {port} of 127.0.0.1 is in use by another program\nhint: --port 0 takes a free one\n"


def test_another_copy_of_us_has_the_port(served: Served, smollm2_path: Path, tmp_path: Path) -> None:
    done = run("serve", "-m", str(smollm2_path), "--port", str(served.port), home=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: Port {served.port} of 127.0.0.1 is in use")


def test_without_a_terminal_no_command_means_serve(start: Starter, smollm2_path: Path, tmp_path: Path) -> None:
    program = start("-m", str(smollm2_path), *SMALL, home=tmp_path)
    idle_connection_of(program).close()
    program.signal(signal.SIGTERM)
    assert program.end()[0] == 0


@pytest.mark.parametrize("make_home", [lambda path: path / "nowhere", lambda path: path / "file"], ids=["missing", "unwritable"])
def test_home_that_cannot_be_used_changes_nothing(
    start: Starter, smollm2_path: Path, tmp_path: Path, make_home: Callable[[Path], Path]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    program = start("serve", "-m", str(smollm2_path), *SMALL, home=make_home(tmp_path))
    program.signal(signal.SIGTERM)
    assert program.end()[0] == 0


def test_stop_and_continue_change_nothing(served: Served) -> None:
    served.signal(signal.SIGSTOP)
    time.sleep(0.3)
    served.signal(signal.SIGCONT)
    idle_connection_of(served).close()


def test_log_goes_to_the_file_that_is_named(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    command = ["-m", str(smollm2_path), *SMALL, "--log-file", str(path)]
    env = environment(tmp_path)
    process = subprocess.Popen([*COMMAND, "serve", *command], env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: path.exists() and "listening on" in path.read_text(encoding="utf-8"))
    process.terminate()
    assert process.communicate() == (b"", b"")


def wait_until(is_true: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_log_file_that_cannot_be_written_is_told(smollm2_path: Path, tmp_path: Path) -> None:
    done = run("serve", "-m", str(smollm2_path), "--port", "0", "--log-file", str(tmp_path / "no" / "log"), home=tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"Error: The log file {tmp_path / 'no' / 'log'} cannot be written: No such file or directory\n"


@pytest.mark.parametrize(
    ("options", "word"),
    [(("--ctx", "100000000"), "100"), (("--device", "nosuch"), "nosuch")],
    ids=["context beyond memory", "no such device"],
)
def test_engine_that_cannot_start_is_one_sentence_and_a_hint(
    smollm2_path: Path, tmp_path: Path, options: tuple[str, str], word: str
) -> None:
    done = run("serve", "-m", str(smollm2_path), "--port", "0", *options, home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("2")]
    error, hint = lines
    assert error.startswith("Error: ")
    assert word in error.replace(",", "")
    assert hint.startswith("hint: ")
    assert "slotfile.engine" not in done.stderr  # the log does not say it a second time
