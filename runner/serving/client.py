"""The front's side of the engine: starts its process, keeps every request until its first token, starts it again when it ends.

LOADING -> READY -> RESTARTING -> READY ...           any -> CLOSED
             (three failures at load in a row, or one that no retry can mend)  -> FAILED
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from runner.config import EngineConfig
from runner.errors import EngineCrashed, EngineStopped, ModelError, RequestCancelled, RunnerError, error_for_code
from runner.serving.child import EngineChild
from runner.serving.protocol import (
    Accepted,
    Cancel,
    Failed,
    Finished,
    FromEngine,
    LoadFailed,
    LoadProgress,
    ModelInfo,
    Ready,
    Refused,
    Snapshot,
    Stamps,
    StepEvents,
    Submit,
)

log = logging.getLogger("slotfile.engine")

RESTART_DELAYS_S: Final = (0.0, 1.0, 5.0, 30.0)
# An engine that served this long has proved itself: the next end starts the delays anew.
PROVEN_AFTER_S: Final = 60.0
MAX_LOAD_FAILURES: Final = 3
MAX_DEATHS: Final = 2
WATCHDOG_EVERY_S: Final = 1.0
WATCHDOG_MIN_S: Final = 30.0
WATCHDOG_FACTOR: Final = 10.0
CLOSE_WITHIN_S: Final = 1.0


class EngineState(StrEnum):
    """Where the engine is in its life. READY is the only state that computes; LOADING and RESTARTING queue."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


class Sink(Protocol):
    """Who receives one request's events, on the event loop, straight from the pipe. No method may block or raise."""

    def on_accepted(self, n_prompt: int) -> None:
        """The prompt fits; may come again after an engine restart (then nothing had been sent)."""

    def on_text(self, text: str, n_tokens: int) -> None:
        """Text became complete; `text` may be empty while it is held back."""

    def on_finished(self, finished: Finished) -> None:
        """The end. Called once, or `on_failed` is."""

    def on_failed(self, error: RunnerError) -> None:
        """The end by a refusal (InvalidRequest and its kind, before `on_accepted`) or a fault."""


@dataclass(slots=True, eq=False)
class _Live:
    """One request that has not ended. `is_placed`: the present engine computes it; `has_sent`: its client has seen text."""

    submit: Submit
    sink: Sink
    is_with_engine: bool = False
    is_placed: bool = False
    is_cancelled: bool = False
    has_sent: bool = False
    n_deaths: int = 0


