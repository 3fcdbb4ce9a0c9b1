"""The chat on a real terminal: pastes, keys, and what is left of it for the shell."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.terminal.pty_chat import told

TIMEOUT_S = 20
CTRL_C, CTRL_D, ALT_ENTER, UP = "\x03", "\x04", "\x1b\r", "\x1b[A"
PROMPT = "\x1b[?2004h"  # the prompt asks for marked pastes when it is there
PASTE_ON, PASTE_OFF = "\x1b[200~", "\x1b[201~"
ROOT = Path(__file__).parents[2]

THREE_HUNDRED_LINES = "\n".join(f'line {n}\tx = """{n}"""' if n % 3 else "" for n in range(300)).strip("\n")


def start(*arguments: str) -> "pexpect.spawn[str]":
    command = ["-m", "tests.terminal.pty_chat", *arguments]
    child = pexpect.spawn(sys.executable, command, cwd=ROOT, encoding="utf-8", timeout=TIMEOUT_S, dimensions=(40, 120))
    child.delaybeforesend = None
    child.expect_exact(PROMPT)
    return child


@pytest.fixture
def chat() -> "Iterator[pexpect.spawn[str]]":
    child = start()
    yield child
    child.close(force=True)


def leave(chat: "pexpect.spawn[str]") -> None:
    chat.expect_exact(PROMPT)
    chat.send(CTRL_D)
    chat.expect("left")
    chat.expect(pexpect.EOF)
    chat.wait()  # close() would signal a process that is still on its way out
    chat.close()
    assert chat.exitstatus == 0


def test_message_is_answered_and_ctrl_d_leaves(chat: "pexpect.spawn[str]") -> None:
    chat.send("Hi\r")
    chat.expect_exact(told("Hi"))
    chat.expect("1 token, first after 0.50 s")
    leave(chat)


@pytest.mark.parametrize("message", [THREE_HUNDRED_LINES, "x" * 20_000], ids=["300 lines", "20 kB in one line"])
@pytest.mark.parametrize("is_marked", [True, False], ids=["marked", "unmarked"])
def test_paste_is_one_message(chat: "pexpect.spawn[str]", message: str, *, is_marked: bool) -> None:
    chat.send(f"{PASTE_ON}{message}{PASTE_OFF}\r" if is_marked else message.replace("\n", "\r") + "\r")
    chat.expect_exact(told(message))
    chat.send("next\r")
    chat.expect_exact(told("next"))
    leave(chat)


def test_alt_enter_starts_a_new_line(chat: "pexpect.spawn[str]") -> None:
    chat.send("one" + ALT_ENTER)
    chat.expect("one")
    chat.send("two\r")
    chat.expect_exact(told("one\ntwo"))


def test_triple_quotes_hold_a_block_open(chat: "pexpect.spawn[str]") -> None:
    for line in ('"""one', "", 'two"""'):
        chat.send(line)
        chat.expect_exact(line[-3:]) if line else None
        chat.send("\r")
    chat.expect_exact(told("one\n\ntwo"))


def test_ctrl_c_stops_the_answer_and_keeps_the_session(chat: "pexpect.spawn[str]") -> None:
    chat.send("count\r")
    chat.expect_exact("1, 2, 3,")
    chat.send(CTRL_C)
    chat.expect_exact("(stopped)")
    chat.send("Hi\r")
    chat.expect_exact(told("Hi"))
    leave(chat)


def test_what_is_typed_during_an_answer_is_not_shown_and_not_lost(chat: "pexpect.spawn[str]") -> None:
    chat.send("count\r")
    chat.expect_exact("1, 2, 3,")
    chat.send("typed ahead")
    with pytest.raises(pexpect.TIMEOUT):
        chat.expect_exact("typed ahead", timeout=0.3)
    chat.send(CTRL_C)
    chat.expect_exact("(stopped)")
    chat.send("\r")
    chat.expect_exact(told("typed ahead"))


def test_ctrl_c_at_the_prompt_clears_the_line_and_the_second_leaves(chat: "pexpect.spawn[str]") -> None:
    chat.send("half a mess" + CTRL_C)
    chat.expect_exact("(Ctrl-C again or Ctrl-D leaves)")
    chat.send("Hi\r")
    chat.expect_exact(told("Hi"))
    chat.expect_exact(PROMPT)
    chat.send(CTRL_C)
    chat.expect_exact("(Ctrl-C again or Ctrl-D leaves)")
    chat.send(CTRL_C)
    chat.expect("left")
    chat.expect(pexpect.EOF)


def test_ctrl_d_in_a_line_sends_nothing_and_does_not_leave(chat: "pexpect.spawn[str]") -> None:
    chat.send("half" + CTRL_D)
    chat.send("\r")
    chat.expect_exact(told("half"))


def test_history_is_kept_for_the_next_session_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "history"
    first = start(str(path))
    first.send("remember me\r")
    first.expect_exact(told("remember me"))
    leave(first)
    assert path.stat().st_mode & 0o777 == 0o600
    second = start(str(path))
    second.send(UP)
    second.expect("remember me")
    second.send("\r")
    second.expect_exact(told("remember me"))
    leave(second)


def test_nothing_typed_ahead_reaches_the_shell() -> None:
    shell = pexpect.spawn(
        "/bin/sh", ["-i"], cwd=ROOT, encoding="utf-8", timeout=TIMEOUT_S, env={"PS1": "$ ", "TERM": "xterm", "PATH": "/usr/bin:/bin"}
    )
    shell.expect_exact("$ ")
    shell.sendline(f"{sys.executable} -m tests.terminal.pty_chat")
    shell.expect_exact(PROMPT)
    shell.send("/exit\recho leaked\r")
    shell.expect("left")
    shell.expect_exact("$ ")
    with pytest.raises(pexpect.TIMEOUT):
        shell.expect_exact("leaked", timeout=0.5)
    shell.sendline("stty -a | tr ' ' '\\n' | grep -x -e echo -e icanon")
    shell.expect("icanon\r\n")
    shell.close(force=True)
