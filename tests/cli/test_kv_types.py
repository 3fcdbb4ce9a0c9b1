"""The program answers with every kind of cell, and says in one sentence what cannot be had."""

from pathlib import Path

import pytest

from tests.cli.program import run

PROMPT = ("run", "--raw", "-p", "1, 2, 3, 4, 5, 6, 7, 8,", "--max-tokens", "2", "--temperature", "0", "--ctx", "1000")
TYPES = [("q8_0", "q8_0"), ("q8_0", "q4_0"), ("f32", "bf16"), ("bf16", "iq4_nl"), ("q5_1", "q5_0"), ("f16", "q4_1")]


@pytest.mark.parametrize(("type_k", "type_v"), TYPES)
def test_answer_goes_on_as_with_16_bits(smollm2_path: Path, tmp_path: Path, type_k: str, type_v: str) -> None:
    done = run(*PROMPT, "-m", str(smollm2_path), "--cache-type-k", type_k, "--cache-type-v", type_v, home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, " 9\n", "")


@pytest.mark.parametrize("types", [(), ("--cache-type-k", "q8_0", "--cache-type-v", "q8_0")])
def test_answer_of_a_model_with_windows_that_are_kept_in_full(gemma3_path: Path, tmp_path: Path, types: tuple[str, ...]) -> None:
    done = run(*PROMPT, "-m", str(gemma3_path), "--swa-full", *types, home=tmp_path)
    assert (done.returncode, done.stdout) == (0, " 9\n")


def test_what_llama_cpp_would_refuse_is_one_sentence_and_a_hint(smollm2_path: Path, tmp_path: Path) -> None:
    done = run(*PROMPT, "-m", str(smollm2_path), "--cache-type-v", "q4_0", "--flash-attn", "off", home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "Error: --cache-type-v is q4_0 and --flash-attn is off: quantised values need flash attention",
        "hint: --flash-attn auto, or --cache-type-v f16",
    ]
