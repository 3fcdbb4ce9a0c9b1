"""The figures that docs/log.md keeps: ours beside llama-server, in one run on one machine, A B A B.

    python -m build.bench --peer path/to/llama-server --executable dist/smollm2-135m [--model model.gguf] [--rounds 7] [--only http,raw]

Without --model it is the GGUF that was packed into the executable, from the cache; for `queue` and `kv` the one that was published
(SmolLM2: Q4_1), where the aims were set. `llama-batched-bench` is taken from the peer's folder. Nothing else heavy may run meanwhile.
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import psutil

from build import bench_kv, bench_queue
from build.executable import CACHE, ROOT
from build.fetch import Cache, fetch_model
from runner.bench.load import Load, percentile
from runner.bench.load_kv import KvLoad
from runner.bundle.catalogue import find_entry, read_catalogue
from runner.bundle.locate import find_bundle
from runner.simulate.planning import measure

PORT = 18080
N_SLOTS, N_CTX, N_THREADS = 8, 4096, 2
HEADERS_CTX = 4608  # a prompt of 4,000 tokens and its answer
HERE = "--host 127.0.0.1 --port {port}"
MIB = 1024 * 1024
FLOOD = (20.0, 4200)  # prompts a second, words in each: more tokens than a slot holds


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: the medians, and what was aimed at as a sentence."""

    name: str
    ours: float
    peer: float | None
    target: str

    def line(self) -> str:
        """As a row of a Markdown table."""
        peer = "" if self.peer is None else f"{self.peer:.4g}"
        ratio = "" if self.peer is None else f"{self.ours / self.peer:.3f}"
        return f"| {self.name} | {self.ours:.4g} | {peer} | {ratio} | {self.target} |"


@dataclass(frozen=True, slots=True)
class Contest:
    """What runs against what."""

    executable: Path
    peer: Path
    model: Path
    rounds: int

    @property
    def ours(self) -> str:
        """Our server with the same GGUF, slots, context and threads as the peer."""
        return f"{self.executable} serve -m {self.model} --slots {N_SLOTS} --ctx {N_CTX} --threads {N_THREADS} {HERE}"

    @property
    def packed(self) -> str:
        """Our server with the model that it carries."""
        return f"{self.executable} serve --slots {N_SLOTS} --ctx {N_CTX} --threads {N_THREADS} {HERE}"

    @property
    def theirs(self) -> str:
        """The peer."""
        return f"{self.peer} -m {self.model} -np {N_SLOTS} -c {N_SLOTS * N_CTX} -t {N_THREADS} {HERE}"


