"""The work of `doctor`: load the model with one small slot, generate one token, and tell what the engine chose."""

from collections.abc import Callable
from typing import Final

import msgspec
import psutil

from runner.cli.checks import GIB, MIB, Check, Status
from runner.cli.signals import StopSignals
from runner.config import EngineConfig
from runner.serving.client import EngineClient
from runner.serving.protocol import DeviceInfo, ModelInfo, Submit, TextPrompt
from runner.terminal.answer import Answer, sampling_params

TRIAL_CTX: Final = 256
TRIAL_PROMPT: Final = "The quick brown fox"


def trial_config(config: EngineConfig) -> EngineConfig:
    """The same model and back ends with as little memory as it takes."""
    return msgspec.structs.replace(config, n_slots=1, n_ctx_slot=TRIAL_CTX, kv_pool=None)


class Trial:
    """Reports one check after the other. `info` is what the engine said of itself."""

    def __init__(self, report: Callable[[Check], None]) -> None:
        self.info: ModelInfo | None = None
        self._report = report

    async def run(self, engine: EngineClient, signals: StopSignals) -> int:
        """Exit code 0. Raises RunnerError where the model does not load or does not answer."""
        self.info = info = await engine.wait_ready()
        for check in (check_load(info), check_cpu_library(info), check_devices(info), check_engine_memory(engine.pid)):
            self._report(check)
        self._report(await self._answer(engine, info))
        return 0

    async def drain(self) -> None:
        """There is nothing to wait for."""

    async def close(self) -> None:
        """There is nothing to let go of."""

    async def _answer(self, engine: EngineClient, info: ModelInfo) -> Check:
        answer = Answer(lambda _: None)
        prompt, sampling = TextPrompt(TRIAL_PROMPT), sampling_params(info.sampling)
        engine.submit(Submit(request_id="doctor:1", prompt=prompt, sampling=sampling, max_tokens=1, ignore_eos=True), answer)
        await answer.wait()
        finished = answer.finished
        assert finished is not None
        took_s = finished.stamps.finished_at - finished.stamps.arrived_at
        return Check("answer", Status.OK, f"{finished.n_prompt} prompt tokens and {finished.n_completion} new one in {took_s:.2f} s")


def check_load(info: ModelInfo) -> Check:
    """The model is in memory."""
    return Check("load", Status.OK, f"{info.description} loaded in {info.load_s:.2f} s by llama.cpp {info.llama_cpp_version}")


def check_cpu_library(info: ModelInfo) -> Check:
    """Which of the CPU libraries was picked for this processor."""
    return Check("cpu library", Status.OK, info.cpu_library)


def check_devices(info: ModelInfo) -> Check:
    """What the back ends found."""
    found = "; ".join(_device(device) for device in info.devices)
    return Check("devices", Status.OK if found else Status.FAIL, found or "no back end found any device")


def check_engine_memory(pid: int | None) -> Check:
    """What of the model is mapped from its file, and what a back end has copied into memory of its own."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error as error:
        return Check("engine memory", Status.NOTE, f"cannot be read: {error}")
    mapped = getattr(memory, "shared", None)
    if mapped is None:
        return Check("engine memory", Status.OK, f"{memory.rss / MIB:,.0f} MiB")
    return Check(
        "engine memory", Status.OK, f"{(memory.rss - mapped) / MIB:,.0f} MiB of its own, {mapped / MIB:,.0f} MiB mapped from files"
    )


def _device(device: DeviceInfo) -> str:
    memory = f", {device.memory_free / GIB:.1f} of {device.memory_total / GIB:.1f} GiB free" if device.memory_total else ""
    return f"{device.name} ({device.kind}: {device.description}{memory})"
