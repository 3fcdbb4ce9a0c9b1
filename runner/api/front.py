"""What all handlers of one server share: the engine's client, the metrics, the live calls, and whether new ones are taken."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import hdrs, web

from runner.api.access import REQUEST_ID_HEADER, AccessEntry
from runner.api.bounds import Bounds
from runner.api.call import Call
from runner.api.deadlines import Deadlines
from runner.api.domains import Domains
from runner.api.identity import Client, Identities
from runner.api.metrics import Metrics
from runner.api.notices import Notices
from runner.api.parameters import Generation
from runner.config import ServerConfig
from runner.engine.order import Tier
from runner.errors import Draining, EngineStopped, Loading, RunnerError
from runner.serving.client import EngineClient, EngineState
from runner.serving.protocol import ModelInfo

APP_NAME: Final = "slotfile"
LOADING_RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class LiveCall:
    """A call that the engine has not finished with, and whose it is. `began_at`: when its HTTP request came."""

    call: Call
    request_id: str
    client: str
    tier: Tier
    began_at: float


class Front:
    """The state behind the routes of one server. Belongs to the event loop's thread."""

    def __init__(self, config: ServerConfig, client: EngineClient, version: str) -> None:
        self.config = config
        self.client = client
        self.version = version
        self.metrics = Metrics(client)
        self.bounds = Bounds(config, client)
        self.notices = Notices(client, self.bounds.wait_s)
        self.identities = Identities.of(config)
        self.domains = Domains(config)
        self.started_at = int(time.time())
        self.on_request: Callable[[web.BaseRequest], None] = lambda request: None
        self.is_draining = False
        self._calls: dict[Call, LiveCall] = {}
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

    @property
    def live(self) -> list[LiveCall]:
        """Those calls in order of arrival, without the ones that have failed and of which the engine only has to hear."""
        return [live for live in self._calls.values() if live.call.error is None]

    def visible_to(self, client: Client) -> list[LiveCall]:
        """Those that a client may see and touch: with keys its own, an admin all; without keys everybody all."""
        return [live for live in self.live if self.shows_all_to(client) or live.client == client.name]

    def shows_all_to(self, client: Client) -> bool:
        """Whether a client sees the requests of others, and whose they are."""
        return client.is_admin or not self.config.keys

    def headers(self, request_id: str) -> dict[str, str]:
        """What stands on every answer."""
        return {hdrs.SERVER: f"{APP_NAME}/{self.version}", "X-Content-Type-Options": "nosniff", REQUEST_ID_HEADER: request_id}

    def model(self) -> ModelInfo:
        """The loaded model. Raises Loading until there is one, EngineStopped once the engine is given up."""
        if self.client.state in (EngineState.FAILED, EngineState.CLOSED):
            raise EngineStopped("The engine has ended; this server is going down")
        if self.client.info is None:
            percent = round(self.client.load_fraction * 100)
            raise Loading(f"The model is being loaded ({percent} %)", retry_after_s=LOADING_RETRY_S)
        return self.client.info

    def start(self, generation: Generation, entry: AccessEntry, deadlines: Deadlines) -> Call:
        """Hand a generation to the engine. Raises Draining and what `Bounds.admit` raises; later errors come out of the call."""
        if self.is_draining:
            raise Draining("The server is going down and takes no new requests")
        self.bounds.admit(generation, self.model().n_slots)
        call = Call(self.client, self.metrics.choice_over, self.bounds.changed, deadlines)
        entry.call = call
        self._calls[call] = LiveCall(call, entry.request_id, generation.owner.client, generation.tier, entry.started_at)
        self._is_idle.clear()
        # The number makes an id unique that a client may use twice; the engine's log shows both.
        ids = [f"{entry.request_id}#{next(self._numbers)}" for _ in range(generation.n_choices)]
        call.start([generation.submit(choice, request_id) for choice, request_id in enumerate(ids)])
        self.bounds.began(call, generation)
        call.when_over(lambda: self._forget(call, generation))
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

    def _forget(self, call: Call, generation: Generation) -> None:
        del self._calls[call]
        self.bounds.over(call, generation)
        if not self._calls:
            self._is_idle.set()
