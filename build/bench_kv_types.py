"""`python -m build.bench_kv_types MODEL.gguf ...`: memory and speed by the types of keys and values, as tables for docs/reference.md.

Eight slots of 4,096 tokens in llama.cpp alone: no scheduler, no samplers. Each round makes every context anew, one after the other; what is
shown is the best round, since other programs only make it slower. The second table divides the eight slots among two contexts of one model,
which unequal slots would need.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from runner.config import ModelFile
from runner.engine.batch import BatchPlan, Chunk
from runner.llama.batch import Batch
from runner.llama.context import Context, ContextSize, Kernels
from runner.llama.library import Library
from runner.llama.model import Model
from runner.serving.load import NativeLog
from runner.serving.machine import usable_threads

N_SLOTS: Final = 8
N_CTX: Final = 4096
N_BATCH: Final = 512
N_CONTEXT: Final = 200
N_PROMPT: Final = 2000
N_STEPS: Final = 32
# Token ids of the prompts: any will do, and small vocabularies have fewer.
MAX_TOKEN_ID: Final = 40_000
KINDS: Final = (
    Kernels("on"),
    Kernels("on", "q8_0", "q8_0"),
    Kernels("on", "q8_0", "q4_0"),
    Kernels("on", "q4_0", "q4_0"),
)
FULL_WINDOWS: Final = (Kernels("on", swa_full=True), Kernels("on", "q8_0", "q8_0", swa_full=True))


@dataclass(frozen=True, slots=True)
class Native:
    """llama.cpp, what it says, and one model on the CPU."""

    library: Library
    log: NativeLog
    path: Path
    model: Model

    @property
    def name(self) -> str:
        """As in the tables."""
        return self.path.stem


def open_all(paths: Sequence[Path]) -> list[Native]:
    """The models, in one library: it has one log."""
    log = NativeLog()
    library = Library(log)
    files = [ModelFile(str(path), 0, path.stat().st_size) for path in paths]
    return [Native(library, log, path, Model(library, file, n_gpu_layers=0, devices=[])) for path, file in zip(paths, files, strict=True)]


class Slots:
    """One context and the lengths of its slots."""

    def __init__(self, native: Native, n_slots: int, n_threads: int, kernels: Kernels) -> None:
        native.log.kv_mib = 0.0
        size = ContextSize(n_slots, N_CTX, N_BATCH, n_threads, n_threads)
        self._api, self._context = native.library.api, Context(native.library, native.model, size, kernels)
        self.kv_mib = native.log.kv_mib
        self._batch = Batch(native.library.api, N_BATCH, n_slots)
        self._n_ids = min(MAX_TOKEN_ID, native.model.vocabulary.n_tokens)
        self._lengths = [0] * n_slots

    def prefill(self, slot_id: int, n_tokens: int) -> float:
        """Seconds for a prompt in chunks of the batch's size."""
        started = time.perf_counter()
        for done in range(0, n_tokens, N_BATCH):
            self._decode([self._chunk(slot_id, min(N_BATCH, n_tokens - done))])
        return time.perf_counter() - started

    def step(self, n_rows: int, n_steps: int) -> float:
        """Seconds for so many steps of the first `n_rows` slots."""
        started = time.perf_counter()
        for _ in range(n_steps):
            self._decode([self._chunk(slot_id, 1) for slot_id in range(n_rows)])
        return time.perf_counter() - started

    def close(self) -> None:
        """Free the cells."""
        self._context.close()

    def _chunk(self, slot_id: int, n_tokens: int) -> Chunk:
        pos = self._lengths[slot_id]
        self._lengths[slot_id] += n_tokens
        tokens = [(1000 + 11 * slot_id + 37 * index) % self._n_ids for index in range(pos, pos + n_tokens)]
        return Chunk(slot_id, pos, tokens, has_logits=True)

    def _decode(self, chunks: Sequence[Chunk]) -> None:
        batch, _ = self._batch.fill(BatchPlan(chunks=tuple(chunks)))
        status = self._api.llama_decode(self._context.handle, batch)
        assert status == 0, f"llama_decode returned {status}"


