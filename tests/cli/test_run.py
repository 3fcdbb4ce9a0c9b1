"""`run` and `chat` in scripts and pipes: answers on standard output, all else on standard error, and an end at the end of the input."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.program import COMMAND, TIMEOUT_S, environment, run

GREEDY = ("--threads", "1", "--ctx", "512", "--temperature", "0", "--max-tokens", "8")
ENDLESS = ("--threads", "1", "--ctx", "2048", "--temperature", "0", "--max-tokens", "1900")
PARIS = ("--threads", "1", "--ctx", "512", "--temperature", "0", "--max-tokens", "20", "--system", "You are a helpful assistant.")
COUNT = "1, 2, 3, 4, 5, 6,"


@contextmanager
def started(*arguments: str, home: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A command whose standard input stays open."""
    with subprocess.Popen(
        [*COMMAND, *arguments], env=environment(home), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def test_answer_is_all_there_is_on_standard_output(smollm2_path: Path, tmp_path: Path) -> None:
    done = run("run", "-m", str(smollm2_path), "--raw", "-p", COUNT, *GREEDY, home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, " 7, 8, 9\n", "")


def test_prompt_may_come_from_a_pipe(smollm2_path: Path, tmp_path: Path) -> None:
    done = run("run", "-m", str(smollm2_path), "--raw", *GREEDY, home=tmp_path, text=COUNT)
    assert (done.returncode, done.stdout, done.stderr) == (0, " 7, 8, 9\n", "")


def test_given_prompt_does_not_wait_for_a_pipe_that_never_closes(smollm2_path: Path, tmp_path: Path) -> None:
    with started("run", "-m", str(smollm2_path), "--raw", "-p", COUNT, *GREEDY, home=tmp_path) as process:
        assert process.wait(TIMEOUT_S) == 0


def test_system_prompt_changes_the_answer(smollm2_path: Path, tmp_path: Path) -> None:
    done = run("run", "-m", str(smollm2_path), "-p", "What is the capital of France?", *PARIS, home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital of France is Paris.\n", "")


def test_prompt_that_is_too_long_is_one_sentence(smollm2_path: Path, tmp_path: Path) -> None:
    done = run("run", "-m", str(smollm2_path), "--threads", "1", "--ctx", "256", "--raw", "-p", "word " * 300, home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")
    assert "256" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_reader_that_leaves_is_a_quiet_end(smollm2_path: Path, tmp_path: Path) -> None:
    with started("run", "-m", str(smollm2_path), "--raw", "-p", COUNT, *ENDLESS, home=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(3)
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 141
        assert process.stderr.read() == b""


def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(smollm2_path: Path, tmp_path: Path) -> None:
    with started("run", "-m", str(smollm2_path), "--raw", "-p", COUNT, *ENDLESS, home=tmp_path) as process:
        assert process.stdout is not None
        first = process.stdout.read(3)
        started_at = time.monotonic()
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=TIMEOUT_S)
        assert time.monotonic() - started_at < 2
        assert (process.returncode, said) == (130, b"")
        assert first == b" 7,"
        assert rest.endswith(b"\n")


@pytest.mark.parametrize("env", [{}, {"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=["plain", "dumb", "no colour"])
def test_chat_answers_each_line_of_a_pipe(smollm2_path: Path, tmp_path: Path, env: dict[str, str]) -> None:
    text = "What is the capital of France?\n/clear\nWhat is the capital of France?"
    done = run("chat", "-m", str(smollm2_path), *PARIS, home=tmp_path, text=text, env=env)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n" * 2)
    assert done.stderr == "The conversation starts anew.\n"


def test_chat_answers_before_the_pipe_closes_and_ends_when_it_does(smollm2_path: Path, tmp_path: Path) -> None:
    with started("chat", "-m", str(smollm2_path), *GREEDY, home=tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Hi\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0


def test_ctrl_c_ends_a_chat_whose_pipe_stands_still(smollm2_path: Path, tmp_path: Path) -> None:
    with started("chat", "-m", str(smollm2_path), *GREEDY, home=tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Hi\n")
        process.stdin.flush()
        process.stdout.readline()
        started_at = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
        assert time.monotonic() - started_at < 2
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


def test_nothing_but_the_temporary_directory_needs_to_be_writable(smollm2_path: Path, tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": environment(tmp_path)["PYTHONPATH"]}
    command = [*COMMAND, "run", "-m", str(smollm2_path), "--raw", "-p", COUNT, *GREEDY]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, " 7, 8, 9\n", "")


def test_model_without_a_template_cannot_chat_but_continues_text(gemma3_path: Path, tmp_path: Path) -> None:
    for command in (("chat",), ("run", "-p", "Hi")):
        done = run(*command, "-m", str(gemma3_path), *GREEDY, home=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        hint = "hint: --chat-template FILE brings one; run --raw needs none\n"
        assert done.stderr == f"Error: {gemma3_path.stem} has no chat template, so it cannot chat\n{hint}"
    done = run("run", "--raw", "-p", COUNT, "-m", str(gemma3_path), *GREEDY, home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" 7, 8")
