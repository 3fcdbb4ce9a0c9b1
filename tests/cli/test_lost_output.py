"""Standard output that is closed, or full: whatever a command has to say there is not lost in silence."""

import subprocess
from pathlib import Path

import pytest

from tests.cli.program import COMMAND, TIMEOUT_S, environment

GREEDY = ("--threads", "1", "--ctx", "512", "--temperature", "0", "--max-tokens", "8")
COUNT = "1, 2, 3, 4, 5, 6,"
CLOSED, FULL = ">&-", ">/dev/full"
SENTENCES = {CLOSED: "it is closed", FULL: "No space left on device"}

WITHOUT_MODEL = [
    ("--version",),
    ("--help",),
    ("run", "--help"),
    ("models",),
    ("simulate", "--requests", "20", "--clients", "2", "--slots", "2"),
]
WITH_MODEL = [
    ("info",),
    ("info", "--json"),
    ("run", "--raw", "-p", COUNT, *GREEDY, "-m"),
    ("chat", *GREEDY, "-m"),
    ("doctor", "--port", "0", "-m"),
    ("doctor", "--json", "--port", "0", "-m"),
    ("bench", "--ctx", "512", "--slots", "1", "--threads", "1", "--prompt-tokens", "16", "--steps", "2", "-m"),
]


def said(redirection: str, *arguments: str, home: Path, text: str = "") -> tuple[int, str]:
    """Exit code and standard error of a command with that standard output."""
    if redirection == FULL and not Path("/dev/full").exists():
        pytest.skip("needs a device that is always full")
    command = ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *arguments]
    done = subprocess.run(
        command,
        input=text,
        env=environment(home),
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize("redirection", [CLOSED, FULL])
@pytest.mark.parametrize("arguments", WITHOUT_MODEL, ids=" ".join)
def test_command_whose_output_is_lost_says_so(arguments: tuple[str, ...], redirection: str, tmp_path: Path) -> None:
    expected = f"Error: The output cannot be written: {SENTENCES[redirection]}\n"
    assert said(redirection, *arguments, home=tmp_path) == (1, expected)


@pytest.mark.parametrize("redirection", [CLOSED, FULL])
@pytest.mark.parametrize("arguments", WITH_MODEL, ids=lambda arguments: " ".join(arguments[:2]))
def test_command_with_a_model_whose_output_is_lost_says_so(
    arguments: tuple[str, ...], redirection: str, smollm2_path: Path, tmp_path: Path
) -> None:
    expected = f"Error: The output cannot be written: {SENTENCES[redirection]}\n"
    assert said(redirection, *arguments, str(smollm2_path), home=tmp_path, text="Hi\n") == (1, expected)


@pytest.mark.parametrize("redirection", [CLOSED, FULL])
def test_what_has_nothing_to_say_there_does_not_care(redirection: str, tmp_path: Path) -> None:
    code, err = said(redirection, "run", "-p", " ", home=tmp_path)
    assert code == 2
    assert err.endswith("Error: The prompt is empty.\n")
