"""Stand-ins for what is slow or needs a model: `FakeEngineClient` answers from a script."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from runner.config import SamplingDefaults
from runner.errors import EngineStopped, RunnerError
from runner.serving.client import EngineClient, EngineState, Sink
from runner.serving.protocol import Finished, ModelInfo, Snapshot, Stamps, Submit


def model_info(*, n_slots: int = 4, n_ctx_slot: int = 512, n_vocab: int = 1000, longest_piece_bytes: int = 0) -> ModelInfo:
    """A small model, as an engine would describe it."""
    return ModelInfo(
        name="fake-model",
        path="/models/fake.gguf",
        architecture="fake",
        description="fake 1M",
        n_params=1_000_000,
        n_vocab=n_vocab,
        longest_piece_bytes=longest_piece_bytes,
        word_starts_per_token=0,
        unknown_bytes=b"",
        n_ctx_train=2048,
        size_bytes=4_000_000,
        has_chat_template=True,
        bos="<s>",
        eos="</s>",
        n_slots=n_slots,
        n_ctx_slot=n_ctx_slot,
        n_batch=64,
        n_threads=1,
        n_threads_batch=1,
        n_gpu_layers=0,
        flash_attn=False,
        kv_bytes=1024,
        n_swa=0,
        devices=[],
        cpu_library="fake",
        llama_cpp_version="0",
        load_s=0.0,
        sampling=SamplingDefaults(),
        notes=[],
    )


@dataclass
class Reply:
    """What one submit gets: a refusal, or texts and then an end. A gate is waited for before what it is named after.

    After `dies_after` texts the engine ends once: the next one answers from the start where the sink allows it.
    """

    texts: list[str] = field(default_factory=lambda: ["Hello", ", ", "world"])
    reason: str = "stop"
    refuse: RunnerError | None = None
    fail: RunnerError | None = None
    n_prompt: int = 7
    n_dropped: int = 0
    n_cached: int = 3
    dies_after: int | None = None
    accept_gate: asyncio.Event | None = None
    place_gate: asyncio.Event | None = None
    text_gate: asyncio.Event | None = None
    end_gate: asyncio.Event | None = None


@dataclass
class _Run:
    """One live request of the fake."""

    submit: Submit
    sink: Sink
    reply: Reply
    arrived_at: float
    task: asyncio.Task[None] | None = None
    n_completion: int = 0


class FakeEngineClient(EngineClient):
    """An engine without a process: ready at once, answers each submit with the next enqueued `Reply`, or the default one."""

    def __init__(self, info: ModelInfo | None = None) -> None:
        self.state = EngineState.READY
        self.info: ModelInfo | None = info or model_info()
        self.snapshot: Snapshot | None = None
        self.queue: list[str] = []
        self.n_snapshots = 0
        self.on_snapshot: Callable[[], None] = lambda: None
        self.load_fraction = 1.0
        self.n_restarts = 0
        self.submits: list[Submit] = []
        self.cancelled: list[str] = []
        self.default = Reply()
        self._replies: list[Reply] = []
        self._runs: dict[str, _Run] = {}

    def enqueue(self, *replies: Reply) -> None:
        """Decide what the next submits get, in their order."""
        self._replies += replies

    async def start(self) -> None:
        """Nothing to start."""

    async def wait_ready(self) -> ModelInfo:
        """Ready unless a test said otherwise."""
        assert self.info is not None
        return self.info

    async def wait_failed(self) -> RunnerError:
        """Never."""
        return await asyncio.Future()

    def submit(self, submit: Submit, sink: Sink) -> None:
        """Start playing the next reply."""
        if self.state in (EngineState.FAILED, EngineState.CLOSED):
            raise EngineStopped("The engine has ended")
        if submit.request_id in self._runs:
            raise ValueError(submit.request_id)
        self.submits.append(submit)
        run = _Run(submit, sink, self._replies.pop(0) if self._replies else self.default, time.monotonic())
        self._runs[submit.request_id] = run
        run.task = asyncio.get_running_loop().create_task(self._play(run))

    def cancel(self, request_id: str) -> None:
        """End a request as the engine would: soon, not at once."""
        run = self._runs.pop(request_id, None)
        if run is None:
            return
        self.cancelled.append(request_id)
        assert run.task is not None
        run.task.cancel()
        asyncio.get_running_loop().call_soon(run.sink.on_finished, self._finished(run, "cancelled"))

    @property
    def n_live(self) -> int:
        """Requests that have not ended."""
        return len(self._runs)

    def tell(self, snapshot: Snapshot) -> None:
        """A snapshot comes, as from the engine."""
        self.snapshot = snapshot
        self.n_snapshots += 1
        if snapshot.queue is not None:
            self.queue = snapshot.queue
        self.on_snapshot()

    async def close(self) -> None:
        """End what lives with EngineStopped."""
        self.state = EngineState.CLOSED
        for run in list(self._runs.values()):
            self._fail(run, EngineStopped("The engine has ended"))

    async def _play(self, run: _Run) -> None:
        reply = run.reply
        await _pass(reply.accept_gate)
        if reply.refuse is not None:
            self._fail(run, reply.refuse)
            return
        run.sink.on_accepted(reply.n_prompt, reply.n_dropped)
        if reply.place_gate is not None:
            await reply.place_gate.wait()
        run.sink.on_placed()
        await _pass(reply.text_gate)
        if reply.dies_after is not None:
            await self._say(run, reply.texts[: reply.dies_after])
            if not run.sink.restart():
                self._fail(run, EngineStopped("The engine ended while this request was being answered"))
                return
            self.n_restarts += 1
            run.n_completion = 0
            run.sink.on_accepted(reply.n_prompt, reply.n_dropped)
            run.sink.on_placed()
        await self._say(run, reply.texts)
        await _pass(reply.end_gate)
        if reply.fail is not None:
            self._fail(run, reply.fail)
            return
        del self._runs[run.submit.request_id]
        run.sink.on_finished(self._finished(run, reply.reason))

    async def _say(self, run: _Run, texts: list[str]) -> None:
        for text in texts:
            run.n_completion += 1
            run.sink.on_text(text, 1)
            await asyncio.sleep(0)

    def _fail(self, run: _Run, error: RunnerError) -> None:
        del self._runs[run.submit.request_id]
        run.sink.on_failed(error)

    def _finished(self, run: _Run, reason: str) -> Finished:
        now = time.monotonic()
        stamps = Stamps(run.arrived_at, run.arrived_at, run.arrived_at, now if run.n_completion else 0.0, now)
        reply = run.reply
        return Finished(run.submit.request_id, reason, reply.n_prompt, reply.n_cached, run.n_completion, stamps)


async def _pass(gate: asyncio.Event | None) -> None:
    """Wait for a gate; without one, still let other tasks run as a real engine would."""
    if gate is None:
        await asyncio.sleep(0)
    else:
        await gate.wait()
