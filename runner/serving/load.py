"""From an EngineConfig to an engine that can decode: back ends, model, slots that fit memory, template."""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from runner.bundle.gguf import read_header
from runner.config import EngineConfig
from runner.engine.budget import PromptBudget
from runner.engine.capacity import DEFAULT_CTX, DEFAULT_SLOTS, RESERVE_BYTES, Capacity, Wanted, choose_capacity, padded
from runner.engine.layout import Weights
from runner.engine.scheduler import Scheduler
from runner.engine.slots import SlotPool
from runner.errors import ConfigError, ModelError
from runner.llama.backend import LlamaBackend
from runner.llama.context import Context, ContextSize
from runner.llama.library import LOG_WARN, Device, Library
from runner.llama.model import Model
from runner.llama.template import ChatTemplate
from runner.serving.loop import EngineLoop, NativeSeconds
from runner.serving.machine import available_memory, usable_threads
from runner.serving.prepare import Preparer
from runner.serving.protocol import DeviceInfo, ModelInfo, StepEvents

Clock = Callable[[], float]

# The gap between two tokens of a stream that a prompt computed meanwhile should not exceed.
TARGET_GAP_S = 0.25
# Before anything was measured: how slowly weights may come from a cold disk (see Snapshot.longest_step_s).
_SLOWEST_BYTES_PER_S = 500e6
_KV_LINE = re.compile(r"KV buffer size\s*=\s*([\d.]+) MiB")
_PROGRESS_STEP = 0.02
MIB = 1024 * 1024


