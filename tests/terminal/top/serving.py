"""A server with keys, a fake engine and some that use it, in a process of its own. Run by `test_pty.py` and `test_server.py`.

python -m tests.terminal.top.serving PORT [N_WAITING]
"""

import asyncio
import itertools
import sys

import aiohttp

from runner.api.server import Server, bind
from runner.config import ApiKey, ServerConfig
from runner.serving.protocol import Counters, SlotState, Snapshot
from tests.api.test_life import until
from tests.fakes import FakeEngineClient, Reply

KEYS = (ApiKey(secret="ka", name="anna"), ApiKey(secret="kb", name="ben"), ApiKey(secret="kr", name="root", is_admin=True))


async def ask(session: aiohttp.ClientSession, key: str, request_id: str) -> None:
    """One request that goes on for as long as this process does."""
    headers = {"Authorization": f"Bearer {key}", "X-Request-Id": request_id}
    async with session.post("/v1/completions", json={"prompt": "Hi", "stream": True}, headers=headers) as response:
        await response.read()


async def main(port: int, n_waiting: int) -> None:
    """Two of anna's that run, and so many of ben's that wait."""
    engine, config = FakeEngineClient(), ServerConfig(port=port, file_keys=KEYS, max_queue=10_000)
    server = Server(config, engine, bind(config), version="0")
    await server.start()
    never = asyncio.Event()
    async with aiohttp.ClientSession(base_url=server.urls[0], connector=aiohttp.TCPConnector(limit=0)) as session:
        asking = []
        for request_id in ("running-1", "running-2"):
            engine.enqueue(Reply(["one"], end_gate=never))
            asking.append(asyncio.create_task(ask(session, "ka", request_id)))
        for n in range(n_waiting):
            engine.enqueue(Reply(place_gate=never))
            asking.append(asyncio.create_task(ask(session, "kb", f"waiting-{n}")))
        await until(lambda: engine.n_live == n_waiting + 2)
        ids = [submit.request_id for submit in engine.submits]
        for step in itertools.count(1):
            slots = [SlotState(slot_id, "decode", ids[slot_id], 7 + step % 400, 7, 3, step) for slot_id in range(2)]
            counters = Counters(n_decode_rows=2 * step, n_prompt_rows=14)
            engine.tell(Snapshot([*slots, SlotState(2, "idle", "", 0, 0, 0, 0)], n_waiting, counters, 60.0, queue=ids[2:]))
            if step == 1:
                print(server.urls[0], flush=True)
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2))
