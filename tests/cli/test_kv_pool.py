"""One pool of cells for all slots, from the command line: the answer is the same, and what cannot be had is said in one sentence."""

from pathlib import Path

import pytest

from runner.bundle.gguf import read_header
from runner.cli.checks import check_kv_cache
from runner.cli.model import ChosenModel
from runner.config import EngineConfig, ModelFile
from tests.cli.program import run

PROMPT = ("run", "--raw", "-p", "1, 2, 3, 4, 5, 6, 7, 8,", "--max-tokens", "2", "--temperature", "0", "--kv", "unified")


@pytest.mark.parametrize("options", [(), ("--kv-pool", "300"), ("--slots", "8", "--ctx", "256", "--kv-pool", "1000")])
@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_answer_goes_on_as_with_cells_of_its_own(
    model: str, options: tuple[str, ...], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path: Path = request.getfixturevalue(model)
    done = run(*PROMPT, "-m", str(path), *options, home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, " 9\n", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--kv", "partitioned", "--kv-pool", "1000"),
            ["Error: --kv-pool is 1,000 and --kv is partitioned: there is no pool", "hint: --kv unified, or no --kv-pool"],
        ),
        (
            ("--ctx", "2000", "--kv-pool", "1000"),
            [
                "Error: --kv-pool is 1,000 and --ctx is 2,000: the pool must hold one full slot at least",
                "hint: --kv-pool 2000, or --ctx 1000",
            ],
        ),
        (
            ("--context-shift",),
            [
                (
                    "Error: --context-shift cannot be used with --kv unified: "
                    "cells that slots share cannot change their positions for one of them"
                ),
                "hint: no --context-shift, or --kv partitioned",
            ],
        ),
    ],
)
def test_what_does_not_go_together_is_one_sentence_and_a_hint(
    smollm2_path: Path, tmp_path: Path, options: tuple[str, ...], said: list[str]
) -> None:
    done = run(*PROMPT, "-m", str(smollm2_path), *options, home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == said


@pytest.mark.parametrize(
    ("slots", "ctx", "pool", "shown"),
    [
        (4, 1000, None, "4 slots x 1,000 tokens, KV cache 90 MiB (K f16, V f16, one pool of 4,000 tokens)"),
        (8, 1000, 1024, "8 slots x 1,000 tokens, KV cache 22 MiB (K f16, V f16, one pool of 1,024 tokens)"),
        (8, None, 1024, "8 slots x 1,024 tokens, KV cache 22 MiB (K f16, V f16, one pool of 1,024 tokens)"),
    ],
)
def test_size_of_the_pool_is_shown_before_the_model_loads(
    smollm2_path: Path, slots: int, ctx: int | None, pool: int | None, shown: str
) -> None:
    file = ModelFile(str(smollm2_path), 0, smollm2_path.stat().st_size)
    config = EngineConfig(model=file, model_name="m", n_slots=slots, n_ctx_slot=ctx, kv="unified", kv_pool=pool)
    assert check_kv_cache(ChosenModel(file, "m", read_header(file)), config).text == shown