class EngineClient:
    """One engine process and the requests that are with it. All methods belong to the event loop's thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.state = EngineState.LOADING
        self.info: ModelInfo | None = None
        self.snapshot: Snapshot | None = None
        self.load_fraction = 0.0
        self.n_restarts = 0
        self._config = config
        self._live: dict[str, _Live] = {}
        self._child: EngineChild | None = None
        self._n_load_failures = 0
        self._n_early_deaths = 0
        self._ready_at = 0.0
        self._heard_at = 0.0
        self._last_words = ""
        self._load_error: ModelError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The engine process, while there is one."""
        return self._child.pid if self._child else None

    @property
    def n_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    async def start(self) -> None:
        """Start the engine process; returns at once, the model loads meanwhile."""
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ModelInfo] = loop.create_future()
        self._failed: asyncio.Future[RunnerError] = loop.create_future()
        await self._spawn()
        self._keep(self._watch())

    async def wait_ready(self) -> ModelInfo:
        """Wait until the model is loaded. Raises ModelError when it cannot be."""
        return await asyncio.shield(self._ready)

    async def wait_failed(self) -> RunnerError:
        """Wait until the engine is given up (three failures at load): the program ends with this error."""
        return await asyncio.shield(self._failed)

    def submit(self, submit: Submit, sink: Sink) -> None:
        """Hand a request over. Raises EngineStopped where the engine is given up or closed, ValueError on a live id used twice."""
        if self.state in (EngineState.FAILED, EngineState.CLOSED):
            raise EngineStopped("The engine has ended and is not started again")
        if submit.request_id in self._live:
            raise ValueError(f"request id {submit.request_id!r} is live already")
        live = self._live[submit.request_id] = _Live(submit, sink)
        if self.state is EngineState.READY:
            self._hand_over(live)

    def cancel(self, request_id: str) -> None:
        """End a request; its sink gets `on_finished` with reason `cancelled`. Unknown ids are ignored."""
        live = self._live.get(request_id)
        if live is None or live.is_cancelled:
            return
        live.is_cancelled = True
        if live.is_with_engine and self._child is not None:
            self._child.send(Cancel(request_id))
        else:
            self._finish(_cancelled(request_id))

    async def close(self) -> None:
        """End the engine process, within a second; live requests get EngineStopped."""
        if self.state is EngineState.CLOSED:
            return
        self.state = EngineState.CLOSED
        for task in self._tasks:
            task.cancel()
        self._fail_all(EngineStopped("The server is shutting down"))
        for future in (self._ready, self._failed):
            future.cancel()
        if self._child is not None:
            await self._child.end(CLOSE_WITHIN_S)

    # -- what the child says -------------------------------------------------------------------------------------------

    def on_message(self, message: FromEngine) -> None:
        """Take one message of the engine (called by the child's protocol)."""
        self._heard_at = asyncio.get_running_loop().time()
        match message:
            case StepEvents():
                self._on_step(message)
            case Accepted(request_id, n_prompt):
                if (live := self._live.get(request_id)) is not None:
                    self._tell(live, lambda: live.sink.on_accepted(n_prompt))
            case Refused(request_id, code, text, param):
                self._on_refused(request_id, error_for_code(code, text, param))
            case LoadProgress(fraction):
                self.load_fraction = fraction
            case Ready(info):
                self._on_ready(info)
            case LoadFailed(text, is_final):
                self._load_error = ModelError(text)
                self._n_load_failures = MAX_LOAD_FAILURES if is_final else self._n_load_failures

    def on_line(self, line: str) -> None:
        """Take one line of the engine's standard error."""
        self._last_words = line or self._last_words
        log.warning("%s", line)

    def on_exit(self, returncode: int | None) -> None:
        """The engine process has ended."""
        self._child = None
        if self.state is EngineState.CLOSED:
            return
        was_ready = self.state is EngineState.READY
        if was_ready:
            log.error("the engine ended with %s while %d requests were with it", _ending(returncode), len(self._live))
            served_s = asyncio.get_running_loop().time() - self._ready_at
            self._n_early_deaths = self._n_early_deaths + 1 if served_s < PROVEN_AFTER_S else 1
        else:
            self._n_load_failures += 1
            self._n_early_deaths += 1
        self.state = EngineState.RESTARTING if self.info is not None else EngineState.LOADING
        self._sort_out_the_dead()
        if self._n_load_failures >= MAX_LOAD_FAILURES:
            self._give_up(returncode)
        else:
            self.n_restarts += 1
            self._keep(self._restart(RESTART_DELAYS_S[min(self._n_early_deaths - 1, len(RESTART_DELAYS_S) - 1)]))

    def _on_ready(self, info: ModelInfo) -> None:
        self.state = EngineState.READY
        self.info = info
        self.load_fraction = 1.0
        self._n_load_failures = 0
        self._ready_at = asyncio.get_running_loop().time()
        if not self._ready.done():
            self._ready.set_result(info)
        for live in list(self._live.values()):
            self._hand_over(live)

    def _on_step(self, events: StepEvents) -> None:
        if events.snapshot is not None:
            self.snapshot = events.snapshot
        for request_id in events.placed:
            if (live := self._live.get(request_id)) is not None:
                live.is_placed = True
        for delta in events.deltas:
            if (live := self._live.get(delta.request_id)) is not None:
                live.has_sent = True
                try:
                    live.sink.on_text(delta.text, delta.n_tokens)
                except Exception:  # noqa: BLE001 - one client's connection must not take the others' events down
                    self._drop(live)
        for finished in events.finished:
            self._finish(finished)
        for failed in events.failed:
            self._on_failed(failed)

    def _on_refused(self, request_id: str, error: RunnerError) -> None:
        if isinstance(error, RequestCancelled):
            self._finish(_cancelled(request_id))
        elif (live := self._live.pop(request_id, None)) is not None:
            self._tell(live, lambda: live.sink.on_failed(error))

    def _on_failed(self, failed: Failed) -> None:
        if (live := self._live.pop(failed.request_id, None)) is not None:
            self._tell(live, lambda: live.sink.on_failed(error_for_code(failed.code, failed.message, None)))

    def _finish(self, finished: Finished) -> None:
        if (live := self._live.pop(finished.request_id, None)) is not None:
            self._tell(live, lambda: live.sink.on_finished(finished))

    # -- starting, ending, starting again ------------------------------------------------------------------------------

    async def _spawn(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        self._child = await EngineChild.start(self._config, self)

    async def _restart(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self._spawn()

    def _hand_over(self, live: _Live) -> None:
        assert self._child is not None
        live.is_with_engine = True
        self._child.send(live.submit)

    def _sort_out_the_dead(self) -> None:
        """Who had text ends with an error; who had none stays, in the old order, unless it ran at two deaths."""
        with_engine = [live for live in self._live.values() if live.is_with_engine]
        # The word that a request was placed may have died with the engine: then any of them can have been the one.
        suspects = [live for live in with_engine if live.is_placed] or with_engine
        for live in suspects:
            live.n_deaths += 1
        for live in with_engine:
            live.is_with_engine = live.is_placed = False
            if live.is_cancelled:
                self._finish(_cancelled(live.submit.request_id))
            elif live.has_sent:
                self._end(live, EngineStopped("The engine ended while this request was being answered; the answer is incomplete"))
            elif live.n_deaths >= MAX_DEATHS:
                self._end(live, EngineCrashed("The engine ended twice while it ran this request; it is not tried again"))

    def _give_up(self, returncode: int | None) -> None:
        self.state = EngineState.FAILED
        words = f": {self._last_words}" if self._last_words else ""
        error = self._load_error or ModelError(f"The engine ended with {_ending(returncode)} while it loaded the model{words}")
        self._fail_all(EngineStopped("The engine could not be started"))
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # retrieved: nobody has to be waiting
        if not self._failed.done():
            self._failed.set_result(error)

    async def _watch(self) -> None:
        """End an engine that has been silent for far longer than any step takes while it has requests."""
        while True:
            await asyncio.sleep(WATCHDOG_EVERY_S)
            if self._child is None or self.state is not EngineState.READY or not any(live.is_placed for live in self._live.values()):
                continue
            step_s = self.snapshot.longest_step_s if self.snapshot else 0.0
            limit_s = max(WATCHDOG_MIN_S, WATCHDOG_FACTOR * step_s)
            if asyncio.get_running_loop().time() - self._heard_at > limit_s:
                log.error("the engine has been silent for %.0f s and is ended", limit_s)
                self._child.kill()

    # -- small things --------------------------------------------------------------------------------------------------

    def _tell(self, live: _Live, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            log.exception("a sink failed for request %s", live.submit.request_id)

    def _drop(self, live: _Live) -> None:
        log.exception("a sink failed for request %s: it is cancelled", live.submit.request_id)
        self.cancel(live.submit.request_id)

    def _end(self, live: _Live, error: RunnerError) -> None:
        self._live.pop(live.submit.request_id, None)
        self._tell(live, lambda: live.sink.on_failed(error))

    def _fail_all(self, error: RunnerError) -> None:
        for live in list(self._live.values()):
            self._end(live, error)

    def _keep(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _cancelled(request_id: str) -> Finished:
    return Finished(request_id, "cancelled", 0, 0, 0, Stamps(0.0, 0.0, 0.0, 0.0, 0.0))


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "an unknown status"
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
