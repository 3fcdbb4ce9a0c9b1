"""`slotfile top` as a person uses it: on a terminal, into a pipe, and when something is wrong."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pexpect
import pytest

from tests.cli.program import ROOT, environment, run

TIMEOUT_S = 20
CTRL_C, CTRL_D, CTRL_Z = "\x03", "\x04", "\x1a"
ENTERED, LEFT = "\x1b[?1049h", "\x1b[?1049l"
SHOWN_CURSOR, HIDDEN_CURSOR = "\x1b[?25h", "\x1b[?25l"

Top = Callable[..., "pexpect.spawn[str]"]


class FakeServer:
    """`tests/terminal/top/serving.py` on one port, ended and started again."""

    def __init__(self) -> None:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Serve from now on."""
        command = [sys.executable, "-m", "tests.terminal.top.serving", str(self.port)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8")
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith("http://")

    def stop(self) -> None:
        """Die."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def top(server: FakeServer, tmp_path: Path) -> Iterator[Top]:
    """Starts it on a terminal of its own, with ten looks in two seconds."""
    children: list[pexpect.spawn[str]] = []

    def start(*arguments: str, key: str = "kr", rows: int = 24, columns: int = 80, **env: str) -> "pexpect.spawn[str]":
        command = ["-m", "runner", "top", "--port", str(server.port), "--api-key", key, "--interval", "0.2", *arguments]
        env = environment(tmp_path, {"LC_ALL": "C.UTF-8", **env})
        child = pexpect.spawn(sys.executable, command, env=env, encoding="utf-8", timeout=TIMEOUT_S, dimensions=(rows, columns))
        child.delaybeforesend = None
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


def assert_left(child: "pexpect.spawn[str]", code: int) -> str:
    """It has ended, the terminal's own screen and cursor are back; what it still said."""
    child.expect(pexpect.EOF)
    said = str(child.before)
    child.wait()  # close() would signal a process that is still on its way out
    child.close()
    assert child.exitstatus == code
    assert said.rindex(LEFT) > said.rfind(ENTERED)
    assert said.rindex(SHOWN_CURSOR) > said.rfind(HIDDEN_CURSOR)
    return said


@pytest.mark.parametrize(("keys", "code"), [("q", 0), ("Q", 0), (CTRL_D, 0), (CTRL_C, 130)], ids=["q", "Q", "Ctrl-D", "Ctrl-C"])
def test_it_shows_the_server_and_a_key_leaves(top: Top, keys: str, code: int) -> None:
    child = top()
    child.expect_exact(ENTERED)
    child.expect_exact("● ok")
    child.expect_exact("OF 512 TOKENS")
    child.expect("decode .*anna")
    child.expect("1.*normal.*queued.*ben")
    child.expect(r"anna +2 +0")
    child.send(keys)
    assert_left(child, code)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 129)], ids=lambda value: getattr(value, "name", str(value))
)
def test_signal_gives_the_terminal_back(top: Top, number: signal.Signals, code: int) -> None:
    child = top()
    child.expect_exact("QUEUE")
    child.kill(number)
    assert_left(child, code)


def test_it_is_drawn_again_in_the_new_size(top: Top) -> None:
    child = top("--interval", "60", columns=40)
    child.expect_exact("q leaves")
    child.setwinsize(24, 120)
    child.expect_exact("REQUEST")
    child.expect_exact("running-1#1")
    child.send("q")
    assert_left(child, 0)


def test_server_that_goes_away_is_asked_until_it_is_back(top: Top, server: FakeServer) -> None:
    child = top()
    child.expect_exact("● ok")
    server.stop()
    child.expect_exact("No server answers")
    child.expect("asked 3 times")
    child.expect_exact("anna")  # the last picture stays
    server.start()
    child.expect_exact("● ok")
    child.send("q")
    said = assert_left(child, 0)
    assert "No server answers" not in said.rpartition("slotfile top")[2]


