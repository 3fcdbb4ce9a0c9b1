"""The bounds on what waits and what is used: who is over one hears so at once, with the time to ask again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest

from runner.api.bounds import Bounds
from runner.api.server import Server, bind
from runner.config import ApiKey, ServerConfig
from tests.api.test_life import gate, until
from tests.api.wire import COMPLETIONS, HELLO, Reply, Wire
from tests.fakes import FakeEngineClient, model_info
from tests.fakes import Reply as Script


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


@dataclass
class Stack:
    """A server with bounds, its engine and its clock."""

    wire: Wire
    engine: FakeEngineClient
    bounds: Bounds
    clock: Clock
    server: Server

    async def fill(self, n: int, body: dict[str, Any] | None = None, key: str | None = None, **script: Any) -> list["asyncio.Task[Reply]"]:
        """Requests that hold a slot each until the engine's gate opens."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        n_live = self.engine.n_live
        self.engine.enqueue(*(Script(**script) for _ in range(n)))
        tasks = [asyncio.create_task(self.wire.post(COMPLETIONS, body or {"prompt": "x"}, **headers)) for _ in range(n)]
        await until(lambda: self.engine.n_live == n_live + n)
        await asyncio.sleep(0.02)
        return tasks

    def is_empty(self) -> bool:
        """Whether nothing is remembered of anybody."""
        bounds = self.bounds
        return not (bounds._accounts or bounds._waiting or bounds._clients or bounds._n_bytes or bounds._n_waiting_tokens)


