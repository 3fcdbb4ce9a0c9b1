"""`slotfile bench`, on SmolLM2 with small counts: the form of what it prints, never its figures."""

import json
import re
from pathlib import Path

import pytest

from runner.bench.report import counts
from tests.cli.program import run

SMALL = ("--slots", "2", "--ctx", "128", "--threads", "1", "--prompt-tokens", "16", "--steps", "4")


def test_table_names_the_machine_and_has_a_line_a_count(smollm2_path: Path, tmp_path: Path) -> None:
    done = run("bench", "-m", str(smollm2_path), *SMALL, home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    facts, _, figures = done.stdout.partition("\n\n")
    assert [line.split("  ")[0] for line in facts.splitlines()] == ["model", "machine", "cpu library", "threads", "slots"]
    assert f"model        {smollm2_path.stem}, llama" in facts
    assert "libggml-cpu" in facts
    assert facts.endswith("threads      1\nslots        2 x 128 tokens")
    number, share = r"\d[\d,]*\.\d", r"\d+\.\d%"
    patterns = [
        r"measured +tokens/s  Python's share",
        rf"prompt of 16 tokens +{number}",
        rf"generated, 1 sequence +{number} +{share}",
        rf"generated, 2 sequences +{number} +{share}",
    ]
    lines = figures.splitlines()
    assert len(lines) == len(patterns)
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(patterns, lines, strict=True)), lines
    assert len({line.rindex(".") for line in lines[2:]}) == 1, "the columns are not aligned"


def test_json_is_one_object_with_the_same_figures(smollm2_path: Path, tmp_path: Path) -> None:
    done = run("bench", "--json", "-m", str(smollm2_path), *SMALL, home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["n_slots"], report["n_ctx_slot"], report["n_threads"], report["n_prompt"]) == (2, 128, 1, 16)
    assert [found["n_sequences"] for found in report["decode"]] == [1, 2]
    assert min(report["prompt_tok_s"], *(found["decode_tok_s"] for found in report["decode"])) > 0
    assert all(0 <= found["python_share"] < 1 for found in report["decode"])


def test_slot_too_small_for_the_measurement_is_one_sentence(smollm2_path: Path, tmp_path: Path) -> None:
    done = run("bench", "-m", str(smollm2_path), "--ctx", "256", "--slots", "1", home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[0] == "Error: A slot holds 256 tokens; this measurement needs 514"


@pytest.mark.parametrize(("n_slots", "expected"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])])
def test_sequences_double_up_to_all_slots(n_slots: int, expected: list[int]) -> None:
    assert counts(n_slots) == expected