@contextmanager
def serving(command: str, port: int, log: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends; ready when /health says so. `log`: the descriptor of its standard error."""
    process = start(command, port, log)
    try:
        wait_ready(process, port)
        yield process
    finally:
        stop(process)


def start(command: str, port: int, log: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start a server in a process group of its own, without a terminal."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(shlex.split(command.format(port=port)), stdin=quiet, stdout=quiet, stderr=log, start_new_session=True)


@contextmanager
def full_pipe() -> Iterator[int]:
    """The end of a pipe that takes no more, and that nobody reads."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_ready(process: subprocess.Popen[bytes], port: int, limit_s: float = 120.0) -> None:
    """Ask /health until it answers 200."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if process.poll() is not None:
            sys.exit(f"the server ended with exit code {process.returncode}: {process.args!r}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.05)
    sys.exit(f"no server answered on port {port} within {limit_s:.0f} s")


def in_turn(rounds: int, ours: Callable[[int], float], peer: Callable[[int], float]) -> tuple[float, float]:
    """Medians of `rounds` pairs, A B A B."""
    pairs = [(ours(number), peer(number)) for number in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def http(contest: Contest) -> Iterator[Row]:
    """Aggregate tokens a second through HTTP."""
    with serving(contest.ours, PORT), serving(contest.theirs, PORT + 1):
        ours, peer = Load(f"http://127.0.0.1:{PORT}"), Load(f"http://127.0.0.1:{PORT + 1}")
        for n_clients, n_tokens in ((1, 96), (4, 64), (8, 64)):
            a, b = in_turn(
                contest.rounds,
                lambda number, n=n_clients, m=n_tokens: asyncio.run(ours.parallel(n, m, 10 * number + n)),  # type: ignore[misc]
                lambda number, n=n_clients, m=n_tokens: asyncio.run(peer.parallel(n, m, 10 * number + n)),  # type: ignore[misc]
            )
            yield Row(f"tokens/s through HTTP, {n_clients} clients", a, b, ">= 0.98")


def raw(contest: Contest) -> Iterator[Row]:
    """The decode loop against llama-batched-bench, Python's share of it, and slots that are not adjacent."""
    found: list[dict[str, dict[str, float]]] = []
    theirs: list[float] = []
    for _ in range(contest.rounds):
        found.append(run_raw(contest.model))
        theirs.append(run_batched_bench(contest))

    def middle(kind: str, field: str) -> float:
        return statistics.median(figures[kind][field] for figures in found)

    yield Row("raw loop at 8, not sampled, tokens/s", middle("unsampled", "decode_tok_s"), statistics.median(theirs), ">= 0.98")
    yield Row("raw loop at 8, greedy, tokens/s", middle("greedy", "decode_tok_s"), statistics.median(theirs), ">= 0.95")
    yield Row("Python's own work, % of a step", 100 * middle("greedy", "python_share"), None, "<= 2")
    yield Row("Python's own work, µs a step of 8 rows", middle("greedy", "python_us_per_step"), None, "<= 100 + 8 x 60")
    yield Row(
        "4 of 8 slots {0,2,5,7} against {0,1,2,3}, tokens/s",
        middle("scattered", "decode_tok_s"),
        middle("adjacent", "decode_tok_s"),
        ">= 0.95",
    )


def run_raw(model: Path) -> dict[str, dict[str, float]]:
    """One process that measures the loop."""
    command = [sys.executable, "-m", "runner.bench.raw", str(model), str(N_SLOTS), str(N_CTX), str(N_THREADS)]
    result: dict[str, dict[str, float]] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def run_batched_bench(contest: Contest) -> float:
    """Generated tokens a second (S_TG)."""
    command = [str(contest.peer.with_name("llama-batched-bench")), "-m", str(contest.model), "-c", str(N_SLOTS * N_CTX)]
    command += ["-npp", "16", "-ntg", "128", "-npl", "8", "-t", str(N_THREADS), "--output-format", "jsonl"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return float(next(json.loads(line) for line in lines if line.startswith("{"))["speed_tg"])


def itl(contest: Contest) -> Iterator[Row]:
    """The 99th percentile of the gaps of 8 streams, disturbed against undisturbed, on one server."""
    ours = contest.ours.replace(f"--slots {N_SLOTS}", f"--slots {N_SLOTS + 1}")
    with full_pipe() as log, serving(ours, PORT), serving(ours, PORT + 1, log):
        load, unread = Load(f"http://127.0.0.1:{PORT}"), Load(f"http://127.0.0.1:{PORT + 1}")

        def p99(number: int, load: Load = load, **disturbance: object) -> float:
            return percentile(asyncio.run(load.gaps(8, 96, number, **disturbance)), 0.99) * 1000  # type: ignore[arg-type]

        flooded, calm = in_turn(contest.rounds, lambda number: p99(number, flood=FLOOD), p99)
        yield Row("ITL p99 of 8 streams under 20 refused prompts/s, ms", flooded, calm, "<= 1.1")
        stalled, calm = in_turn(
            contest.rounds, lambda number: p99(number, n_others=1, others_stall=True), lambda number: p99(number, n_others=1)
        )
        yield Row("ITL p99 of 8 streams beside a socket whose reader stands still, ms", stalled, calm, "<= 1.1")
        unheard, calm = in_turn(contest.rounds, lambda number: p99(number, unread), p99)
        yield Row("ITL p99 of 8 streams, log into a full pipe whose reader stands still, ms", unheard, calm, "<= 1.1")


def queue(contest: Contest) -> Iterator[Row]:
    """Many at once: the scenarios of `bench_queue.py`."""
    rounds = contest.rounds
    with serving(contest.ours, PORT), serving(contest.theirs, PORT + 1):
        ours, peer = Load(f"http://127.0.0.1:{PORT}"), Load(f"http://127.0.0.1:{PORT + 1}")
        gap, ttft = bench_queue.intruder(ours, rounds)
        peer_gap, peer_ttft = bench_queue.intruder(peer, rounds)
        yield Row("longest gap of 3 streams when a prompt of 2,000 words comes, s", gap, peer_gap, "<= 0.05")
        yield Row("the same prompt's first token, s", ttft, peer_ttft, "<= 1.35")
        yield Row("64 requests at once: first token p50, s", bench_queue.burst(ours, rounds), bench_queue.burst(peer, rounds), "<= 0.85")
        yield Row("a `priority` request among `flex` ones: first token, s, against no tiers", *bench_queue.urgent(ours, rounds), "<= 0.3")
        yield Row("parked and resumed: seconds with a slot, against undisturbed", *bench_queue.parked(ours, rounds), "<= 1.05")
    room = f"--ctx {N_CTX}", f"--ctx {HEADERS_CTX}"
    theirs = contest.theirs.replace(f"-c {N_SLOTS * N_CTX}", f"-c {N_SLOTS * HEADERS_CTX}")
    with serving(contest.ours.replace(*room), PORT), serving(theirs, PORT + 1):
        ours, peer = Load(f"http://127.0.0.1:{PORT}"), Load(f"http://127.0.0.1:{PORT + 1}")
        one_by_one = bench_queue.headers(ours, rounds), bench_queue.headers(peer, 1, 1)
        yield Row("headers of a stream, prompt of 4,000 tokens, all slots busy: p95, s", *one_by_one, "<= 0.1 s")
        yield Row("the same, 8 at once: p95, s", bench_queue.headers(ours, rounds, 8, at_once=True), None, "(0.1 s)")
    with bench_queue.temporary() as directory:
        command = f"{contest.ours} --api-key-file {bench_queue.key_file(directory)}"
        with serving(command, PORT):
            load = Load(f"http://127.0.0.1:{PORT}")
            name = "four clients beside one with 50 requests: first token p95, s, against alone"
            yield Row(name, *bench_queue.neighbours(load, rounds), "<= 2.5")


def kv(contest: Contest) -> Iterator[Row]:
    """What was computed once: the scenarios of `bench_kv.py`."""
    rounds = contest.rounds
    with serving(contest.ours, PORT), serving(contest.theirs, PORT + 1):
        ours, peer = KvLoad(f"http://127.0.0.1:{PORT}"), KvLoad(f"http://127.0.0.1:{PORT + 1}")
        median_ttft, longest_ttft = bench_kv.in_turn(bench_kv.shared_prefix, ours, peer, rounds)
        yield Row("8 clients, one new system prompt of 700 words: first token p50, s", *median_ttft, "<= 0.25")
        yield Row("the same: the longest, s", *longest_ttft, "<= 0.2")
        (later_ttft,) = bench_kv.in_turn(bench_kv.chat, ours, peer, rounds)
        yield Row("chat of 6 turns over 700 words: first token of later turns, s", *later_ttft, "<= 0.6")
        yield Row("tokens computed in a later turn at most, against what is new, and one", *bench_kv.turn_tokens(ours, rounds), "<= 1")
        (speed,) = bench_kv.in_turn(bench_kv.template_prefix, ours, peer, rounds)
        yield Row("tokens/s, 8 clients with the template's own system prompt", *speed, ">= 1.1")
        yield Row("a client is back after 20 others: first token, s, against a warm slot", *bench_kv.back(ours, rounds), "<= 1.3")
    with bench_queue.temporary() as directory:
        command = f"{contest.ours} --kv-dir {directory}"
        again = bench_kv.back_after_restart(lambda: serving(command, PORT), KvLoad(f"http://127.0.0.1:{PORT}"), rounds)
        yield Row("the same after a restart, from disk: first token, s", *again, "<= 2")
    with serving(f"{contest.ours} --kv-host-mib {bench_kv.HOST_MIB}", PORT) as process:
        grown = bench_kv.parked_mib(KvLoad(f"http://127.0.0.1:{PORT}"), process.pid, bench_kv.cell_bytes(contest.model))
        yield Row("resident memory of a parked session of 1,000 tokens, MiB, against its cells", *grown, "<= 1.05")
    for n_ctx in bench_kv.FORK_CTX:
        with serving(contest.ours.replace(f"--slots {N_SLOTS} --ctx {N_CTX}", f"--slots 2 --ctx {n_ctx}"), PORT):
            fork = bench_kv.fork(KvLoad(f"http://127.0.0.1:{PORT}"), rounds)
            yield Row(f"fork of 1,000 tokens, slots of {n_ctx:,} cells: first token, s, against computing them", *fork, "(its cost)")


def planning(contest: Contest) -> Iterator[Row]:
    """What the scheduler needs to plan a step with 8 running: the median of the rounds' medians, real time, no model."""
    found = [measure(("fair",)) for _ in range(contest.rounds)]
    few, many = (statistics.median(rows[i].plan_us for rows in found) for i in range(2))
    yield Row("planning a step, 10 waiting, µs", few, None, "<= 50")
    yield Row("the same with 100,000 waiting, against 10", many, few, "<= 2")


def cold(contest: Contest) -> Iterator[Row]:
    """From exec to the first streamed token."""
    first_token(contest.packed, PORT), first_token(contest.theirs, PORT + 1)  # the disk is warm from here on
    a, b = in_turn(contest.rounds, lambda _: first_token(contest.packed, PORT), lambda _: first_token(contest.theirs, PORT + 1))
    yield Row("first token from exec, s", a, b, "<= 0.9")


def first_token(command: str, port: int) -> float:
    """Start, ask until there is an answer, and wait for its first text."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": "default", "stream": True, "max_tokens": 4, "temperature": 0, "messages": messages}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"})
    started = time.perf_counter()
    process = start(command, port)
    try:
        while time.perf_counter() - started < 120:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
                    for line in answer:
                        if line.startswith(b"data: {") and has_text(line[6:]):
                            return time.perf_counter() - started
            except OSError:
                time.sleep(0.01)
    finally:
        stop(process)
    sys.exit("no token within 120 s")


def has_text(data: bytes) -> bool:
    """Whether a chunk carries text."""
    choices = json.loads(data).get("choices")
    return bool(choices and choices[0]["delta"].get("content"))


def memory(contest: Contest) -> Iterator[Row]:
    """Proportional set size of the process tree when ready, and what the executable adds to the model."""
    with serving(contest.ours, PORT) as ours, serving(contest.theirs, PORT + 1) as theirs:
        yield Row("memory when ready, MiB", tree_mib(ours.pid), tree_mib(theirs.pid), "<= 1.12")
    bundle = find_bundle(contest.executable)
    if bundle is not None:
        yield Row("executable minus GGUF, MB", bundle.runtime_bytes / 1e6, None, "<= 30")


def tree_mib(pid: int) -> float:
    """Proportional set size of a process and its descendants."""
    root = psutil.Process(pid)
    return float(sum(process.memory_full_info().pss for process in [root, *root.children(recursive=True)])) / MIB


def packed_model(name: str) -> Path:
    """The GGUF that `make exe` packed under this name."""
    found, entry = find_entry(read_catalogue(ROOT / "models.toml"), name)
    return fetch_model(found, entry, Cache(CACHE, ROOT))


def published_model(name: str) -> Path:
    """The GGUF of that name as it was published, whatever file type is packed."""
    found, entry = find_entry(read_catalogue(ROOT / "models.toml"), name)
    return fetch_model(found, msgspec.structs.replace(entry, quantize=None), Cache(CACHE, ROOT))


PARTS: dict[str, Callable[[Contest], Iterator[Row]]] = {
    "http": http,
    "raw": raw,
    "itl": itl,
    "queue": queue,
    "kv": kv,
    "planning": planning,
    "cold": cold,
    "memory": memory,
}


# Parts that are measured with the published GGUF.
PUBLISHED: Final = frozenset({"queue", "kv"})


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--executable", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args()
    name = options.executable.name
    models = {
        part: options.model or (published_model(name) if part in PUBLISHED else packed_model(name)) for part in options.only.split(",")
    }
    print(f"| figure (medians of {options.rounds} rounds) | ours | peer | ratio | target |\n|---|---|---|---|---|", flush=True)
    for part, model in models.items():
        for row in PARTS[part](Contest(options.executable.resolve(), options.peer.resolve(), model.resolve(), options.rounds)):
            print(row.line(), flush=True)


if __name__ == "__main__":
    main()