def measure_types(native: Native, kernels: Kernels, n_threads: int) -> tuple[float, ...]:
    """MiB of the cells; tokens a second of a prompt, of one row behind it, and of all slots with a short context."""
    slots = Slots(native, N_SLOTS, n_threads, kernels)
    prompt_s = slots.prefill(0, N_PROMPT)
    behind_s = slots.step(1, N_STEPS)
    slots.close()
    slots = Slots(native, N_SLOTS, n_threads, kernels)
    for slot_id in range(N_SLOTS):
        slots.prefill(slot_id, N_CONTEXT)
    slots.step(N_SLOTS, 4)
    decode_s = slots.step(N_SLOTS, N_STEPS)
    slots.close()
    return slots.kv_mib, N_PROMPT / prompt_s, N_STEPS / behind_s, N_SLOTS * N_STEPS / decode_s


def measure_division(native: Native, n_contexts: int, n_threads: int, *, at_once: bool) -> tuple[float, ...]:
    """Tokens a second of eight rows in so many contexts: in turn at every step, or beside each other on a part of the threads each."""
    share = max(1, n_threads // n_contexts) if at_once else n_threads
    contexts = [Slots(native, N_SLOTS // n_contexts, share, Kernels("on")) for _ in range(n_contexts)]
    n_rows = N_SLOTS // n_contexts
    for slots in contexts:
        for slot_id in range(n_rows):
            slots.prefill(slot_id, N_CONTEXT)
        slots.step(n_rows, 4)
    started = time.perf_counter()
    if at_once:
        with ThreadPoolExecutor(n_contexts) as pool:
            list(pool.map(lambda slots: slots.step(n_rows, N_STEPS), contexts))
    else:
        for _ in range(N_STEPS):
            for slots in contexts:
                slots.step(n_rows, 1)
    seconds = time.perf_counter() - started
    for slots in contexts:
        slots.close()
    return (N_SLOTS * N_STEPS / seconds,)


Rows = dict[tuple[str, ...], Callable[[], tuple[float, ...]]]


def type_rows(natives: Sequence[Native], n_threads: int) -> Rows:
    """By model, types and windows."""
    rows: Rows = {}
    for native in natives:
        has_windows = native.model.n_swa > 0
        for kernels in (*KINDS, *(FULL_WINDOWS if has_windows else ())):
            windows = "full" if kernels.swa_full else "sliding" if has_windows else "none"
            key = (native.name, f"{kernels.cache_type_k} / {kernels.cache_type_v}", windows)
            rows[key] = partial(measure_types, native, kernels, n_threads)
    return rows


def division_rows(natives: Sequence[Native], n_threads: int) -> Rows:
    """By model and division of the slots."""
    divisions = {
        "one context of 8": (1, False),
        "two of 4, in turn": (2, False),
        "two of 4, at once": (2, True),
    }
    rows: Rows = {}
    for native in natives:
        for name, (n_contexts, at_once) in divisions.items():
            rows[native.name, name] = partial(measure_division, native, n_contexts, n_threads, at_once=at_once)
    return rows


def table(head: str, rows: Rows, rounds: int) -> None:
    """Measure all rows in every round, and print the best figure of each."""
    found: dict[tuple[str, ...], list[tuple[float, ...]]] = {key: [] for key in rows}
    for number in range(rounds):
        for key, measure in rows.items():
            found[key].append(measure())
            print(f"round {number + 1}: {' '.join(key)}: {' '.join(f'{figure:.1f}' for figure in found[key][-1])}", file=sys.stderr)
    print(head)
    print("|---" * (head.count("|") - 1) + "|")
    for key, figures in found.items():
        best = [max(column) for column in zip(*figures, strict=True)]
        print(f"| {' | '.join([*key, *(f'{figure:.0f}' for figure in best)])} |")


def main() -> None:
    """One table after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--only", choices=("types", "slots"), help="one of the two tables")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_threads())
    arguments = parser.parse_args()
    n_threads: int = arguments.threads
    natives = open_all(arguments.models)
    print(f"{os.cpu_count()} CPUs, {n_threads} threads, cells of {N_SLOTS} x {N_CTX:,} tokens, {arguments.rounds} rounds")
    print(f"prompt of {N_PROMPT:,} tokens, one row behind it, {N_SLOTS} rows behind {N_CONTEXT} tokens each\n")
    if arguments.only != "slots":
        head = f"| model | K / V | windows | KV, MiB | prompt, tokens/s | 1 row behind {N_PROMPT:,} | {N_SLOTS} rows behind {N_CONTEXT} |"
        table(head, type_rows(natives, n_threads), arguments.rounds)
        print()
    if arguments.only != "types":
        table(f"| model | slots | {N_SLOTS} rows behind {N_CONTEXT}, tokens/s |", division_rows(natives, n_threads), arguments.rounds)


if __name__ == "__main__":
    main()
