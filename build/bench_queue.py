"""What happens when many come at once: the scenarios of `make bench` for queue, tiers and shares.

intruder    3 streams of 256 tokens; when all have begun, a prompt of 2,000 words comes (4 tokens): the longest gap, and its TTFT
burst       64 requests at once, 16 tokens each, one client: p50 of TTFT
urgent      8 requests of 128 tokens hold all slots and 8 wait, all `flex`; half a second later one `priority`: its TTFT,
            against the same with no tiers at all
parked      of the same, those `flex` requests that were parked: time from arrival to end without queue and parking, against 8 undisturbed
headers     8 streams of 256 tokens; when all have begun, 20 streaming requests with a prompt of 4,000 tokens, one after the other or 8 at
            once: p95 of the time to the response headers. llama-server sends none before the first token: one request shows that
neighbours  one client (a key of its own) with 50 requests of 32 tokens, half a second later four others with one each: p95 of their
            TTFT, against the four alone
"""

import asyncio
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from runner.bench.load import Load, percentile

KEYS = ("key-of-anna", "key-of-bert", "key-of-cleo", "key-of-dora")
GREEDY = "key-of-greedy"


def median(measure: Callable[[int], float], rounds: int) -> float:
    """Of so many rounds."""
    return statistics.median(measure(number) for number in range(rounds))


def intruder(load: Load, rounds: int) -> tuple[float, float]:
    """Longest gap of a stream and TTFT of the intruder, in seconds."""
    found = [asyncio.run(load.intruder(3, 2000, number)) for number in range(rounds)]
    return statistics.median(gap for gap, _ in found), statistics.median(ttft for _, ttft in found)


def burst(load: Load, rounds: int) -> float:
    """p50 of TTFT."""
    return median(lambda number: percentile(asyncio.run(load.burst(64, 16, number)), 0.5), rounds)


def urgent(load: Load, rounds: int) -> tuple[float, float]:
    """TTFT of a `priority` request among `flex` ones, and of the same among equals."""
    tiers = median(lambda number: asyncio.run(load.urgent(16, 128, number, others="flex", urgent="priority"))[0], rounds)
    none = median(lambda number: asyncio.run(load.urgent(16, 128, number, others=None, urgent=None))[0], rounds)
    return tiers, none


def parked(load: Load, rounds: int) -> tuple[float, float]:
    """Seconds that a parked request had a slot, and those of undisturbed ones. Eight fill the slots: nobody else waits."""
    disturbed, calm = [], []
    for number in range(rounds):
        _, streams = asyncio.run(load.urgent(8, 128, number, others="flex", urgent="priority"))
        disturbed += [stream.total_s - stream.parked_s for stream in streams if stream.parked_s]
        calm.append(statistics.median(_whole(load, number)))
    return statistics.median(disturbed), statistics.median(calm)


def _whole(load: Load, number: int) -> list[float]:
    async def run() -> list[float]:
        _, streams = await load.urgent(8, 128, number, others="flex", urgent="flex")
        return [stream.total_s for stream in streams]

    return asyncio.run(run())


def headers(load: Load, rounds: int, n_requests: int = 20, *, at_once: bool = False) -> float:
    """p95 of the seconds to the response headers of a prompt of 4,000 tokens (a word is one), all slots busy."""
    return median(lambda number: percentile(asyncio.run(load.headers(8, 256, n_requests, 3970, number, at_once=at_once)), 0.95), rounds)


def neighbours(load: Load, rounds: int) -> tuple[float, float]:
    """p95 of four clients' TTFT beside a greedy one, and alone."""
    beside = median(lambda number: percentile(asyncio.run(load.neighbours(KEYS, GREEDY, 50, 32, number)), 0.95), rounds)
    alone = median(lambda number: percentile(asyncio.run(load.neighbours(KEYS, GREEDY, 0, 32, number)), 0.95), rounds)
    return beside, alone


def key_file(directory: str) -> Path:
    """The five clients' keys."""
    path = Path(directory) / "keys"
    path.write_text("".join(f"{key} name={key.removeprefix('key-of-')} tier=high\n" for key in (*KEYS, GREEDY)), encoding="utf-8")
    return path


def temporary() -> "tempfile.TemporaryDirectory[str]":
    """A place for it."""
    return tempfile.TemporaryDirectory(prefix="slotfile-bench-")