@asynccontextmanager
async def serving(n_slots: int = 2, **config: Any) -> AsyncIterator[Stack]:
    """A server with bounds."""
    engine = FakeEngineClient(model_info(n_slots=n_slots))
    made = ServerConfig(port=0, **config)
    server = Server(made, engine, bind(made), version="0")
    clock = Clock()
    server._front.bounds._clock = clock
    await server.start()
    async with aiohttp.ClientSession(base_url=server.urls[0], connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Stack(Wire(server.urls[0], session), engine, server._front.bounds, clock, server)
    await server.close()


def retry_after(reply: Reply) -> int:
    assert (reply.status, reply.error["code"]) in ((503, "server_overloaded"), (429, "rate_limit_exceeded"))
    return int(reply.headers["retry-after"])


@pytest.mark.parametrize("n_slots", [1, 4])
async def test_burst_of_64_from_one_address_passes_the_defaults(n_slots: int) -> None:
    async with serving(n_slots) as stack:
        tasks = await stack.fill(64, place_gate=(hold := gate()), n_prompt=500)
        assert stack.engine.n_live == 64
        hold.set()
        assert {(await task).status for task in tasks} == {200}
        await until(stack.is_empty)


async def test_full_queue_is_refused_before_its_prompt_is_looked_at() -> None:
    async with serving(n_slots=1, max_queue=2) as stack:
        tasks = await stack.fill(3, end_gate=(hold := gate()))
        n_submits = len(stack.engine.submits)
        assert retry_after(await stack.wire.chat()) == 2  # nothing has ended yet: a guess
        assert len(stack.engine.submits) == n_submits
        hold.set()
        assert [(await task).status for task in tasks] == [200] * 3


async def test_retry_after_follows_what_ended_and_how_many_must_end() -> None:
    async with serving(n_slots=1, max_queue=2) as stack:
        for _ in range(10):
            (task,) = await stack.fill(1, end_gate=(end := gate()))
            stack.clock.now += 5.0
            end.set()
            await task
            await until(stack.is_empty)
        tasks = await stack.fill(3, end_gate=(hold := gate()))
        assert retry_after(await stack.wire.chat()) == 5
        assert retry_after(await stack.wire.chat(n=3)) == 15
        hold.set()
        await asyncio.gather(*tasks)


async def test_prompt_tokens_that_wait_have_a_bound_and_the_newest_is_refused() -> None:
    async with serving(n_slots=2, max_queue_tokens=300) as stack:
        running = await stack.fill(2, n_prompt=500, end_gate=(hold := gate()))
        waiting = await stack.fill(2, n_prompt=120, place_gate=hold)
        for stream in (False, True):
            stack.engine.enqueue(Script(n_prompt=120, place_gate=hold))
            refused = await stack.wire.chat(stream=stream)
            assert retry_after(refused) >= 1
            assert refused.error["message"] == "Prompts of 240 tokens are waiting; the queue holds 300 tokens"
        waiting += await stack.fill(1, n_prompt=60, place_gate=hold)
        hold.set()
        assert {(await task).status for task in (*running, *waiting)} == {200}
        await until(stack.is_empty)


async def test_one_long_prompt_may_wait_alone() -> None:
    async with serving(n_slots=1, max_queue_tokens=300) as stack:
        running = await stack.fill(1, end_gate=(hold := gate()))
        waiting = await stack.fill(1, n_prompt=400, place_gate=hold)
        assert not waiting[0].done()
        n_submits = len(stack.engine.submits)
        assert retry_after(await stack.wire.chat()) >= 1  # the queue is full already: known without the engine
        assert len(stack.engine.submits) == n_submits
        hold.set()
        assert [(await task).status for task in (*running, *waiting)] == [200, 200]


async def test_tokens_of_a_burst_that_finds_free_slots_are_not_in_the_queue() -> None:
    async with serving(n_slots=4, max_queue_tokens=100) as stack:
        tasks = await stack.fill(4, n_prompt=400, place_gate=(hold := gate()))
        hold.set()
        assert [(await task).status for task in tasks] == [200] * 4


async def test_own_waiting_requests_have_a_bound_and_others_do_not_feel_it() -> None:
    keys = (ApiKey(secret="a", name="a"), ApiKey(secret="b", name="b"))
    async with serving(n_slots=2, max_waiting_per_client=2, file_keys=keys) as stack:
        tasks = await stack.fill(2, key="a", end_gate=(hold := gate()))
        tasks += await stack.fill(2, key="a", place_gate=hold)
        refused = await stack.wire.post(COMPLETIONS, {"prompt": "x"}, Authorization="Bearer a")
        assert (refused.status, refused.error["code"], refused.error["type"]) == (429, "rate_limit_exceeded", "requests")
        assert retry_after(refused) >= 1
        limits = {name: refused.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining")}
        assert limits == {"limit": "2", "remaining": "0"}
        assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
        tasks += await stack.fill(1, key="b", place_gate=hold)
        hold.set()
        assert [(await task).status for task in tasks] == [200] * 5
        reply = await tasks[-1]
        assert reply.headers["x-ratelimit-limit-requests"] == "2"
        assert "x-ratelimit-limit-tokens" not in reply.headers
        assert (await stack.wire.post(COMPLETIONS, {"prompt": "x", "n": 5}, Authorization="Bearer a")).error["param"] == "n"
        await until(stack.is_empty)


async def test_requests_that_find_free_slots_do_not_wait() -> None:
    async with serving(n_slots=4, max_waiting_per_client=1) as stack:
        tasks = await stack.fill(4, place_gate=(hold := gate()))
        tasks += await stack.fill(1, place_gate=hold)
        assert (await stack.wire.chat()).status == 429
        hold.set()
        assert [(await task).status for task in tasks] == [200] * 5


async def test_tokens_a_minute_are_charged_and_come_back() -> None:
    async with serving(tokens_per_minute=60) as stack:
        stack.engine.default = Script(n_prompt=50, texts=["x"] * 20)
        first = await stack.wire.chat()
        names = ("limit", "remaining", "reset")
        assert [first.headers[f"x-ratelimit-{name}-tokens"] for name in names] == ["60", "0", "1m10s"]
        refused = await stack.wire.chat()
        assert (refused.status, refused.error["code"], refused.error["type"]) == (429, "rate_limit_exceeded", "tokens")
        assert retry_after(refused) == 11
        assert "x-ratelimit-limit-requests" not in refused.headers
        stack.clock.now += 10.5
        assert retry_after(await stack.wire.chat()) == 1
        stack.clock.now += 0.5
        assert (await stack.wire.chat()).status == 200


async def test_a_prompt_is_charged_once_for_all_its_answers() -> None:
    async with serving(tokens_per_minute=1000) as stack:
        stack.engine.default = Script(n_prompt=50, texts=["x"] * 20)
        reply = await stack.wire.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2})
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) == 1000 - 2 * 50 - 4 * 20 == 1000 - reply.json["usage"]["total_tokens"]


