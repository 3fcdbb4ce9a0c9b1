"""Little memory: the defaults shrink to what there is, and what was asked for and does not fit is one sentence and not an abort."""

import resource
import subprocess
from pathlib import Path

import pytest

from tests.cli.program import COMMAND, environment

GIB = 1 << 30
PROMPT = ("run", "--raw", "-p", "1, 2, 3,", "--max-tokens", "2", "--temperature", "0", "--threads", "1")


def run_within(n_bytes: int, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """As `ulimit -v` has it."""
    return subprocess.run(
        [*COMMAND, *PROMPT, *arguments],
        env=environment(home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes)),
    )


@pytest.mark.parametrize("slots", ["4", "16"])
def test_default_context_of_a_model_trained_on_32k_fits_little_memory(gemma3_path: Path, tmp_path: Path, slots: str) -> None:
    done = run_within(3 * GIB // 2, "-m", str(gemma3_path), "--slots", slots, home=tmp_path)
    assert (done.returncode, done.stdout) == (0, " 4\n")


def test_context_that_was_asked_for_and_does_not_fit_is_one_sentence(gemma3_path: Path, tmp_path: Path) -> None:
    done = run_within(3 * GIB // 2, "-m", str(gemma3_path), "--slots", "16", "--ctx", "32768", home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: 16 slots of 32,768 tokens need ")
    assert len(done.stderr.splitlines()) <= 2
