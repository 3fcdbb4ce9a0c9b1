"""The front's side of the engine: starts its process, keeps every request until its first text, starts it again when it ends.

LOADING -> READY -> RESTARTING -> READY ...           any -> CLOSED
             (three failures at load in a row, or one that no retry can mend)  -> FAILED

Who is live at an engine's end: cancelled ones end so; a suspect at two deaths (see restarts.py) fails with EngineCrashed; one of
whose answer text has been sent fails with EngineStopped; all others are submitted to the next engine in their old order.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from enum import StrEnum
from time import monotonic

import msgspec

from runner.config import EngineConfig
from runner.errors import EngineCrashed, EngineStopped, InternalError, ModelError, RequestCancelled, RunnerError, error_for_code
from runner.serving.child import Child, EngineChild, StartChild
from runner.serving.protocol import (
    FLUSH_S,
    Accepted,
    Cancel,
    Failed,
    FromEngine,
    LoadFailed,
    LoadProgress,
    ModelInfo,
    Ready,
    Refused,
    Snapshot,
    StepEvents,
    Submit,
)
from runner.serving.requests import LiveRequest, LiveRequests, Sink
from runner.serving.restarts import Pulse, RestartPolicy, Restarts, suspects

__all__ = ["EngineClient", "EngineState", "RestartPolicy", "Sink"]

log = logging.getLogger("slotfile.engine")


class EngineState(StrEnum):
    """Where the engine is in its life. READY is the only state that computes; LOADING and RESTARTING queue."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


_ENDED = (EngineState.FAILED, EngineState.CLOSED)


