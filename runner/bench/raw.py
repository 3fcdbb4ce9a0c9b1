"""The decode loop in this process, without HTTP, pipes or a front: what scheduling, ctypes and sampling cost.

The counterpart of `llama-batched-bench -npp 16 -ntg 128 -npl 8`.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from runner.config import EngineConfig, ModelFile
from runner.engine.backend import Backend
from runner.engine.batch import BatchPlan
from runner.engine.sampling import SamplingParams
from runner.engine.sequence import Sequence as Generation
from runner.llama.backend import LlamaBackend
from runner.serving.load import Engine, load_engine
from runner.serving.loop import EngineLoop
from runner.serving.prepare import Prepared
from runner.serving.protocol import ModelInfo

GREEDY = SamplingParams(temperature=0.0, seed=0)
N_PROMPT = 16
N_GENERATE = 128
# Token ids of the prompts stay below: any will do, and small vocabularies have fewer.
MAX_TOKEN_ID = 40_000


class Unsampled:
    """The real back end, except that it takes a fixed token instead of looking at the logits."""

    def __init__(self, backend: LlamaBackend, token: int) -> None:
        self._token = token
        self.apply, self.decode, self.n_cells, self.open_sampler = backend.apply, backend.decode, backend.n_cells, backend.open_sampler
        self.broken_invariant = backend.broken_invariant

    def sample(self, plan: BatchPlan) -> list[int]:
        """The fixed token, a chunk with logits each."""
        return [self._token] * plan.n_outputs


@dataclass(frozen=True, slots=True)
class RawFigures:
    """Rates in tokens a second; Python's own work in microseconds a step and a row, and its share of a step's time."""

    n_sequences: int
    decode_tok_s: float
    n_passes_per_step: float
    python_us_per_step: float
    python_share: float


class RawBench:
    """One loaded engine, measured several times."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine: Engine = load_engine(config, clock=time.monotonic, progress=lambda fraction: None)
        self._n_runs = 0

    @property
    def info(self) -> ModelInfo:
        """What was loaded and chosen."""
        return self._engine.info

    def n_tokens_needed(self, n_generate: int) -> int:
        """What a slot must hold for `decode`: the prompt, the steps until all are filled and gaps are closed, and those that count."""
        return N_PROMPT + 4 * self.info.n_slots + n_generate

    def prefill(self, n_prompt: int) -> float:
        """Prompt tokens a second of one prompt that is computed alone."""
        loop = self._loop(self._engine.backend)
        generation = self._generation(0, n_prompt, 2)
        loop.inbox.put(Prepared(generation, ""))
        started = time.perf_counter()
        while not generation.n_generated:
            loop.step()
        seconds = time.perf_counter() - started
        self._engine.scheduler.cancel(generation.request_id, time.monotonic())
        return n_prompt / seconds

    def decode(self, slots: Sequence[int], *, is_sampled: bool = True, n_generate: int = N_GENERATE) -> RawFigures:
        """Decode on exactly these slots: all are filled first, then the others are cancelled.

        Counted from some steps after that (gaps between slots are closed by then) for `n_generate` steps.
        """
        engine, clock = self._engine, time.perf_counter
        scheduler = engine.scheduler
        backend = engine.backend if is_sampled else Unsampled(engine.backend, 1000)
        loop = self._loop(backend)
        n_slots = len(scheduler.pool.slots)
        # None of them ends while it is measured: an engine that falls idle waits for work.
        generations = [self._generation(index, N_PROMPT, 2 * n_generate + 4 * n_slots) for index in range(n_slots)]
        for generation in generations:
            loop.inbox.put(Prepared(generation, ""))
        while not all(generation.n_generated for generation in generations):
            loop.step()
        for generation in generations:
            if generation.slot_id not in slots:
                scheduler.cancel(generation.request_id, clock())
        kept = [generation for generation in generations if not generation.is_finished]
        for _ in range(2 * n_slots):
            loop.step()
        before, native_before, steps_before, passes_before = (
            clock(),
            engine.native_seconds().total_s,
            loop.totals.n_steps,
            loop.totals.n_passes,
        )
        n_before = sum(generation.n_generated for generation in kept)
        for _ in range(n_generate):
            loop.step()
        seconds, native = clock() - before, engine.native_seconds().total_s - native_before
        n_tokens, n_steps = sum(generation.n_generated for generation in kept) - n_before, loop.totals.n_steps - steps_before
        for generation in kept:
            scheduler.cancel(generation.request_id, clock())
        python_s = max(0.0, seconds - native)
        return RawFigures(
            len(kept), n_tokens / seconds, (loop.totals.n_passes - passes_before) / n_steps, python_s / n_steps * 1e6, python_s / seconds
        )

    def _loop(self, backend: Backend) -> EngineLoop:
        self._n_runs += 1
        return EngineLoop(
            self._engine.scheduler,
            backend,
            clock=time.monotonic,
            emit=lambda events: None,
            native=self._engine.native_seconds,
            first_guess_s=1.0,
        )

    def _generation(self, index: int, n_prompt: int, max_tokens: int) -> Generation:
        n_ids = min(MAX_TOKEN_ID, self.info.n_vocab)
        prompt = [(1000 + 37 * self._n_runs + 11 * index + i) % n_ids for i in range(n_prompt)]
        return Generation(f"bench-{self._n_runs}-{index}", prompt, GREEDY, max_tokens, ignore_eos=True, cache_prompt=False)


def main(arguments: Sequence[str]) -> None:
    """`python -m runner.bench.raw MODEL SLOTS CTX THREADS`: one JSON object with all kinds of run."""
    path, n_slots, n_ctx, n_threads = Path(arguments[0]), *map(int, arguments[1:])
    file = ModelFile(str(path), 0, path.stat().st_size)
    bench = RawBench(EngineConfig(model=file, model_name=path.stem, n_slots=n_slots, n_ctx_slot=n_ctx, n_threads=n_threads))
    everything, half = range(n_slots), n_slots // 2
    bench.decode(everything, n_generate=16)
    figures = {
        "unsampled": bench.decode(everything, is_sampled=False),
        "greedy": bench.decode(everything),
        "adjacent": bench.decode(range(half)),
        "scattered": bench.decode([0, 2, 5, 7] if n_slots == 8 else range(0, n_slots, 2)),
    }
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
