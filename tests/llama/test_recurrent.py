"""The engine on models whose memory is a state, made on the spot."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runner.engine.sampling import SamplingParams
from runner.engine.sequence import Sequence
from runner.serving.load import load_engine
from runner.serving.prepare import Prepared
from runner.serving.protocol import StepEvents
from tests.conftest import engine_config
from tests.llama.recurrent import write_hybrid_gguf, write_recurrent_gguf

PROMPT = [300 + i * 7919 % 5000 for i in range(200)]


def answer(path: Path) -> str:
    """24 tokens after PROMPT, the most probable each time."""
    text: list[str] = []

    def hear(events: StepEvents) -> None:
        assert events.failed == []
        text.extend(delta.text for delta in events.deltas)

    config = engine_config(path, n_slots=2, n_ctx_slot=512, n_batch=64)
    engine = load_engine(config, clock=lambda: 0.0, progress=lambda _fraction: None)
    loop = engine.make_loop(hear)
    sequence = Sequence("r1", list(PROMPT), SamplingParams(temperature=0.0, seed=0), 24, ignore_eos=True)
    loop.inbox.put(Prepared(sequence, ""))
    while not sequence.is_finished:
        loop.step()
    return "".join(text)


@pytest.mark.parametrize("kind", ["recurrent_path", "hybrid_path", "window_path"])
def test_the_engine_answers_and_always_the_same(kind: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(kind)
    first = answer(path)
    assert len(first) > 24
    assert answer(path) == first


@pytest.mark.parametrize(("kind", "write"), [("recurrent_path", write_recurrent_gguf), ("hybrid_path", write_hybrid_gguf)])
def test_the_file_is_the_same_each_time(
    kind: str, write: Callable[[Path, Path], None], smollm2_path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(kind)
    write(tmp_path / "again.gguf", smollm2_path)
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()