@dataclass(slots=True)
class NativeLog:
    """What llama.cpp says while it loads: warnings go to stderr, the size of the KV buffers is kept."""

    kv_mib: float = 0.0
    last_errors: list[str] = field(default_factory=list)

    def __call__(self, level: int, text: str) -> None:
        """Take one line (llama.cpp's log callback)."""
        if match := _KV_LINE.search(text):
            self.kv_mib += float(match[1])
        if LOG_WARN <= level <= LOG_WARN + 1 and text:
            self.last_errors.append(text)
            sys.stderr.write(text + "\n")


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything loaded."""

    info: ModelInfo
    scheduler: Scheduler
    backend: LlamaBackend
    preparer: Preparer
    clock: Clock

    def native_seconds(self) -> NativeSeconds:
        """What the back end spent outside Python so far."""
        native = self.backend.native
        return NativeSeconds(native.decode_s, native.sample_s, native.move_s)

    def make_loop(self, emit: Callable[[StepEvents], None]) -> EngineLoop:
        """The decode loop over this engine."""
        return EngineLoop(
            self.scheduler,
            self.backend,
            clock=self.clock,
            emit=emit,
            native=self.native_seconds,
            first_guess_s=self.info.size_bytes / _SLOWEST_BYTES_PER_S,
        )


def load_engine(config: EngineConfig, *, clock: Clock, progress: Callable[[float], None]) -> Engine:
    """Load. Raises ModelError where the model cannot be used, ConfigError where what was asked for does not fit."""
    started = clock()
    log = NativeLog()
    library = Library(log)
    devices = library.devices()
    chosen, n_gpu_layers = _choose_devices(config, devices)
    model = Model(library, config.model, n_gpu_layers=n_gpu_layers, devices=chosen, progress=_throttled(progress))
    capacity = _capacity(config, model, chosen or devices, n_gpu_layers)
    n_threads = config.n_threads or usable_threads()
    size = ContextSize(capacity.n_slots, capacity.n_ctx_slot, config.n_batch, n_threads, n_threads)
    context = Context(library, model, size, config.flash_attn)
    on_gpu = n_gpu_layers != 0 and any(device.kind in ("gpu", "igpu") for device in devices)
    backend = LlamaBackend(library, model, context, size, on_gpu=on_gpu, clock=time.perf_counter)
    template, template_note = _template(config, model)
    scheduler = Scheduler(
        SlotPool(size.n_slots),
        model.vocabulary,
        PromptBudget(max_rows=config.n_batch, target_gap_s=TARGET_GAP_S),
        Weights(model.size_bytes, model.cell_bytes),
    )
    info = ModelInfo(
        name=config.model_name,
        path=config.model.path,
        architecture=model.architecture,
        description=model.description,
        n_params=model.n_params,
        n_vocab=model.vocabulary.n_tokens,
        n_ctx_train=model.n_ctx_train,
        size_bytes=model.size_bytes,
        has_chat_template=template is not None,
        bos=model.vocabulary.special_text(model.vocabulary.bos),
        eos=model.vocabulary.special_text(model.vocabulary.eos),
        n_slots=size.n_slots,
        n_ctx_slot=size.n_ctx_slot,
        n_batch=size.n_batch,
        n_threads=size.n_threads,
        n_threads_batch=size.n_threads_batch,
        n_gpu_layers=model.n_layers + 1 if n_gpu_layers < 0 else n_gpu_layers,
        flash_attn=config.flash_attn != "off",
        kv_bytes=int(log.kv_mib * MIB) or capacity.kv_bytes,
        n_swa=model.n_swa,
        devices=[DeviceInfo(d.name, d.description, d.kind, d.memory_free, d.memory_total) for d in devices],
        cpu_library=library.cpu_library(),
        llama_cpp_version=library.version(),
        load_s=clock() - started,
        sampling=config.sampling,
        notes=[*capacity.notes, *template_note],
    )
    preparer = Preparer(model.vocabulary, template, n_ctx_slot=size.n_ctx_slot, seed=config.seed)
    return Engine(info, scheduler, backend, preparer, clock)


def _choose_devices(config: EngineConfig, devices: list[Device]) -> tuple[list[Device] | None, int]:
    """The devices to offload to (None: as llama.cpp chooses) and how many layers (-1: all)."""
    gpus = [device for device in devices if device.kind in ("gpu", "igpu")]
    if config.device == "cpu" or (config.device is None and not gpus):
        return [], 0
    if config.device is not None:
        gpus = [device for device in devices if device.name.lower() == config.device.lower()]
        if not gpus:
            names = ", ".join(device.name for device in devices)
            raise ConfigError(f"--device is {config.device!r}; this machine has: {names}", hint="slotfile doctor")
    if config.n_gpu_layers is not None:
        return gpus, config.n_gpu_layers
    return gpus, _layers_that_fit(config, sum(device.memory_free for device in gpus))


def _layers_that_fit(config: EngineConfig, free: int) -> int:
    """-1 (all) where weights, cells and compute buffers fit `free` bytes, else as many layers as do, each with its own cells."""
    header = read_header(config.model)
    n_slots, n_ctx = config.n_slots or DEFAULT_SLOTS, config.n_ctx_slot or DEFAULT_CTX
    cells = n_slots * padded(n_ctx) * header.kv_bytes_per_token
    room = free - RESERVE_BYTES
    if config.model.length + cells <= room:
        return -1
    layer_bytes = (config.model.length + cells) / (header.block_count + 1)
    return max(0, int(room / layer_bytes))


def _capacity(config: EngineConfig, model: Model, devices: list[Device], n_gpu_layers: int) -> Capacity:
    gpus = [device for device in devices if device.kind == "gpu"]
    on_gpu = n_gpu_layers < 0 and bool(gpus)
    memory = sum(device.memory_free for device in gpus) if on_gpu else available_memory()
    return choose_capacity(
        Wanted(config.n_slots, config.n_ctx_slot),
        n_ctx_train=model.n_ctx_train,
        cell_bytes=model.cell_bytes,
        # On a GPU the weights are there already and out of `memory_free`'s figure, which was taken before the load.
        weights_bytes=model.size_bytes,
        memory_bytes=memory,
    )


def _template(config: EngineConfig, model: Model) -> tuple[ChatTemplate | None, list[str]]:
    source = config.chat_template or model.chat_template
    if source is None:
        return None, ["The model has no chat template: chat is refused, completions work"]
    vocabulary = model.vocabulary
    try:
        return ChatTemplate(source, bos=vocabulary.special_text(vocabulary.bos), eos=vocabulary.special_text(vocabulary.eos)), []
    except ModelError as error:
        if config.chat_template is not None:
            raise
        return None, [f"{error.message}: chat is refused, completions work"]


def _throttled(progress: Callable[[float], None]) -> Callable[[float], None]:
    """Pass on every fiftieth: llama.cpp reports each tensor."""
    last = -1.0

    def report(fraction: float) -> None:
        nonlocal last
        if fraction - last >= _PROGRESS_STEP or fraction >= 1.0:
            last = fraction
            progress(fraction)

    return report