class EngineClient:
    """One engine process and the requests that are with it. All methods belong to the event loop's thread."""

    def __init__(self, config: EngineConfig, start_child: StartChild = EngineChild.start, policy: RestartPolicy | None = None) -> None:
        self.state = EngineState.LOADING
        self.info: ModelInfo | None = None
        self.snapshot: Snapshot | None = None
        self.queue: list[str] = []  # see Snapshot.queue
        self.n_snapshots = 0
        # Called after each snapshot, when whatever else its step brought has been told.
        self.on_snapshot: Callable[[], None] = lambda: None
        self.load_fraction = 0.0
        self.n_restarts = 0
        self._config = config
        self._start_child = start_child
        self._policy = policy or RestartPolicy()
        self._requests = LiveRequests(on_broken=self.cancel)
        self._restarts = Restarts(self._policy)
        self._pulse = Pulse(0.0)
        self._child: Child | None = None
        self._last_words = ""
        self._load_error: RunnerError | None = None
        self._ready: asyncio.Future[ModelInfo] | None = None
        self._failed: asyncio.Future[RunnerError] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The engine process, while there is one."""
        return self._child.pid if self._child else None

    @property
    def n_live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    async def start(self) -> None:
        """Start the engine process; returns at once, the model loads meanwhile."""
        loop = asyncio.get_running_loop()
        self._ready, self._failed = loop.create_future(), loop.create_future()
        self._keep(self._watch())
        await self._spawn()

    async def wait_ready(self) -> ModelInfo:
        """Wait until the model is loaded. Raises ModelError or ConfigError when it cannot be."""
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    async def wait_failed(self) -> RunnerError:
        """Wait until the engine is given up (three failures at load): the program ends with this error."""
        assert self._failed is not None
        return await asyncio.shield(self._failed)

    def submit(self, submit: Submit, sink: Sink) -> None:
        """Hand a request over. Raises EngineStopped where the engine is given up or closed, ValueError on a live id used twice."""
        if self.state in _ENDED:
            raise EngineStopped("The engine has ended and is not started again")
        if not submit.arrived_at:
            submit = msgspec.structs.replace(submit, arrived_at=monotonic())
        live = self._requests.add(submit, sink)
        if self.state is EngineState.READY:
            self._hand_over(live)

    def cancel(self, request_id: str) -> None:
        """End a request; its sink gets `on_finished` with reason `cancelled`. Unknown ids are ignored."""
        live = self._requests.get(request_id)
        if live is None or live.is_cancelled:
            return
        live.is_cancelled = True
        if live.is_with_engine and self._child is not None:
            self._child.send(Cancel(request_id))
        else:
            self._requests.finish_cancelled(request_id)

    async def close(self) -> None:
        """End the engine process; live requests get EngineStopped. Within a second, but where cells go to disk (FLUSH_S at most)."""
        if self.state is EngineState.CLOSED:
            return
        keeps_cells = self._config.kv_dir is not None and self.state is EngineState.READY
        self.state = EngineState.CLOSED
        self._requests.fail_all(EngineStopped("The server is shutting down"))
        for future in (self._ready, self._failed):
            if future is not None:
                future.cancel()
        within_s = self._policy.close_within_s
        if self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=within_s)
        if self._child is not None and keeps_cells:
            await self._child.flush(FLUSH_S + within_s)
        if self._child is not None:
            await self._child.end(within_s)

    # -- what the child says -------------------------------------------------------------------------------------------

    def on_message(self, message: FromEngine) -> None:
        """Take one message of the engine (called by the child's protocol). What comes after the end changes nothing."""
        if self.state in _ENDED:
            return
        match message:
            case StepEvents():
                self._on_step(message)
            case Accepted(request_id, n_prompt, n_dropped):
                self._pulse.prepared(monotonic())
                self._requests.accept(request_id, n_prompt, n_dropped)
            case Refused():
                self._pulse.prepared(monotonic())
                self._on_refused(message)
            case LoadProgress(fraction):
                self.load_fraction = fraction
            case Ready(info):
                self._on_ready(info)
            case LoadFailed():
                self._on_load_failed(message)

    def on_line(self, line: str) -> None:
        """Take one line of the engine's standard error."""
        self._last_words = line or self._last_words
        log.warning("%s", line)

    def on_exit(self, returncode: int | None) -> None:
        """The engine process has ended."""
        self._child = None
        while_loading = "" if self.state is EngineState.READY else " while it loaded the model"
        self._lost(f"The engine ended with {_ending(returncode)}{while_loading}")

    def _on_ready(self, info: ModelInfo) -> None:
        now = monotonic()
        self.state = EngineState.READY
        self.info = info
        self.load_fraction = 1.0
        self._restarts.ready(now)
        self._pulse = Pulse(now)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(info)
        for live in self._requests:
            self._hand_over(live)

    def _on_load_failed(self, failure: LoadFailed) -> None:
        self._load_error = error_for_code(failure.code, failure.message, None, failure.hint)
        if failure.is_final:
            self._restarts.give_up()

    def _on_step(self, events: StepEvents) -> None:
        self._pulse.stepped(monotonic())
        if events.snapshot is not None:
            self.snapshot = events.snapshot
            self.n_snapshots += 1
            if events.snapshot.queue is not None:
                self.queue = events.snapshot.queue
        for request_id in events.placed:
            self._requests.place(request_id)
        for delta in events.deltas:
            self._requests.give_text(delta.request_id, delta.text, delta.n_tokens)
        for finished in events.finished:
            self._requests.finish(finished)
        for failed in events.failed:
            self._on_failed(failed)
        if events.snapshot is not None:
            self._tell_snapshot()

    def _tell_snapshot(self) -> None:
        try:
            self.on_snapshot()
        except Exception:  # as with a sink: the engine's pipe is not to suffer
            log.exception("what listens to snapshots failed")

    def _on_refused(self, refused: Refused) -> None:
        error = error_for_code(refused.code, refused.message, refused.param)
        if isinstance(error, RequestCancelled):
            self._requests.finish_cancelled(refused.request_id)
            return
        if isinstance(error, InternalError):
            log.error("id=%s failed: %s", refused.request_id, error.message)
        self._requests.fail(refused.request_id, error)

    def _on_failed(self, failed: Failed) -> None:
        log.error("id=%s failed: %s: %s", failed.request_id, failed.code, failed.message)
        self._requests.fail(failed.request_id, error_for_code(failed.code, failed.message, None))

    # -- starting, ending, starting again ------------------------------------------------------------------------------

    async def _spawn(self) -> None:
        self._last_words, self._load_error, self.load_fraction = "", None, 0.0
        try:
            child = await self._start_child(self._config, self)
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread that waits for the process can be had
            self._lost(f"The engine process could not be started: {getattr(error, 'strerror', None) or error}")
            return
        if self.state is EngineState.CLOSED:
            await child.end(self._policy.close_within_s)
        elif not child.has_ended:  # a quick end was told before this task went on
            self._child = child

    async def _restart(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self._spawn()

    def _hand_over(self, live: LiveRequest) -> None:
        assert self._child is not None
        live.is_with_engine = True
        live.handed_at = monotonic()
        self._child.send(live.submit)

    def _lost(self, what: str) -> None:
        """There is no engine any more, or there never was: start the next one, or give up."""
        if self.state in _ENDED:
            return
        if self._load_error is None:
            log.error("%s; %d requests were with it, %d are live", what, len(self._requests.with_engine), len(self._requests))
        self.state = EngineState.RESTARTING if self.info is not None else EngineState.LOADING
        self.snapshot, self.queue = None, []
        self._restarts.ended(monotonic())
        self._sort_out_the_dead()
        if self._restarts.is_hopeless:
            self._give_up(what)
        else:
            self.n_restarts += 1
            self._keep(self._restart(self._restarts.delay_s))

    def _sort_out_the_dead(self) -> None:
        with_engine = self._requests.with_engine
        for live in suspects(with_engine, self.info.n_slots if self.info is not None else 1):
            live.n_deaths += 1
        for live in with_engine:
            live.leave_engine()
        for live in with_engine:
            self._sort_out(live)

    def _sort_out(self, live: LiveRequest) -> None:
        if live.is_cancelled:  # and has ended, where the end of another of this death cancelled it
            self._requests.finish_cancelled(live.request_id)
        elif live.n_deaths >= self._policy.max_deaths:
            self._end(live, EngineCrashed("The engine ended twice while it ran this request; it is not tried again"))
        elif not self._requests.may_restart(live):
            self._end(live, EngineStopped("The engine ended while this request was being answered; the answer is incomplete"))

    def _end(self, live: LiveRequest, error: RunnerError) -> None:
        log.error("id=%s failed: %s: %s", live.request_id, error.code, error.message)
        self._requests.fail(live.request_id, error)

    def _give_up(self, what: str) -> None:
        self.state = EngineState.FAILED
        words = f": {self._last_words}" if self._last_words else ""
        error = self._load_error or ModelError(f"{what}{words}")
        self._requests.fail_all(EngineStopped("The engine could not be started"))
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # retrieved: nobody has to be waiting
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(error)

    async def _watch(self) -> None:
        """End an engine of which one thread has been silent, with work to do, for far longer than any step takes."""
        while True:
            await asyncio.sleep(self._policy.watch_every_s)
            if self._child is None or self.state is not EngineState.READY:
                continue
            silence_s = self._pulse.silence_s(monotonic(), self._requests.with_engine)
            if silence_s > self._policy.silence_limit_s(self.snapshot.longest_step_s if self.snapshot else 0.0):
                log.error("the engine has been silent for %.0f s and is ended", silence_s)
                self._child.kill()

    def _keep(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "an unknown status"
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