async def test_tokens_count_while_they_come_and_a_prompt_by_its_size_until_it_is_counted() -> None:
    async with serving(tokens_per_minute=100) as stack:
        tasks = await stack.fill(1, {"prompt": "x" * 800}, accept_gate=(accept := gate()), end_gate=(hold := gate()), n_prompt=10)
        assert (await stack.wire.chat()).status == 429
        accept.set()
        await asyncio.sleep(0.02)
        assert (await stack.wire.chat()).status == 200
        hold.set()
        await asyncio.gather(*tasks)


async def test_conversation_that_will_be_cut_counts_as_no_more_than_a_slot_holds() -> None:
    async with serving(tokens_per_minute=1000) as stack:  # a slot holds 512
        stack.engine.enqueue(Script(accept_gate=(accept := gate()), n_prompt=10))
        turns = [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y" * 400}] * 50
        long = asyncio.create_task(stack.wire.chat(messages=[*turns, HELLO["messages"][0]], truncation="auto"))
        await until(lambda: stack.engine.n_live == 1)
        assert (await stack.wire.chat()).status == 200
        accept.set()
        assert (await long).status == 200


async def test_refused_request_costs_no_tokens_and_one_client_not_the_others() -> None:
    keys = (ApiKey(secret="a", name="a"), ApiKey(secret="b", name="b"))
    async with serving(tokens_per_minute=60, file_keys=keys) as stack:
        stack.engine.default = Script(n_prompt=100)
        for _ in range(3):
            assert (await stack.wire.post(COMPLETIONS, {"prompt": "x", "temperature": -1}, Authorization="Bearer a")).status == 400
        statuses = [(await stack.wire.post(COMPLETIONS, {"prompt": "x"}, Authorization=f"Bearer {key}")).status for key in "aabb"]
        assert statuses == [200, 429, 200, 429]


async def test_a_name_that_a_client_gives_itself_has_no_bounds_of_its_own() -> None:
    async with serving(tokens_per_minute=60) as stack:
        stack.engine.default = Script(n_prompt=100)
        assert (await stack.wire.chat(user="one")).status == 200
        assert (await stack.wire.chat(user="two")).status == 429


async def test_no_headers_of_limits_that_are_not_set(wire: Wire) -> None:
    assert [name for name in (await wire.chat()).headers if name.startswith("x-ratelimit")] == []


async def test_clients_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.api.bounds._SWEEP_AT_LEAST", 8)
    async with serving(tokens_per_minute=1000, trusted_proxies=("127.0.0.1",)) as stack:
        stack.bounds._sweep_at = 8
        for index in range(40):
            await stack.wire.post(COMPLETIONS, {"prompt": "x"}, X_Forwarded_For=f"203.0.113.{index}")
            stack.clock.now += 30
        assert len(stack.bounds._accounts) <= 9
        stack.clock.now += 3600


@pytest.mark.parametrize("stage", ["accept_gate", "place_gate", "text_gate", "end_gate"])
async def test_nothing_is_counted_of_a_client_that_left(stage: str) -> None:
    async with serving(max_waiting_per_client=9) as stack:
        stack.engine.default = Script(**{stage: gate()})  # type: ignore[arg-type]
        streams = [await stack.wire.start(HELLO | {"stream": stream, "n": 2}) for stream in (False, True)]
        await until(lambda: stack.engine.n_live == 4)
        await asyncio.sleep(0.02)
        for _, writer in streams:
            writer.transport.abort()
        await until(stack.is_empty)


async def test_engine_that_ends_puts_its_requests_back_into_the_queue() -> None:
    async with serving() as stack:
        stack.engine.enqueue(Script(dies_after=1))
        assert (await stack.wire.chat()).status == 200
        await until(stack.is_empty)


@pytest.mark.parametrize("config", [{"max_waiting_per_client": 1}, {"tokens_per_minute": 1}])
async def test_official_client_raises_a_rate_limit_error(config: dict[str, int]) -> None:
    async with serving(n_slots=1, **config) as stack:
        hold = gate()
        tasks = await stack.fill(1, end_gate=hold)
        if "max_waiting_per_client" in config:
            tasks += await stack.fill(1, place_gate=hold)
        async with openai.AsyncOpenAI(base_url=f"{stack.wire.url}/v1", api_key="none", max_retries=0, timeout=5) as client:
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}])
        assert caught.value.code == "rate_limit_exceeded"
        assert caught.value.type == ("requests" if "max_waiting_per_client" in config else "tokens")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        hold.set()
        await asyncio.gather(*tasks)
