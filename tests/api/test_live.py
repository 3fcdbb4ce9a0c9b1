"""Who is here and how they stand, for whom it is to know; and taking a request back."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from runner.api.app import ROUTES
from runner.api.server import Server, bind
from runner.config import ApiKey, ServerConfig
from runner.serving.protocol import Counters, SlotState, Snapshot
from tests.api.test_life import gate, until
from tests.api.test_status import metrics
from tests.api.wire import CHAT, COMPLETIONS, Wire
from tests.api.wire import Reply as Answer
from tests.fakes import FakeEngineClient, Reply

SECRET = "a-text-that-nobody-may-see"
KEYS = (
    ApiKey(secret="ka", name="anna"),
    ApiKey(secret="kb", name="ben", best_tier="low"),
    ApiKey(secret="kr", name="root", is_admin=True),
)


class Crowd:
    """A server with keys and those who use it."""

    def __init__(self, wire: Wire, engine: FakeEngineClient) -> None:
        self.wire, self.engine = wire, engine

    async def ask(self, key: str, request_id: str, *, stream: bool = False, n: int = 1, **script: Any) -> "asyncio.Task[Answer]":
        """A request that has reached the engine and goes as far as its script lets it."""
        self.engine.enqueue(*(Reply(**script) for _ in range(n)))
        n_live = self.engine.n_live
        body = {"prompt": SECRET, "stream": stream, "n": n}
        task = asyncio.create_task(self.wire.post(COMPLETIONS, body, Authorization=f"Bearer {key}", X_Request_Id=request_id))
        await until(lambda: self.engine.n_live == n_live + n)
        await asyncio.sleep(0.02)
        return task

    async def get(self, path: str, key: str) -> Any:
        """A GET's answer."""
        reply = await self.wire.get(path, Authorization=f"Bearer {key}")
        assert reply.status == 200
        assert SECRET not in reply.body.decode()
        return reply.json

    async def requests(self, key: str) -> list[dict[str, Any]]:
        """The live requests that a key sees, without their ages."""
        rows: list[dict[str, Any]] = (await self.get("/v1/requests", key))["data"]
        assert all(0 <= row.pop("age_s") < 60 for row in rows)
        return rows

    async def delete(self, request_id: str, key: str) -> Answer:
        """Take a request back."""
        return await self.wire.send("DELETE", f"/v1/requests/{request_id}", headers={"Authorization": f"Bearer {key}"})


