"""Load on an OpenAI-compatible server on this machine, and what its clients saw. Figures mean something side by side only."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

WORDS = ("river", "stone", "copper", "garden", "window", "silver", "market", "engine", "paper", "forest", "bridge", "candle")
STORY = "Write a long story."
TIMEOUT_S = 600

Message = dict[str, str]
Prompt = str | list[Message]


@dataclass(slots=True)
class Stream:
    """One streamed answer: when it was asked for and when each piece of text came (seconds, one clock).

    Of the `n_prompt` tokens of its prompt, `n_cached` were not computed again.
    """

    asked_at: float
    stamps: list[float] = field(default_factory=list)
    text: str = ""
    n_prompt: int = 0
    n_cached: int = 0
    n_tokens: int = 0
    status: int = 0
    parked_s: float = 0.0
    total_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first text."""
        return self.stamps[0] - self.asked_at

    @property
    def gaps(self) -> list[float]:
        """Seconds between two pieces of text."""
        return [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Timings(msgspec.Struct):
    parked_ms: float = 0.0
    total_ms: float = 0.0


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None


_chunks = msgspec.json.Decoder(_Chunk)


def words(n: int, seed: int) -> str:
    """`n` words in an order of their own."""
    return " ".join(random.Random(seed).choices(WORDS, k=n))  # noqa: S311


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie. Raises ValueError for none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Load:
    """A client of the server at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def parallel(self, n_clients: int, n_tokens: int, seed: int) -> float:
        """Aggregate tokens a second of `n_clients` streams with prompts of their own."""
        async with self._session() as session:
            prompts = [f"Write a story about a {words(6, seed * 1000 + i)}." for i in range(n_clients)]
            streams = await asyncio.gather(*(self.stream(session, prompt, n_tokens) for prompt in prompts))
        seconds = max(stream.stamps[-1] for stream in streams) - min(stream.asked_at for stream in streams)
        return sum(stream.n_tokens for stream in streams) / seconds

    async def gaps(
        self,
        n_clients: int,
        n_tokens: int,
        seed: int,
        *,
        flood: tuple[float, int] | None = None,
        n_others: int = 0,
        others_stall: bool = False,
    ) -> list[float]:
        """All gaps between tokens of `n_clients` streams.

        `flood` is (prompts a second, words in each), sent while they run. `n_others` further streams run beside them and are not
        counted; where `others_stall`, their clients never read them. Gaps count from the moment every stream has begun.
        """
        async with self._session() as session:
            prompts = [f"Write a story about a {words(6, seed * 1000 + i)}." for i in range(n_clients)]
            tasks = [asyncio.create_task(self.stream(session, prompt, n_tokens)) for prompt in prompts]
            disturbances = []
            if flood is not None:
                disturbances.append(asyncio.create_task(self._flood(session, *flood)))
            stalled = [await self._stall(session, n_tokens) for _ in range(n_others if others_stall else 0)]
            read = [asyncio.create_task(self.stream(session, STORY, n_tokens)) for _ in range(0 if others_stall else n_others)]
            streams = await asyncio.gather(*tasks)
            for task in (*disturbances, *read):
                task.cancel()
            for response in stalled:
                response.close()
        begun = max(stream.stamps[0] for stream in streams)
        return [b - a for stream in streams for a, b in zip(stream.stamps, stream.stamps[1:], strict=False) if a >= begun]

    async def intruder(self, n_streams: int, n_words: int, seed: int) -> tuple[float, float]:
        """Streams and, once all have begun, a prompt of `n_words`: the longest gap that a stream sees from then on, and its TTFT."""
        async with self._session() as session:
            begun = [asyncio.Event() for _ in range(n_streams)]
            prompts = [f"Write a story about a {words(6, seed * 1000 + i)}." for i in range(n_streams)]
            tasks = [asyncio.create_task(self.stream(session, p, 256, begun=event)) for p, event in zip(prompts, begun, strict=True)]
            await asyncio.gather(*(event.wait() for event in begun))
            intruder = await self.stream(session, words(n_words, seed), 4)
            streams = await asyncio.gather(*tasks)
        gaps = [b - a for stream in streams for a, b in zip(stream.stamps, stream.stamps[1:], strict=False) if b >= intruder.asked_at]
        return max(gaps), intruder.ttft_s

    async def burst(self, n_requests: int, n_tokens: int, seed: int) -> list[float]:
        """All at once: the TTFT of each."""
        async with self._session() as session:
            prompts = [f"Write a story about a {words(6, seed * 1000 + i)}." for i in range(n_requests)]
            streams = await asyncio.gather(*(self.stream(session, prompt, n_tokens) for prompt in prompts))
        return [stream.ttft_s for stream in streams]

    async def headers(self, n_busy: int, n_tokens: int, n_requests: int, n_words: int, seed: int, *, at_once: bool) -> list[float]:
        """`n_busy` streams of `n_tokens`; once all have begun, prompts of `n_words`: seconds to the response headers of each.

        They come one after the other, or `at_once`; a client goes as soon as it has its headers. Raises RuntimeError where a stream has
        ended before the last one has asked, and aiohttp.ClientResponseError for a prompt that is refused.
        """
        async with self._session() as session:
            begun = [asyncio.Event() for _ in range(n_busy)]
            prompts = [f"Write a story about a {words(6, seed * 1000 + i)}." for i in range(n_busy)]
            tasks = [asyncio.create_task(self.stream(session, p, n_tokens, begun=event)) for p, event in zip(prompts, begun, strict=True)]
            await asyncio.gather(*(event.wait() for event in begun))

            async def ask(number: int) -> float:
                if any(task.done() for task in tasks):
                    raise RuntimeError(f"Prompt {number + 1} of {n_requests} found a free slot: a stream had ended")
                return await self._headers(session, words(n_words, seed * 1000 + number))

            numbers = range(n_requests)
            found = list(await asyncio.gather(*map(ask, numbers))) if at_once else [await ask(number) for number in numbers]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return found

    async def urgent(
        self, n_others: int, n_tokens: int, seed: int, *, others: str | None, urgent: str | None
    ) -> tuple[float, list[Stream]]:
        """Requests of one `service_tier` and, half a second later, one of another: its TTFT, and the others."""
        async with self._session() as session:
            prompts = [f"Write a story about a {words(6, seed * 1000 + i)}." for i in range(n_others)]
            tasks = [asyncio.create_task(self.stream(session, prompt, n_tokens, tier=others)) for prompt in prompts]
            await asyncio.sleep(0.5)
            one = await self.stream(session, f"Write a poem about a {words(6, seed)}.", 4, tier=urgent)
            return one.ttft_s, list(await asyncio.gather(*tasks))

    async def neighbours(self, keys: Sequence[str], greedy_key: str, n_greedy: int, n_tokens: int, seed: int) -> list[float]:
        """`n_greedy` requests of one client at once, and, half a second later, one of each of `keys`: the TTFT of those."""
        async with self._session() as session:
            prompts = [f"Write a story about a {words(6, seed * 1000 + i)}." for i in range(n_greedy)]
            tasks = [asyncio.create_task(self.stream(session, prompt, n_tokens, key=greedy_key)) for prompt in prompts]
            await asyncio.sleep(0.5)
            mine = [f"Write a poem about a {words(6, seed * 1000 + i)}." for i in range(len(keys))]
            streams = await asyncio.gather(*(self.stream(session, p, n_tokens, key=key) for p, key in zip(mine, keys, strict=True)))
            await asyncio.gather(*tasks)
        return [stream.ttft_s for stream in streams]

    async def stream(
        self,
        session: aiohttp.ClientSession,
        prompt: Prompt,
        n_tokens: int,
        *,
        tier: str | None = None,
        key: str | None = None,
        begun: asyncio.Event | None = None,
    ) -> Stream:
        """One streamed chat answer of exactly `n_tokens` to messages, or to one of the user. `begun` is set at its first text."""
        found = Stream(time.perf_counter())
        body = _body(prompt, n_tokens) | ({"service_tier": tier} if tier is not None else {})
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        async with session.post(self._url + "/v1/chat/completions", json=body, headers=headers) as response:
            found.status = response.status
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = _chunks.decode(line[6:])
                if chunk.choices and chunk.choices[0].delta.content:
                    found.stamps.append(time.perf_counter())
                    found.text += chunk.choices[0].delta.content
                    if begun is not None:
                        begun.set()
                if chunk.timings is not None:
                    found.parked_s, found.total_s = chunk.timings.parked_ms / 1000, chunk.timings.total_ms / 1000
                if chunk.usage is not None:
                    found.n_prompt, found.n_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
                    found.n_cached = chunk.usage.prompt_tokens_details.cached_tokens if chunk.usage.prompt_tokens_details else 0
        return found

    async def _flood(self, session: aiohttp.ClientSession, per_second: float, n_words: int) -> None:
        """Prompts at a steady rate; whatever the answer is, it is not waited for before the next one."""
        prompt, tasks = words(n_words, 1), set()
        try:
            while True:
                tasks.add(asyncio.create_task(self._post(session, prompt)))
                await asyncio.sleep(1 / per_second)
        finally:
            for task in tasks:
                task.cancel()

    async def _post(self, session: aiohttp.ClientSession, prompt: str) -> None:
        async with session.post(self._url + "/v1/chat/completions", json=_body(prompt, 1)) as response:
            await response.read()

    async def _headers(self, session: aiohttp.ClientSession, prompt: str) -> float:
        asked_at = time.perf_counter()
        async with session.post(self._url + "/v1/chat/completions", json=_body(prompt, 4)) as response:
            found = time.perf_counter() - asked_at
            response.raise_for_status()
        return found

    async def _stall(self, session: aiohttp.ClientSession, n_tokens: int) -> aiohttp.ClientResponse:
        return await session.post(self._url + "/v1/chat/completions", json=_body(STORY, n_tokens))

    @staticmethod
    def _session() -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), read_bufsize=2**16)


def _body(prompt: Prompt, n_tokens: int) -> dict[str, object]:
    return {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "max_tokens": n_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "seed": 1,
        "ignore_eos": True,
    }
