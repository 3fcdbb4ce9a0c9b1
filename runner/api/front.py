"""What all handlers of one server share: the engine's client, the metrics, the live calls, and whether new ones are taken."""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Final

from aiohttp import web

from runner.api.access import AccessEntry
from runner.api.call import Call
from runner.api.metrics import Metrics
from runner.api.parameters import Generation
from runner.config import ServerConfig
from runner.errors import Draining, EngineStopped, InvalidRequest, Loading, Overloaded, RunnerError
from runner.serving.client import EngineClient, EngineState
from runner.serving.protocol import ModelInfo

APP_NAME: Final = "slotfile"
LOADING_RETRY_S: Final = 1.0
OVERLOAD_RETRY_S: Final = 2.0
# Prompts are kept until their request ends: it may have to be given to another engine.
MAX_LIVE_BYTES: Final = 64 * 1024 * 1024


class Front:
    """The state behind the routes of one server. Belongs to the event loop's thread."""

    def __init__(self, config: ServerConfig, client: EngineClient, version: str) -> None:
        self.config = config
        self.client = client
        self.version = version
        self.metrics = Metrics(client)
        self.started_at = int(time.time())
        self.on_request: Callable[[web.BaseRequest], None] = lambda request: None
        self.is_draining = False
        self._calls: set[Call] = set()
        self._n_live_bytes = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._numbers = itertools.count(1)

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: which program answered."""
        return f"{APP_NAME}-{self.version}"

    @property
    def n_calls(self) -> int:
        """Calls that the engine has not finished with."""
        return len(self._calls)

    def model(self) -> ModelInfo:
        """The loaded model. Raises Loading until there is one, EngineStopped once the engine is given up."""
        if self.client.state in (EngineState.FAILED, EngineState.CLOSED):
            raise EngineStopped("The engine has ended; this server is going down")
        if self.client.info is None:
            percent = round(self.client.load_fraction * 100)
            raise Loading(f"The model is being loaded ({percent} %)", retry_after_s=LOADING_RETRY_S)
        return self.client.info

    def start(self, generation: Generation, entry: AccessEntry) -> Call:
        """Hand a generation to the engine. Raises Draining, Overloaded; later errors come out of the call."""
        self._admit(generation)
        call = Call(self.client, self.metrics.choice_over)
        entry.call = call
        self._calls.add(call)
        self._is_idle.clear()
        # The number makes an id unique that a client may use twice; the engine's log shows both.
        ids = [f"{entry.request_id}#{next(self._numbers)}" for _ in range(generation.n_choices)]
        call.start([generation.submit(choice, request_id) for choice, request_id in enumerate(ids)])
        self._n_live_bytes += generation.n_bytes * generation.n
        call.when_over(lambda: self._forget(call, generation.n_bytes * generation.n))
        return call

    async def idle(self, timeout_s: float) -> bool:
        """Wait until the engine has finished all calls; False where that takes longer than `timeout_s`."""
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def fail_all(self, error: RunnerError) -> None:
        """End every live call with an error."""
        for call in list(self._calls):
            call.fail(error)

    def _admit(self, generation: Generation) -> None:
        """Keep the queue bounded, in requests and in bytes: whoever is beyond it hears so at once."""
        if self.is_draining:
            raise Draining("The server is going down and takes no new requests")
        n_new, n_slots, max_queue = generation.n_choices, self.model().n_slots, self.config.max_queue
        if n_new > n_slots + max_queue:
            param = "n" if generation.n > 1 else "prompt"
            raise InvalidRequest(f"This request asks for {n_new} answers; slots and queue hold {n_slots + max_queue}", param=param)
        n_waiting = max(0, self.client.n_live - n_slots)
        if self.client.n_live + n_new > n_slots + max_queue:
            raise Overloaded(f"{n_waiting} requests are waiting; the queue holds {max_queue}", retry_after_s=OVERLOAD_RETRY_S)
        n_bytes = self._n_live_bytes + generation.n_bytes * generation.n
        if self._n_live_bytes and n_bytes > MAX_LIVE_BYTES:
            text = f"All prompts together would have {n_bytes:,} bytes; the limit is {MAX_LIVE_BYTES:,}"
            raise Overloaded(text, retry_after_s=OVERLOAD_RETRY_S)

    def _forget(self, call: Call, n_bytes: int) -> None:
        self._calls.discard(call)
        self._n_live_bytes -= n_bytes
        if not self._calls:
            self._is_idle.set()
