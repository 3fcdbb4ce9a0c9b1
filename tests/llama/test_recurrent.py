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


class Table:
    """An engine stepped by the test."""

    def __init__(self, path: Path) -> None:
        config = engine_config(path, n_slots=2, n_ctx_slot=512, n_batch=64)
        self.engine = load_engine(config, clock=lambda: 0.0, progress=lambda _fraction: None)
        self.loop = self.engine.make_loop(self._hear)
        self._text: list[str] = []

    def answer(self, prompt: list[int]) -> str:
        """24 tokens, the most probable each time; all of the prompt is computed."""
        self._text.clear()
        sampling = SamplingParams(temperature=0.0, seed=0)
        sequence = Sequence("r1", list(prompt), sampling, 24, ignore_eos=True, cache_prompt=False)
        self.loop.inbox.put(Prepared(sequence, ""))
        while not sequence.is_finished:
            self.loop.step()
        return "".join(self._text)

    def _hear(self, events: StepEvents) -> None:
        assert events.failed == []
        self._text.extend(delta.text for delta in events.deltas)


@pytest.mark.parametrize("kind", ["recurrent_path", "hybrid_path", "window_path"])
def test_the_engine_answers_and_always_the_same(kind: str, request: pytest.FixtureRequest) -> None:
    table = Table(request.getfixturevalue(kind))
    first = table.answer(PROMPT)
    assert len(first) > 24
    assert table.answer(PROMPT[1:-1]) != first
    assert table.answer(PROMPT) == first


@pytest.mark.parametrize(("kind", "write"), [("recurrent_path", write_recurrent_gguf), ("hybrid_path", write_hybrid_gguf)])
def test_the_file_is_the_same_each_time(
    kind: str, write: Callable[[Path, Path], None], smollm2_path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(kind)
    write(tmp_path / "again.gguf", smollm2_path)
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()
