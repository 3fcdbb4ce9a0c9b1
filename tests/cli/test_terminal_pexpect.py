"""The program on a terminal, with a real model: it serves and chats in one, and gives everything back."""

import http.client
import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import psutil
import pytest

from tests.cli.program import environment, left_of

TIMEOUT_S = 20
CTRL_C, CTRL_D, CTRL_Z = "\x03", "\x04", "\x1a"
PROMPT = "\x1b[?2004h"  # the prompt asks for marked pastes when it is there
OPTIONS = ("--threads", "1", "--ctx", "1024", "--temperature", "0", "--system", "You are a helpful assistant.")
LISTENING = r"listening on http://127\.0\.0\.1:(\d+) and http://\[::1\]:\d+"
FRANCE = "What is the capital of France?"
STORY = "Tell me a very long story about a dragon."


def start(*arguments: str, home: Path) -> "pexpect.spawn[str]":
    """The program on a terminal of its own."""
    command = ["-m", "runner", *arguments]
    child = pexpect.spawn(sys.executable, command, env=environment(home), encoding="utf-8", timeout=TIMEOUT_S, dimensions=(40, 150))
    child.delaybeforesend = None
    return child


@pytest.fixture
def chat(smollm2_path: Path, tmp_path: Path) -> "Iterator[pexpect.spawn[str]]":
    """Serving and chatting, at its first prompt."""
    child = start("-m", str(smollm2_path), "--port", "0", "--slots", "2", *OPTIONS, home=tmp_path)
    yield child
    child.close(force=True)


def tree_of(child: "pexpect.spawn[str]") -> list[psutil.Process]:
    front = psutil.Process(child.pid)
    return [front, *front.children(recursive=True)]


def assert_left(child: "pexpect.spawn[str]", tree: list[psutil.Process], code: int) -> None:
    child.expect(pexpect.EOF)
    child.wait()  # close() would signal a process that is still on its way out
    child.close()
    assert child.exitstatus == code
    assert left_of(tree) == []


def port_of(child: "pexpect.spawn[str]") -> int:
    """The port that was printed last."""
    assert isinstance(child.match, re.Match)
    return int(child.match.group(1))