@asynccontextmanager
async def serving(*keys: ApiKey) -> AsyncIterator[Crowd]:
    """A server with these keys."""
    engine, config = FakeEngineClient(), ServerConfig(port=0, file_keys=keys)
    server = Server(config, engine, bind(config), version="0")
    await server.start()
    async with aiohttp.ClientSession(base_url=server.urls[0], connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Crowd(Wire(server.urls[0], session), engine)
    await server.close()


@pytest.fixture
async def crowd() -> AsyncIterator[Crowd]:
    """A server with three keys."""
    async with serving(*KEYS) as crowd:
        yield crowd


def row(request_id: str, state: str, **fields: Any) -> dict[str, Any]:
    """One row of /v1/requests."""
    plain = {"tier": "normal", "n_prompt": 7, "n_cached": 0, "n_generated": 0, "place": None, "estimated_wait_s": None}
    plain |= {"slot_id": None}
    return {"id": request_id, "state": state} | plain | fields


async def four_states(crowd: Crowd) -> "list[asyncio.Task[Answer]]":
    """One sequence in each state, as the snapshot has it: anna's decode, prefill and parked, ben's queued."""
    tasks = [
        await crowd.ask("ka", "decode", end_gate=gate(), stream=True),
        await crowd.ask("ka", "prefill", text_gate=gate()),
        await crowd.ask("ka", "parked", texts=["one"], end_gate=gate(), stream=True),
        await crowd.ask("kb", "queued", place_gate=gate()),
    ]
    slots = [SlotState(0, "decode", "decode#1", 10, 7, 3, 3), SlotState(1, "prefill", "prefill#2", 5, 7, 2, 0)]
    crowd.engine.tell(Snapshot(slots, 2, Counters(), 0.1, n_parked=1, queue=["queued#4", "parked#3"]))
    return tasks


async def test_live_requests_have_state_place_and_counts_and_each_key_sees_its_own(crowd: Crowd) -> None:
    tasks = await four_states(crowd)
    of_anna = [
        row("decode#1", "decode", n_cached=3, n_generated=3, slot_id=0),
        row("prefill#2", "prefill", n_cached=2, slot_id=1),
        row("parked#3", "parked", n_generated=1, place=2),
    ]
    of_ben = row("queued#4", "queued", tier="low", place=1)
    assert await crowd.requests("ka") == of_anna
    assert await crowd.requests("kb") == [of_ben]
    assert await crowd.requests("kr") == [*({**each, "client": "anna"} for each in of_anna), {**of_ben, "client": "ben"}]
    for task in tasks:
        task.cancel()
    await until(lambda: crowd.engine.n_live == 0)
    assert await crowd.requests("kr") == []


async def test_queue_is_the_whole_picture_and_names_clients_to_an_admin_alone(crowd: Crowd) -> None:
    await four_states(crowd)
    picture: dict[str, Any] = {
        "n_slots": 4,
        "n_ctx_slot": 512,
        "slots": (await crowd.get("/slots", "kr"))["slots"],
        "n_waiting": 2,
        "n_parked": 1,
        "mean_wait_s": None,
        "tiers": {
            "high": {"n_running": 0, "n_waiting": 0},
            "normal": {"n_running": 2, "n_waiting": 1},
            "low": {"n_running": 0, "n_waiting": 1},
            "batch": {"n_running": 0, "n_waiting": 0},
        },
    }
    clients = {"anna": {"n_running": 2, "n_waiting": 1}, "ben": {"n_running": 0, "n_waiting": 1}}
    unnamed = [slot | {"request_id": None} for slot in picture["slots"]]
    assert await crowd.get("/v1/queue", "kb") == picture | {"slots": unnamed}
    assert await crowd.get("/v1/queue", "kr") == picture | {"clients": clients}


async def test_slots_name_the_requests_of_the_caller_alone(crowd: Crowd) -> None:
    await crowd.ask("ka", "hers", end_gate=gate())
    await crowd.ask("kb", "his", end_gate=gate())
    slots = [
        SlotState(0, "decode", "hers#1", 10, 7, 3, 3),
        SlotState(1, "prefill", "his#2", 5, 7, 2, 0),
        SlotState(2, "idle", "", 9, 0, 0, 0),
    ]
    crowd.engine.tell(Snapshot(slots, 0, Counters(), 0.1))
    seen = {"ka": ["hers#1", None, None], "kb": [None, "his#2", None], "kr": ["hers#1", "his#2", None]}
    for key, ids in seen.items():
        for path in ("/slots", "/v1/queue"):
            shown = (await crowd.get(path, key))["slots"]
            assert [slot["request_id"] for slot in shown] == ids
            assert [slot["n_cells"] for slot in shown] == [10, 5, 9]


ROUTES_OF_STATUS = [route.path.replace("{id:.+}", "fake-model") for route in ROUTES if route.method == "GET"]


@pytest.mark.parametrize("path", ROUTES_OF_STATUS)
async def test_no_route_tells_a_key_of_the_requests_of_another(crowd: Crowd, path: str) -> None:
    tasks = await four_states(crowd)
    reply = await crowd.wire.get(path, Authorization="Bearer kb")
    assert reply.status == 200
    assert not [name for name in ("decode#1", "prefill#2", "parked#3", "anna") if name in reply.body.decode()]
    for task in tasks:
        task.cancel()


async def test_nobody_is_no_queue() -> None:
    async with serving() as crowd:
        queue = await crowd.get("/v1/queue", "")
        assert (queue["n_waiting"], queue["mean_wait_s"], queue["clients"], len(queue["slots"])) == (0, 0.0, {}, 4)


async def test_without_keys_everybody_sees_and_touches_all() -> None:
    async with serving() as crowd:
        task = await crowd.ask("", "mine", place_gate=gate())
        (found,) = await crowd.requests("")
        assert found == row("mine#1", "queued", client=crowd.wire.host)
        assert (await crowd.get("/v1/queue", ""))["clients"] == {crowd.wire.host: {"n_running": 0, "n_waiting": 1}}
        assert (await crowd.delete("mine", "")).status == 200
        assert (await task).status == 499


async def test_request_that_got_its_slot_since_the_last_snapshot_is_not_taken_for_parked(crowd: Crowd) -> None:
    placed = gate()
    await crowd.ask("ka", "a", place_gate=placed, text_gate=gate())
    crowd.engine.tell(Snapshot([], 1, Counters(), 0.1, queue=["a#1"]))
    placed.set()
    await asyncio.sleep(0.02)
    assert [each["state"] for each in await crowd.requests("ka")] == ["prefill"]
    crowd.engine.tell(Snapshot([], 1, Counters(), 0.1))
    assert [each["state"] for each in await crowd.requests("ka")] == ["parked"]


@pytest.mark.parametrize("stage", ["accept_gate", "place_gate", "text_gate", "end_gate"])
async def test_cancelled_whole_answer_is_a_499_at_any_stage(crowd: Crowd, stage: str) -> None:
    script: dict[str, Any] = {stage: gate()}
    task = await crowd.ask("ka", "mine", n=2, **script)
    reply = await crowd.delete("mine", "ka")
    assert reply.status == 200
    assert [each["id"] for each in reply.json["cancelled"]] == ["mine#1", "mine#2"]
    answer = await task
    assert (answer.status, answer.error["code"], answer.error["message"]) == (499, "request_cancelled", "The request was cancelled")
    await until(lambda: crowd.engine.n_live == 0)
    assert sorted(crowd.engine.cancelled) == ["mine#1", "mine#2"]
    assert (await crowd.delete("mine", "ka")).status == 404


@pytest.mark.parametrize("stage", ["place_gate", "text_gate", "end_gate"])
async def test_cancelled_stream_ends_with_an_error_event_and_no_done(crowd: Crowd, stage: str) -> None:
    script: dict[str, Any] = {stage: gate()}
    task = await crowd.ask("ka", "mine", stream=True, **script)
    assert (await crowd.delete("mine%231", "ka")).status == 200
    answer = await task
    assert answer.status == 200
    assert json.loads(answer.events[-1])["error"]["code"] == "request_cancelled"
    assert "[DONE]" not in answer.events
    assert crowd.engine.cancelled == ["mine#1"]


async def test_cancelled_in_the_queue_touches_nothing_else(crowd: Crowd) -> None:
    end, placed = gate(), gate()
    running = [await crowd.ask(key, f"running-{key}", stream=True, end_gate=end) for key in ("ka", "kb")]
    queued = [await crowd.ask("ka", f"queued-{index}", stream=index % 2 == 0, place_gate=placed) for index in range(4)]
    gone = queued.pop(1)
    assert (await crowd.delete("queued-1", "ka")).status == 200
    assert (await gone).status == 499
    assert not any(task.done() for task in (*running, *queued))
    placed.set()
    end.set()
    for task in (*running, *queued):
        reply = await task
        assert reply.status == 200
        assert b"Hello" in reply.body
        assert b"error" not in reply.body
    assert crowd.engine.cancelled == ["queued-1#4"]
    found = await metrics_of(crowd)
    assert found['slotfile_request_failure_total{code="request_cancelled"}'] == 1
    assert found['slotfile_request_success_total{finished_reason="stop"}'] == 5


async def metrics_of(crowd: Crowd) -> dict[str, float]:
    """As an admin."""

    class Known(Wire):
        async def get(self, path: str, **headers: str) -> Answer:
            return await super().get(path, Authorization="Bearer kr", **headers)

    return await metrics(Known(crowd.wire.url, crowd.wire._session))


async def test_request_that_was_cancelled_is_gone_at_once(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    task = await crowd.ask("ka", "mine", end_gate=gate())
    with monkeypatch.context() as patched:
        patched.setattr(crowd.engine, "cancel", lambda request_id: None)  # the engine is in the middle of a step
        assert (await crowd.delete("mine", "ka")).status == 200
        assert (await task).status == 499
        assert (await crowd.delete("mine", "ka")).status == 404
        assert await crowd.requests("ka") == []
    crowd.engine.cancel("mine#1")


async def test_another_keys_request_is_as_unknown_as_none(crowd: Crowd) -> None:
    task = await crowd.ask("ka", "hers", end_gate=gate())
    replies = [await crowd.delete(request_id, "kb") for request_id in ("hers", "hers%231", "none")]
    assert [reply.status for reply in replies] == [404] * 3
    texts = [reply.error["message"].replace(name, "ID") for reply, name in zip(replies, ("hers", "hers#1", "none"), strict=True)]
    assert texts == ["There is no live request 'ID'"] * 3
    assert [reply.error["code"] for reply in replies] == ["not_found"] * 3
    assert not task.done()
    assert not crowd.engine.cancelled
    assert (await crowd.delete("hers%231", "kr")).status == 200
    assert (await task).status == 499


async def test_same_id_of_two_clients_is_each_ones_own(crowd: Crowd) -> None:
    hold = gate()
    hers, his = [await crowd.ask(key, "same", end_gate=hold) for key in ("ka", "kb")]
    assert [each["id"] for each in (await crowd.delete("same", "ka")).json["cancelled"]] == ["same#1"]
    assert (await hers).status == 499
    hold.set()
    assert (await his).status == 200


@pytest.mark.parametrize("request_id", ["a/b", "a#1", "100%", "?x=1", "..", "a//b"])
async def test_any_id_that_a_request_may_have_can_be_named(crowd: Crowd, request_id: str) -> None:
    task = await crowd.ask("ka", request_id, end_gate=gate())
    named = "".join(f"%{byte:02X}" for byte in request_id.encode())
    reader, writer = await crowd.wire.open()
    head = f"DELETE /v1/requests/{named} HTTP/1.1\r\nHost: {crowd.wire.host}:{crowd.wire.port}\r\nAuthorization: Bearer ka\r\n\r\n"
    writer.write(head.encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 200"), request_id
    writer.transport.abort()
    assert (await task).status == 499


async def test_page_of_another_origin_cancels_nothing(crowd: Crowd) -> None:
    task = await crowd.ask("ka", "mine", end_gate=gate())
    headers = {"Authorization": "Bearer ka", "Origin": "https://evil.example"}
    assert (await crowd.wire.send("DELETE", "/v1/requests/mine", headers=headers)).status == 403
    assert not task.done()
    assert (await crowd.wire.send("DELETE", CHAT, headers={"Authorization": "Bearer ka"})).status == 405
    task.cancel()
