"""One soak: a real server, random clients, failures, and at the end the question whether all is as it was.

    warm-up    a fifth of the time    clients alone; then silence: what the processes hold is the measure for the end
    failures   two fifths             engines are killed, aborted, stopped for a while and for ever; their samplers fail
    long run   two fifths             one engine to the end: its memory must stay flat
    silence                           slots idle, nothing waits, processes, descriptors and threads as after the warm-up

In all three the back end's calls fail now and then (faulty_engine.py), but not in the built executable, which cannot be reached into.

Bounds on memory. Front: 16 MiB between the medians of the first and the last third; its requests are all live in the queue's bounds, and
what is kept of ended ones is bounded (charges of clients, a moving average of ends). Engine: 32 MiB; half of it are the cells of parked
sequences, which `--kv-host-mib` bounds, the rest the buffers in which cells are moved and what the heap does not give back at once.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from tests.soak.clients import ADMIN, KEYS, Key, Worker
from tests.soak.ledger import Ledger, read_metrics
from tests.soak.server import KV_HOST_MIB, Plan, Server
from tests.soak.vitals import Holdings, Memory, anonymous_mib

FRONT_GROWTH_MIB: Final = 16.0
ENGINE_GROWTH_MIB: Final = 2.0 * KV_HOST_MIB
SAMPLE_EVERY_S: Final = 0.5
FEWEST_SAMPLES: Final = 3
TELL_EVERY_S: Final = 30.0
# The longest deadline of a request, and what the engine may take to hear of it.
SILENT_WITHIN_S: Final = 75.0
SETTLED_WITHIN_S: Final = 10.0
# The watchdog waits ten times as long as the longest step should take, and 30 s at least.
HUNG_WITHIN_S: Final = 100
PAUSE_S: Final = 3.0
QUIET_TRIES: Final = 10


class Soak:
    """One run. `run` returns the ledger with what was found."""

    def __init__(self, plan: Plan, directory: Path, tell: Callable[[str], None]) -> None:
        self.ledger = Ledger(tell)
        self.front, self.engine = Memory(), Memory()
        self.report: list[str] = []
        self._plan, self._tell = plan, tell
        self._server = Server(plan, directory)
        self._random = random.Random(f"{plan.seed}/failures")
        self._started_at = time.monotonic()
        self._harms: list[str] = []
        self._n_known = 0

    async def run(self) -> Ledger:
        """Warm up, fail, run long, be silent, compare."""
        seconds = self._plan.seconds
        try:
            await self._server.ready()
            async with aiohttp.ClientSession(self._server.url, headers=ADMIN.headers) as self._admin, self._reported():
                known = await self._known_without_load()
                async with self._clients(0):
                    await asyncio.sleep(seconds / 5)
                before = await self._silence(None)
                async with self._watched(known), self._clients(1):
                    await self._fail(until=time.monotonic() + 2 * seconds / 5)
                    self._engine_pid = await self._engine()
                    await asyncio.sleep(2 * seconds / 5)
                await self._silence(before)
                await self._check_end()
            self._check_memory()
        finally:
            code = self._server.end()
        if code != 0:
            self.ledger.violate(f"the server ended with exit code {code}")
        return self.ledger

    async def _known_without_load(self) -> str:
        """An injected failure may end one request, and the next; hardly all of them."""
        async with self._worker("quiet", ADMIN).connected() as asker:
            for _ in range(QUIET_TRIES):
                if (answer := await asker.known()) is not None:
                    return answer
        raise RuntimeError(f"the known prompt was refused {QUIET_TRIES} times by a quiet server")

    def _worker(self, name: str, key: Key) -> Worker:
        return Worker(name, key, self._server.url, self.ledger, self._plan.seed)

    # -- load ----------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _clients(self, part: int) -> AsyncIterator[None]:
        """Clients at work until the block ends; it ends when all of them have had their last answer."""
        stop = asyncio.Event()
        workers = [self._worker(f"soak{part}-{n}", KEYS[n % len(KEYS)]) for n in range(self._plan.n_workers)]
        running = [asyncio.create_task(worker.run(stop)) for worker in workers]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*running)

    @asynccontextmanager
    async def _watched(self, known: str) -> AsyncIterator[None]:
        """Memory is sampled, and the known prompt asked, until the block ends."""
        stop = asyncio.Event()
        sampling, asking = asyncio.create_task(self._sample()), asyncio.create_task(self._ask_known(known, stop))
        still = [self._worker(f"still-{n}", ADMIN) for n in range(self._plan.n_still_readers)]
        standing = [asyncio.create_task(worker.stand_still(stop)) for worker in still]
        self._engine_pid = 0
        try:
            yield
        finally:
            stop.set()
            sampling.cancel()
            await asyncio.gather(asking, *standing)

    async def _sample(self) -> None:
        """The front all the time, the engine once it is left alone."""
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            at = self._elapsed_s
            with suppress(psutil.NoSuchProcess):  # an engine that ends meanwhile
                tree = self._server.tree
                self.front.add(at, anonymous_mib(tree.front))
                if tree.engine is not None and tree.engine.pid == self._engine_pid:
                    self.engine.add(at, anonymous_mib(tree.engine))

    async def _ask_known(self, known: str, stop: asyncio.Event) -> None:
        """Among all the others, and once when they have gone, a prompt whose answer is known."""
        async with self._worker("known", ADMIN).connected() as asker:
            while True:
                is_last = stop.is_set()
                answer = await asker.known()
                if answer is not None:
                    self._n_known += 1
                    if answer != known:
                        self.ledger.violate(f"the known prompt was answered with {answer!r}; without load with {known!r}")
                if is_last:
                    return
                await asyncio.sleep(1.0)

    @asynccontextmanager
    async def _reported(self) -> AsyncIterator[None]:
        """A line now and then, until the block ends."""
        reporting = asyncio.create_task(self._report())
        try:
            yield
        finally:
            reporting.cancel()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            metrics = await self._metrics()
            front = self.front.samples[-1][1] if self.front.samples else 0.0
            engine = self.engine.samples[-1][1] if self.engine.samples else 0.0
            self._tell(
                f"{self._elapsed_s:5.0f} s  {sum(self.ledger.kinds.values())} sent, {self.ledger.n_open} open, "
                f"{self.ledger.n_violations} violations, {len(self._harms)} failures of engines, "
                f"{metrics.get('slotfile_requests_running', 0):.0f} running, {metrics['slotfile_requests_waiting']:.0f} waiting, "
                f"{metrics.get('slotfile_requests_parked', 0):.0f} parked, front {front:.0f} MiB, engine {engine:.0f} MiB"
            )

    # -- failures of the engine ----------------------------------------------------------------------------------------

    async def _fail(self, until: float) -> None:
        """Harm the engine in every way once: pause it, and end it by each of these signals."""
        ways = [None, signal.SIGKILL, signal.SIGABRT]
        if self._plan.executable is None:
            ways.append(signal.SIGUSR1)  # breaks a sampler (faulty_engine.py)
        if self._plan.hangs:
            ways.append(signal.SIGSTOP)
        pause_s = (until - time.monotonic()) / (len(ways) + 1)
        self._random.shuffle(ways)
        for way in ways:
            await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.0))
            pid = await self._engine()
            self._harms.append(way.name if way is not None else "pause")
            await (self._pause(pid) if way is None else self._end(pid, way))
        await asyncio.sleep(max(0.0, until - time.monotonic()))

    async def _pause(self, pid: int) -> None:
        """Shorter than the watchdog's patience: nothing may come of it."""
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(PAUSE_S)
        os.kill(pid, signal.SIGCONT)

    async def _end(self, pid: int, way: signal.Signals) -> None:
        """Wait for its end too: one that is stopped for ever is the watchdog's to end."""
        os.kill(pid, way)
        for _ in range(2 * HUNG_WITHIN_S):
            await asyncio.sleep(0.5)
            if not psutil.pid_exists(pid):
                return
        self.ledger.violate(f"an engine that got {way.name} was still there after {HUNG_WITHIN_S} s")
        os.kill(pid, signal.SIGKILL)

    async def _engine(self) -> int:
        """The pid of an engine that answers."""
        while True:
            with suppress(psutil.NoSuchProcess):
                engine = self._server.tree.engine
                metrics = await self._metrics()
                if engine is not None and metrics["slotfile_engine_up"] == 1 and engine.is_running():
                    return engine.pid
            await asyncio.sleep(0.5)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _silence(self, before: Holdings | None) -> Holdings:
        """Wait until all is idle, and for what the processes hold; where there is a `before`, all of it must be there again."""
        busy = await self._until(self._what_is_busy, SILENT_WITHIN_S)
        for what in busy:
            self.ledger.violate(f"not idle {SILENT_WITHIN_S:g} s after the last client: {what}")
        excess = await self._until(lambda: self._excess(before), SETTLED_WITHIN_S)
        for what in excess:
            self.ledger.violate(what)
        held = Holdings.of(self._server.pid)
        assert held is not None, "no engine runs"
        self.report.append(f"held: {held}")
        return held

    async def _until(self, faults: Callable[[], Awaitable[list[str]]], within_s: float) -> list[str]:
        """Ask until there is no fault any more; those that are left."""
        deadline = time.monotonic() + within_s
        while True:
            await asyncio.sleep(0.5)
            found = await faults()
            if not found or time.monotonic() > deadline:
                return found

    async def _excess(self, before: Holdings | None) -> list[str]:
        held = Holdings.of(self._server.pid)
        if held is None:
            return ["no engine runs"]
        return held.excess(before) if before is not None else []

    async def _what_is_busy(self) -> list[str]:
        queue, slots, live, metrics = (
            await self._get("/v1/queue"),
            await self._get("/slots"),
            await self._get("/v1/requests"),
            await self._metrics(),
        )
        found = {
            "slots of /v1/queue": [slot for slot in queue["slots"] if slot["state"] != "idle"],
            "slots of /slots": [slot for slot in slots["slots"] if slot["state"] != "idle"],
            "n_waiting of /v1/queue": queue["n_waiting"],
            "n_parked of /v1/queue": queue["n_parked"],
            "n_waiting of /slots": slots["n_waiting"],
            "tiers": [tier for tier, share in queue["tiers"].items() if any(share.values())],
            "clients": queue["clients"],
            "live requests": live["data"],
            **{
                name: metrics.get(f"slotfile_{name}", 0)
                for name in ("requests_running", "requests_waiting", "requests_parked", "kv_parked_bytes")
            },
        }
        busy = [f"{name}: {what}" for name, what in found.items() if what]
        return busy if metrics["slotfile_engine_up"] else [*busy, "the engine is not up"]

    async def _check_end(self) -> None:
        self.ledger.check_all_ended()
        self.ledger.check_words_live()
        metrics = await self._metrics()
        n_begun, n_ended = self.ledger.check_log(self._server.log.splitlines(), metrics)
        n_restarts, n_ends = round(metrics["slotfile_engine_restarts_total"]), sum(harm != "pause" for harm in self._harms)
        if n_restarts != n_ends:
            self.ledger.violate(f"{n_ends} engines were ended from outside, and {n_restarts} were started again")
        n_slow = round(metrics["slotfile_slow_readers_total"])
        if n_slow != self.ledger.n_cut_off:
            self.ledger.violate(f"{self.ledger.n_cut_off} slow readers were cut off, and {n_slow} counted")
        if self._n_known == 0:
            self.ledger.violate("the known prompt was never answered")
        self.report += [
            f"requests: {sum(self.ledger.kinds.values())}; sequences begun {n_begun}, ended {n_ended}",
            f"outcomes: {dict(self.ledger.outcomes.most_common())}",
            f"own word in {self.ledger.n_with_own_word} of {self.ledger.n_with_word} answers; known prompt answered {self._n_known} times",
            f"engine failures: {self._harms}; restarts {n_restarts}",
            f"slow readers cut off {n_slow}; last engine's parks {metrics['slotfile_engine_parks_total']:.0f}",
        ]

    def _check_memory(self) -> None:
        for name, memory, most in (("front", self.front, FRONT_GROWTH_MIB), ("engine", self.engine, ENGINE_GROWTH_MIB)):
            growth = memory.growth_mib
            sizes = [mib for _, mib in memory.samples] or [0.0]
            self.report.append(
                f"{name}: {sizes[0]:.1f} to {sizes[-1]:.1f} MiB, at most {max(sizes):.1f}; growth {growth:+.1f} of {most:g} MiB allowed"
            )
            if len(memory.samples) < FEWEST_SAMPLES:
                self.ledger.violate(f"the {name}'s memory was seen {len(memory.samples)} times")
            if growth > most:
                self.ledger.violate(f"the {name}'s memory grew by {growth:.1f} MiB; {most:g} are allowed")

    async def _metrics(self) -> dict[str, float]:
        async with self._admin.get("/metrics") as response:
            return read_metrics(await response.text())

    async def _get(self, path: str) -> Any:
        async with self._admin.get(path) as response:
            return await response.json()

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_at
