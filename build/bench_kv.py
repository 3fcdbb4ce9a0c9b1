"""What becomes of cells that were computed once: the scenarios of `make bench` for KV memory.

shared_prefix       8 clients at once under one system prompt of 700 words, new each round, 16 tokens each: p50 of TTFT, and the longest
chat                6 turns of 24 tokens over a context of 700 words; the client keeps a text of its own as each answer: median TTFT of the
                    turns 2 to 6
turn_tokens         the same with the server's answers: the later turn that computed most, against the tokens that were new
template_prefix     texts without a template have filled the slots; then 8 clients at once, 64 tokens each, no system message: all that they
                    share is what the chat template puts first: tokens/s
back                4 turns over 850 words, then 20 others with 300 words each, 4 at a time, then a fifth turn: its TTFT, against the turns
                    2 to 4
back_after_restart  the same 4 turns, SIGTERM, a new process, and the fifth turn is the first thing that it is asked
parked_mib          8 sessions of 1,000 tokens fill the slots and 50 more come: what the engine's resident memory grew by, for each of those
                    that can still be continued (8 of them are tried), against its tokens times the bytes of a cell
fork                a question under a system prompt of 1,000 tokens while the first one under it is answered: its TTFT, against that of the
                    first; slots of three sizes

No two contexts on one server are of one seed: those would begin with the same words.
"""

import asyncio
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import psutil

from runner.bench.load import percentile
from runner.bench.load_kv import Conversation, KvLoad, later_turns
from runner.bundle import kv_cells
from runner.bundle.gguf import read_header
from runner.config import EngineConfig, ModelFile

MIB: Final = 1024 * 1024
HOST_MIB: Final = 4096  # all parked sessions fit
FORK_CTX: Final = (2048, 8192, 32768)

Figures = tuple[float, ...]


def in_turn(measure: Callable[[KvLoad, int], Figures], ours: KvLoad, peer: KvLoad, rounds: int) -> list[tuple[float, float]]:
    """Of each figure the medians of ours and of the peer, A B A B."""
    found = [(measure(ours, number), measure(peer, number)) for number in range(rounds)]
    return list(zip(_medians([a for a, _ in found]), _medians([b for _, b in found]), strict=True))


def shared_prefix(load: KvLoad, number: int) -> Figures:
    """p50 of TTFT and the longest, in seconds."""
    found = asyncio.run(load.shared_prefix(8, 700, 16, number))
    return percentile(found, 0.5), max(found)


def chat(load: KvLoad, number: int) -> Figures:
    """Median TTFT of the later turns, in seconds."""
    turns = asyncio.run(load.talk(Conversation.over(700, number), 6, 24, replies="Fine, noted number"))
    return (statistics.median(turn.ttft_s for turn in turns[1:]),)


def turn_tokens(load: KvLoad, rounds: int) -> tuple[float, float]:
    """Tokens computed in a turn, and the new ones plus one: of that turn in all rounds that is furthest beyond."""
    found = []
    for number in range(rounds):
        asyncio.run(load.talk(conversation := Conversation.over(700, 1000 + number), 6, 24))
        found += later_turns(conversation)
    worst = max(found, key=lambda turn: turn.n_computed / (turn.n_new + 1))
    return worst.n_computed, worst.n_new + 1


def template_prefix(load: KvLoad, number: int) -> Figures:
    """Tokens a second of all clients, where no slot begins as a chat does."""
    asyncio.run(load.displace(8, 60, number))
    return (asyncio.run(load.parallel(8, 64, number)),)


def back(load: KvLoad, rounds: int) -> tuple[float, float]:
    """TTFT of a client that comes back, and of its turns while its slot was warm, in seconds."""

    async def measure(number: int) -> Figures:
        conversation = Conversation.over(850, 2000 + number)
        warm = await _warm(load, conversation)
        await load.others(20, 300, 16, 100 + number, at_once=4)
        return await _again(load, conversation), warm

    returned, warm = _medians([asyncio.run(measure(number)) for number in range(rounds)])
    return returned, warm


def back_after_restart(server: Callable[[], AbstractContextManager[object]], load: KvLoad, rounds: int) -> tuple[float, float]:
    """The same where `server` ends and is started again meanwhile."""
    found = []
    for number in range(rounds):
        conversation = Conversation.over(850, 3000 + number)
        with server():
            warm = asyncio.run(_warm(load, conversation))
        with server():
            found.append((asyncio.run(_again(load, conversation)), warm))
    returned, warm = _medians(found)
    return returned, warm


def parked_mib(load: KvLoad, pid: int, cell_bytes: int) -> tuple[float, float]:
    """MiB that the largest process below `pid` has grown by for each session that is kept without a slot, and MiB of its cells.

    Infinite where none is kept.
    """
    asyncio.run(load.others(8, 950, 4, 0))
    before = _resident_bytes(pid)
    # Each of these takes a slot from one before it, so that as many more are parked.
    sessions = asyncio.run(load.others(50, 950, 4, 1))
    grown = _resident_bytes(pid) - before
    n_kept = len(sessions) * asyncio.run(load.share_kept(sessions[:40:5]))
    own = statistics.median(session.n_cells for session in sessions) * cell_bytes
    return grown / n_kept / MIB if n_kept else math.inf, own / MIB


def cell_bytes(model: Path) -> int:
    """Keys and values of one token, of the types that are there without an option."""
    file = ModelFile(str(model), 0, model.stat().st_size)
    return kv_cells.cell_bytes(read_header(file), EngineConfig(model=file, model_name=model.stem)).total


def fork(load: KvLoad, rounds: int) -> tuple[float, float]:
    """TTFT of the second and of the first question under one system prompt of 1,000 tokens, in seconds."""
    second, first = _medians([asyncio.run(load.fork(970, 128, number)) for number in range(rounds)])
    return second, first


async def _warm(load: KvLoad, conversation: Conversation) -> float:
    turns = await load.talk(conversation, 4, 24)
    return statistics.median(turn.ttft_s for turn in turns[1:])


async def _again(load: KvLoad, conversation: Conversation) -> float:
    (turn,) = await load.talk(conversation, 1, 24)
    return turn.ttft_s


def _resident_bytes(pid: int) -> int:
    """Of the engine: it alone maps the model and holds cells."""
    root = psutil.Process(pid)
    return max(int(process.memory_info().rss) for process in [root, *root.children(recursive=True)])


def _medians(found: Sequence[Figures]) -> Figures:
    """Of each figure."""
    return tuple(statistics.median(values) for values in zip(*found, strict=True))
