"""What clients see of shared, saved and restored cells: the same text as from a fresh slot, whatever happened before.

Texts are counted on in only one way, so that rounding decides nothing.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cli.program import serve

N_SLOTS = 2


def counting(start: int, n: int) -> str:
    """Numbers, of which the next is never in doubt."""
    return ", ".join(map(str, range(start, start + n))) + ","


class Client:
    """One who asks the program for completions."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session

    async def ask(self, prompt: str, n_tokens: int = 12, **fields: object) -> tuple[str, int]:
        """The text that follows, and how many tokens of the prompt were not computed."""
        body = {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, **fields}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            found: dict[str, Any] = await answer.json()
        assert "choices" in found, found
        return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def leave_after(self, prompt: str, seconds: float) -> None:
        """Ask, and go."""
        try:
            async with asyncio.timeout(seconds):
                await self.ask(prompt, 64, stream=True)
        except (TimeoutError, aiohttp.ContentTypeError):
            return

    async def metric(self, name: str) -> float:
        """One of the program's figures."""
        async with self._session.get(f"{self._url}/metrics") as answer:
            text = await answer.text()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


@pytest.fixture(params=["smollm2_path", "gemma3_path"], scope="module")
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


class Program:
    """The program, that looks at its cells after every step, and somebody who reads what it says."""

    def __init__(self, path: Path, home: Path, *options: str) -> None:
        common = ("--port", "0", "--slots", str(N_SLOTS), "--ctx", "2048", "--threads", "1", "--log-level", "debug")
        self._served = serve("serve", "-m", str(path), *common, *options, home=home)
        self.url = self._served.url
        process = self._served.process
        assert process.stdout is not None
        assert process.stderr is not None
        self._reader = ThreadPoolExecutor(1)
        self._said = self._reader.submit(process.stderr.read)

    def end(self, number: signal.Signals) -> None:
        """By a signal."""
        self._served.signal(number)
        self._served.process.wait(30)
        assert "Traceback" not in self._said.result(30)
        self._reader.shutdown()
        for stream in (self._served.process.stdout, self._served.process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture(scope="module")
def served(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(path, tmp_path_factory.mktemp("home"))
    yield program
    program.end(signal.SIGTERM)


@pytest.fixture
async def client(served: Program) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(served.url, session)
        assert await Client(served.url, session).metric("slotfile_kv_violations_total") == 0


async def test_a_prompt_that_is_left_at_any_time_answers_as_from_a_fresh_slot(client: Client) -> None:
    for step in range(1, 13):
        prompt = counting(100 * step, 70)
        expected = f" {100 * step + 70}, {100 * step + 71},"
        await client.leave_after(prompt, 0.02 * step)
        text, _ = await client.ask(prompt)
        assert text.startswith(expected[: len(text)])
        again, n_cached = await client.ask(prompt)
        assert again == text
        assert n_cached > 0


async def test_conversations_that_take_turns_are_never_mixed_up(client: Client) -> None:
    """Three in two slots; each counts in its own hundreds."""
    texts = {start: counting(start, 60) for start in (2000, 4000, 6000)}
    for turn in range(4):
        for start in texts:
            text, n_cached = await client.ask(texts[start])
            n_so_far = texts[start].count(",")
            assert text.startswith(f" {start + n_so_far}, "[: len(text)]), (start, turn, text)
            assert (n_cached > 20) == (turn > 0)
            texts[start] = counting(start, n_so_far + 4)


async def test_prompts_equal_to_shorter_than_and_diverging_from_what_is_cached(client: Client) -> None:
    whole = counting(8000, 80)
    expected, _ = await client.ask(whole, cache_prompt=False)
    for _ in range(2):
        assert (await client.ask(whole))[0] == expected
    for n in (79, 60, 31, 30):
        prompt = counting(8000, n)
        text, _ = await client.ask(prompt)
        assert text.startswith(f" {8000 + n}, "[: len(text)])
        text, _ = await client.ask(f"{prompt} {counting(100, 40)}")
        assert text.startswith(" 140, "[: len(text)])
    assert (await client.ask(whole))[0] == expected


async def test_many_with_one_beginning_are_answered_as_alone(client: Client) -> None:
    system = counting(100, 80)
    prompts = [f"{system} and from {start}: {counting(start, 12)}" for start in range(3000, 3800, 100)]
    together = await asyncio.gather(*(client.ask(prompt, 8) for prompt in prompts))
    for number, (text, _) in enumerate(together):
        assert text.startswith(f" {3000 + 100 * number + 12}, "[: len(text)])
    assert sum(n_cached > 100 for _, n_cached in together) >= len(prompts) - 1


async def test_the_choices_of_one_request_compute_its_prompt_once(client: Client) -> None:
    before = await client.metric("slotfile_engine_prompt_rows_total")
    await client.ask(counting(5000, 60), 4, n=2)
    await asyncio.sleep(1.1)  # the engine tells its figures once a second
    n_rows = await client.metric("slotfile_engine_prompt_rows_total") - before
    _, n_cached = await client.ask(counting(5000, 60), 4)
    assert n_cached < n_rows <= n_cached + 2  # the first token of all texts may be there already


@pytest.mark.parametrize("is_killed", [False, True], ids=["SIGTERM", "SIGKILL"])
async def test_after_a_restart_a_conversation_goes_on_without_its_prefill(path: Path, tmp_path: Path, *, is_killed: bool) -> None:
    options = ("--kv-dir", str(tmp_path / "kv"))
    prompt = counting(100, 120)
    program = Program(path, tmp_path, *options)
    async with aiohttp.ClientSession() as session:
        text, _ = await Client(program.url, session).ask(prompt)
        if is_killed:
            await asyncio.sleep(2.5)  # an idle slot is written after a second
    program.end(signal.SIGKILL if is_killed else signal.SIGTERM)
    program = Program(path, tmp_path, *options)
    async with aiohttp.ClientSession() as session:
        again, n_cached = await Client(program.url, session).ask(f"{prompt}{text}")
    program.end(signal.SIGTERM)
    shown = f"{prompt}{text}{again}"
    assert shown == counting(100, 200)[: len(shown)]
    assert n_cached > len(prompt) / 5