def completion(port: int) -> str:
    """An answer over HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    body = json.dumps({"prompt": "1, 2, 3, 4, 5, 6,", "max_tokens": 5, "temperature": 0})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    text = json.loads(connection.getresponse().read())["choices"][0]["text"]
    connection.close()
    return str(text)


def test_terminal_and_http_share_one_engine(chat: "pexpect.spawn[str]", tmp_path: Path) -> None:
    chat.expect(LISTENING)
    port = port_of(chat)
    chat.expect_exact(PROMPT)
    tree = tree_of(chat)
    assert len(tree) == 2
    assert completion(port) == " 7, 8"
    chat.send(f"{FRANCE}\r")
    chat.expect_exact("The capital of France is Paris.")
    chat.expect(r"\d+ tokens, [\d.]+ tokens/s, first after [\d.]+ s")
    chat.expect_exact(PROMPT)
    chat.send("/slots\r")
    chat.expect(r"slot +state +tokens +request")
    chat.expect_exact(PROMPT)
    chat.send("/exit\r")
    assert_left(chat, tree, 0)
    log = (tmp_path / ".local/state/slotfile/slotfile.log").read_text(encoding="utf-8")
    assert re.search(LISTENING, log)
    assert FRANCE not in log


def test_ctrl_c_stops_the_answer_and_the_next_one_is_right(chat: "pexpect.spawn[str]") -> None:
    chat.expect_exact(PROMPT)
    chat.send(f"{STORY}\r")
    chat.expect_exact("king")
    chat.send(CTRL_C)
    chat.expect_exact("(stopped)")
    chat.expect_exact(PROMPT)
    chat.send("/clear\r")
    chat.expect_exact(PROMPT)
    chat.send(f"{FRANCE}\r")
    chat.expect_exact("The capital of France is Paris.")
    chat.expect_exact(PROMPT)
    tree = tree_of(chat)
    chat.send(CTRL_D)
    assert_left(chat, tree, 0)


def test_killed_engine_costs_one_answer_and_not_the_session(chat: "pexpect.spawn[str]") -> None:
    chat.expect_exact(PROMPT)
    chat.send(f"{STORY}\r")
    chat.expect_exact("king")
    tree_of(chat)[1].kill()
    chat.expect_exact("Error: The engine ended while this request was being answered; the answer is incomplete")
    chat.expect_exact(PROMPT)
    chat.send(f"{FRANCE}\r")
    chat.expect_exact("The capital of France is Paris.")


def test_signal_at_the_prompt_ends_the_program_and_gives_the_terminal_back(chat: "pexpect.spawn[str]") -> None:
    chat.expect_exact(PROMPT)
    tree = tree_of(chat)
    chat.kill(signal.SIGTERM)
    assert_left(chat, tree, 0)


def test_closed_terminal_ends_the_program(chat: "pexpect.spawn[str]") -> None:
    chat.expect_exact(PROMPT)
    tree = tree_of(chat)
    chat.close(force=False)
    assert left_of(tree) == []


def test_ctrl_c_while_loading_ends_the_program(smollm2_path: Path, tmp_path: Path) -> None:
    child = start("-m", str(smollm2_path), "--port", "0", *OPTIONS, home=tmp_path)
    while not (found := psutil.Process(child.pid).children()):
        continue
    child.send(CTRL_C)
    child.expect(pexpect.EOF)
    child.wait()  # close() would signal a process that is still on its way out
    child.close()
    # A shell sees 130 either way. Why Python sometimes ends itself by SIGINT here is not proven; seen 3 times in 60 early interrupts.
    assert child.exitstatus == 130 or child.signalstatus == signal.SIGINT
    assert left_of(found) == []


class TestInAShell:
    """Job control, as a person's shell does it."""

    @pytest.fixture
    def shell(self, tmp_path: Path) -> "Iterator[pexpect.spawn[str]]":
        env = environment(tmp_path) | {"PS1": "READY ", "BASH_SILENCE_DEPRECATION_WARNING": "1"}
        child = pexpect.spawn("bash", ["--norc", "--noprofile", "-i"], env=env, encoding="utf-8", timeout=TIMEOUT_S, dimensions=(40, 400))
        child.expect_exact("READY ")
        yield child
        for process in psutil.Process(child.pid).children(recursive=True):
            process.kill()
        child.close(force=True)

    def command(self, model: Path) -> str:
        return f"{sys.executable} -m runner -m {model} --port 0 --slots 2 {' '.join(OPTIONS[:-1])} 'You are a helpful assistant.'"

    def test_ctrl_z_and_fg_during_an_answer(self, shell: "pexpect.spawn[str]", smollm2_path: Path) -> None:
        shell.sendline(self.command(smollm2_path))
        shell.expect_exact(PROMPT)
        shell.send(f"{STORY}\r")
        shell.expect_exact("king")
        shell.send(CTRL_Z)
        shell.expect("Stopped")
        shell.expect_exact("READY ")
        shell.sendline("fg")
        shell.expect_exact("dragon")
        shell.send("typed during the answer")
        shell.send(CTRL_C)
        shell.expect_exact("(stopped)")
        shell.expect_exact("typed during the answer")

    def test_ctrl_z_and_fg_at_the_prompt(self, shell: "pexpect.spawn[str]", smollm2_path: Path) -> None:
        shell.sendline(self.command(smollm2_path))
        shell.expect_exact(PROMPT)
        shell.send(CTRL_Z)
        shell.expect("Stopped")
        shell.expect_exact("READY ")
        shell.sendline("fg")
        shell.expect_exact(PROMPT)
        shell.send(f"{FRANCE}\r")
        shell.expect_exact("The capital of France is Paris.")
        shell.expect_exact(PROMPT)
        shell.send(CTRL_D)
        shell.expect_exact("READY ")
        shell.sendline("echo code $?")
        shell.expect("code 0")

    def test_job_in_the_background_serves_and_leaves_the_terminal_alone(self, shell: "pexpect.spawn[str]", smollm2_path: Path) -> None:
        shell.sendline(f"{self.command(smollm2_path)} &")
        shell.expect(LISTENING)
        assert completion(port_of(shell)) == " 7, 8"
        shell.sendline("kill -INT $!; wait $!; echo code $?")
        shell.expect("code 130")

    def test_answers_go_to_a_file_without_control_sequences(self, shell: "pexpect.spawn[str]", smollm2_path: Path, tmp_path: Path) -> None:
        out = tmp_path / "answers"
        command = self.command(smollm2_path).replace(" --port 0", "").replace("-m runner", "-m runner chat")
        shell.sendline(f"{command} > {out}")
        shell.expect_exact("> ")
        shell.sendline(FRANCE)
        shell.expect_exact("> ")
        shell.send(CTRL_D)
        shell.expect_exact("READY ")
        assert out.read_bytes() == b"The capital of France is Paris.\n"

    def test_dumb_terminal_gets_text_and_nothing_else(self, shell: "pexpect.spawn[str]", smollm2_path: Path) -> None:
        shell.sendline("export TERM=dumb; bind 'set enable-bracketed-paste off'")
        shell.expect_exact("READY ")
        shell.sendline(self.command(smollm2_path))
        shell.expect_exact("\n> ")
        shell.sendline(FRANCE)
        shell.expect_exact("The capital of France is Paris.\r\n> ")
        assert "\x1b" not in str(shell.before)
        shell.send(CTRL_D)
        shell.expect_exact("READY ")


def test_ctrl_c_stops_an_answer_however_much_was_pasted_meanwhile(chat: "pexpect.spawn[str]") -> None:
    chat.expect_exact(PROMPT)
    chat.send(f"{STORY}\r")
    chat.expect_exact("king")
    # More than the terminal's buffer holds: what comes after it, Ctrl-C included, waits outside until there is room.
    chat.send("x" * 9000)
    chat.expect_exact("is dropped")
    chat.send(CTRL_C)
    chat.expect_exact("(stopped)")
    chat.expect_exact(PROMPT)
    chat.send(CTRL_D)
    chat.expect(pexpect.EOF)
    chat.wait()  # close() would signal a process that is still on its way out
    chat.close()
    assert chat.exitstatus == 0