def test_ctrl_z_gives_the_screen_to_the_shell_and_fg_takes_it_back(server: FakeServer, tmp_path: Path) -> None:
    env = environment(tmp_path, {"PS1": "READY ", "LC_ALL": "C.UTF-8"})
    shell = pexpect.spawn("bash", ["--norc", "--noprofile", "-i"], env=env, encoding="utf-8", timeout=TIMEOUT_S, dimensions=(24, 200))
    shell.expect_exact("READY ")
    shell.sendline(f"{sys.executable} -m runner top --port {server.port} --api-key kr --interval 0.2")
    shell.expect_exact(ENTERED)
    shell.expect_exact("q leaves")
    shell.send(CTRL_Z)
    shell.expect_exact(LEFT)
    shell.expect_exact("READY ")
    shell.sendline("fg")
    shell.expect_exact(ENTERED)
    shell.expect_exact("q leaves")
    shell.send("q")
    shell.expect_exact(LEFT)
    shell.expect_exact("READY ")
    shell.sendline("echo code $?")
    shell.expect("code 0")
    shell.close(force=True)


def test_no_colour_and_ascii_where_the_terminal_wants_it(top: Top) -> None:
    child = top(NO_COLOR="1", LC_ALL="C")
    child.expect_exact("q leaves")
    seen = str(child.before)
    assert "* ok" in seen
    assert seen.isascii()
    assert "\x1b[3" not in seen
    child.send("q")
    assert_left(child, 0)


@pytest.mark.parametrize("arguments, env", [(["--once"], {}), ([], {"TERM": "dumb"})], ids=["--once", "dumb"])
def test_plain_picture_on_a_terminal(top: Top, arguments: list[str], env: dict[str, str]) -> None:
    child = top(*arguments, **env)
    child.expect(pexpect.EOF)
    child.wait()
    child.close()
    assert child.exitstatus == 0
    assert "\x1b" not in str(child.before)
    assert "SLOT  STATE" in str(child.before)


def test_plain_picture_into_a_pipe(server: FakeServer, tmp_path: Path) -> None:
    env = {"LC_ALL": "C.UTF-8", "SLOTFILE_PORT": str(server.port), "SLOTFILE_API_KEY": "kr,ka", "COLUMNS": "80"}
    done = run("top", "--interval", "0.2", home=tmp_path, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    found = done.stdout.splitlines()
    assert found[0].startswith("slotfile top  ● ok  fake-model  http://127.0.0.1:")
    assert found[2].startswith("running 2/3  waiting 2  parked 0  KV ")
    queue = found.index("PLACE  TIER    STATE     AGE  WAIT  PROMPT  CLIENT")
    assert [line.split()[:3] + line.split()[-1:] for line in found[queue + 1 : queue + 3]] == [
        ["1", "normal", "queued", "ben"],
        ["2", "normal", "queued", "ben"],
    ]
    assert [line for line in found if line != line.rstrip()] == []


def test_key_without_admin_sees_its_own(server: FakeServer, tmp_path: Path) -> None:
    done = run("top", "--url", f"http://127.0.0.1:{server.port}/v1", "--api-key", "kb", "--once", "--interval", "0.2", home=tmp_path)
    assert done.returncode == 0
    assert "anna" not in done.stdout
    assert "another key's" in done.stdout
    assert re.search(r"^this key +0 +2 ", done.stdout, re.MULTILINE)
    assert re.search(r"^others +2 +0 ", done.stdout, re.MULTILINE)


def test_wrong_key_is_one_sentence(server: FakeServer, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.port}"
    done = run("top", "--url", url, "--api-key", "no", home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"Error: The server at {url} does not take this API key\n")
    without = run("top", "--url", url, home=tmp_path)
    assert without.stderr == f"Error: The server at {url} wants an API key\nhint: --api-key KEY names one\n"


def test_wrong_key_leaves_the_terminal_alone(top: Top) -> None:
    child = top(key="no")
    child.expect(pexpect.EOF)
    assert "does not take this API key" in str(child.before)
    assert ENTERED not in str(child.before)


def test_no_server_is_one_sentence(tmp_path: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        port = taken.getsockname()[1]
        done = run("top", "--port", str(port), home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"Error: No server answers at http://127.0.0.1:{port}: Connection refused",
        "hint: slotfile serve starts one, and --url names another",
    ]


@pytest.mark.parametrize("interval", ["0", "0.1", "61", "nan"])
def test_interval_is_bounded(interval: str, tmp_path: Path) -> None:
    assert run("top", "--interval", interval, home=tmp_path).returncode == 2


def test_port_zero_names_no_server(tmp_path: Path) -> None:
    done = run("top", "--port", "0", home=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "Error: --port is 0, which lets the server take a free one")
