"""From an EngineConfig to an engine that can decode: back ends, model, slots that fit memory, template."""

import datetime
import importlib
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from runner.bundle.gguf import read_header
from runner.bundle.header import Header
from runner.bundle.kv_cells import cell_bytes, check_cache_types
from runner.config import EngineConfig, ModelFile
from runner.engine.capacity import DEFAULT_CTX, DEFAULT_SLOTS, RESERVE_BYTES, Capacity, SlotMemory, Wanted, choose_capacity, padded
from runner.engine.layout import Weights
from runner.engine.memory_kind import MemoryKind
from runner.engine.scheduler import Scheduler
from runner.engine.slots import SlotPool
from runner.errors import ConfigError, ModelError
from runner.llama.backend import LlamaBackend
from runner.llama.context import Context, ContextSize, Kernels
from runner.llama.heap import WarmHeap
from runner.llama.library import LOG_ERROR, LOG_WARN, Device, Library
from runner.llama.model import Model
from runner.llama.states import STATE_CELL_BYTES, States
from runner.serving.loop import Disk, EngineLoop, NativeSeconds
from runner.serving.machine import available_memory, usable_threads
from runner.serving.prepare import Preparer
from runner.serving.protocol import DeviceInfo, ModelInfo, StepEvents

if TYPE_CHECKING:
    from runner.llama.template import ChatTemplate
    from runner.serving.kv_key import StateKey

Clock = Callable[[], float]

# Before anything was measured: how slowly weights may come from a cold disk (see Snapshot.longest_step_s).
_SLOWEST_BYTES_PER_S = 500e6
_KV_LINE = re.compile(r"KV buffer size\s*=\s*([\d.]+) MiB")
_FLASH_ATTN_LINE = re.compile(r"Flash Attention (enabled|not supported)")
# Whether a slot holds more than the model was trained on is said by choose_capacity; llama.cpp says it of a whole pool too.
_CTX_LINE = "possible training context overflow"
_PROGRESS_STEP = 0.02
# Of the memory that is free at the start, what the cells of parked sequences may take.
_PARKED_SHARE = 0.25
MIB = 1024 * 1024


@dataclass(slots=True)
class NativeLog:
    """What llama.cpp says while it loads: warnings go to stderr; the size of the KV buffers and its choice of kernel are kept."""

    kv_mib: float = 0.0
    flash_attn: bool | None = None

    def __call__(self, level: int, text: str) -> None:
        """Take one line (llama.cpp's log callback)."""
        if match := _KV_LINE.search(text):
            self.kv_mib += float(match[1])
        if match := _FLASH_ATTN_LINE.search(text):
            self.flash_attn = match[1] == "enabled"
        if level in (LOG_WARN, LOG_ERROR) and text and _CTX_LINE not in text:
            sys.stderr.write(text + "\n")


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything loaded."""

    config: EngineConfig
    library: Library
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
        loop = EngineLoop(
            self.scheduler,
            self.backend,
            clock=self.clock,
            emit=emit,
            native=self.native_seconds,
            first_guess_s=self.info.size_bytes / _SLOWEST_BYTES_PER_S,
            checks_each_step=self.config.checks_each_step,
        )
        if self.config.kv_dir is not None:
            loop.disk = self._open_disk(self.config.kv_dir, loop)
        return loop

    def _open_disk(self, path: str, loop: EngineLoop) -> Disk:
        """Raises ConfigError where the directory cannot be used."""
        from runner.serving.kv_disk import KvDisk  # with hashlib and what else few starts need
        from runner.serving.kv_files import KvDirectory

        directory = KvDirectory(Path(path), self.state_key(), self.config.kv_dir_mib * MIB, model_name=self.info.name)
        return KvDisk(directory, self.scheduler.memory, self.backend, tell=loop.inbox.put, clock=self.clock)

    def state_key(self) -> "StateKey":
        """What the states of this engine are valid for. RoPE is the model's own, and there are no adapters."""
        from runner.serving.kv_key import StateKey, model_id

        config, info = self.config, self.info
        return StateKey(
            model_id=model_id(config.model, read_header(config.model), config.model_sha256),
            llama_cpp_version=f"{info.llama_cpp_version} {self.library.fingerprint()}",
            cache_type_k=info.cache_type_k,
            cache_type_v=info.cache_type_v,
            flash_attn=info.flash_attn,
            n_streams=1 if info.kv_pool else info.n_slots,
            n_ctx_slot=info.n_ctx_slot,
            kv_unified=info.kv_pool > 0,
            swa_full=info.swa_full,
            rope_freq_base=0.0,
            rope_freq_scale=0.0,
            rope_scaling_type=-1,
        )


@dataclass(frozen=True, slots=True)
class Native:
    """llama.cpp's libraries, loaded, and what they said."""

    library: Library
    log: NativeLog

    @classmethod
    def open(cls) -> "Native":
        """Load them. Needs no configuration. Raises ModelError."""
        log = NativeLog()
        return cls(Library(log), log)


def load_engine(config: EngineConfig, *, clock: Clock, progress: Callable[[float], None], native: Native | None = None) -> Engine:
    """Load. Raises ModelError where the model cannot be used, ConfigError where what was asked for does not fit."""
    started = clock()
    # jinja2 takes 20 ms, a header 10 to 40, and where there is no GPU nothing needs either before the weights are there: those are read
    # in native code meanwhile.
    threading.Thread(target=importlib.import_module, args=("runner.llama.template",), daemon=True).start()
    header = _read_meanwhile(config.model)
    native = native or Native.open()
    library, log = native.library, native.log
    devices = library.devices()
    chosen, n_gpu_layers = _choose_devices(config, header, devices)
    model = Model(library, config.model, n_gpu_layers=n_gpu_layers, devices=chosen, progress=_throttled(progress))
    n_gpu_layers = model.n_layers + 1 if n_gpu_layers < 0 else min(n_gpu_layers, model.n_layers + 1)
    check_cache_types(header.result(), config)
    capacity = _capacity(config, header.result(), model, chosen, n_gpu_layers)
    n_threads = config.n_threads or usable_threads()
    size = ContextSize(
        capacity.n_slots, capacity.n_ctx_slot, config.n_batch, n_threads, config.n_threads_batch or n_threads, capacity.n_pool
    )
    model.vocabulary.begin_scan()
    with WarmHeap(capacity.kv_bytes if n_gpu_layers == 0 else 0, n_threads):
        context = Context(library, model, size, Kernels.of(config))
    _check_context_shift(config, model, context)
    kind = _memory_kind(config, header.result(), model, size, 0 if model.can_be_cut else States(library.api, context).probe(0, 0))
    backend = LlamaBackend(library, model, context, size, kind, on_gpu=n_gpu_layers > 0, clock=time.perf_counter)
    template, template_note = _template(config, model)
    scheduler = Scheduler(
        SlotPool(size.n_slots),
        model.vocabulary,
        Weights(model.size_bytes, cell_bytes(header.result(), config).total),
        n_batch=config.n_batch,
        itl_target_s=config.itl_target_s,
        prompt_chunk=config.prompt_chunk,
        policy=config.policy,
        max_running_per_client=config.max_running_per_client,
        share_grace_s=config.share_grace_s,
        kv_host_bytes=config.kv_host_mib * MIB if config.kv_host_mib is not None else int(available_memory() * _PARKED_SHARE),
        kind=kind,
        oldest=backend.oldest if kind.n_swa else lambda slot_id: 0,
        shift_at=size.n_ctx_slot if config.context_shift else None,
    )
    notes = [*capacity.notes, *_window_note(config, model), *template_note]
    chose = _Chosen(size, n_gpu_layers, log, capacity, has_template=template is not None, notes=notes)
    info = _describe(config, library, model, chose, devices, clock() - started)
    preparer = Preparer(model.vocabulary, template, n_ctx_slot=size.n_ctx_slot, seed=config.seed, can_shift=config.context_shift)
    return Engine(config, library, info, scheduler, backend, preparer, clock)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What was decided for this machine."""

    size: ContextSize
    n_gpu_layers: int
    log: NativeLog
    capacity: Capacity
    has_template: bool
    notes: list[str]


def _describe(config: EngineConfig, library: Library, model: Model, chose: _Chosen, devices: list[Device], load_s: float) -> ModelInfo:
    vocabulary, size = model.vocabulary, chose.size
    return ModelInfo(
        name=config.model_name,
        path=config.model.path,
        architecture=model.architecture,
        description=model.description,
        n_params=model.n_params,
        n_vocab=vocabulary.n_tokens,
        longest_piece_bytes=vocabulary.facts.longest_piece_bytes,
        word_starts_per_token=vocabulary.facts.word_starts_per_token,
        unknown_bytes=vocabulary.facts.unknown_bytes,
        n_ctx_train=model.n_ctx_train,
        size_bytes=model.size_bytes,
        has_chat_template=chose.has_template,
        bos=vocabulary.special_text(vocabulary.bos),
        eos=vocabulary.special_text(vocabulary.eos),
        n_slots=size.n_slots,
        n_ctx_slot=size.n_ctx_slot,
        n_batch=size.n_batch,
        n_threads=size.n_threads,
        n_threads_batch=size.n_threads_batch,
        n_gpu_layers=chose.n_gpu_layers,
        flash_attn=Kernels.of(config).flash_attn == "on" if chose.log.flash_attn is None else chose.log.flash_attn,
        kv_bytes=int(chose.log.kv_mib * MIB) or chose.capacity.kv_bytes,
        n_swa=model.n_swa,
        devices=[DeviceInfo(d.name, d.description, d.kind, d.memory_free, d.memory_total) for d in devices],
        cpu_library=library.cpu_library(),
        llama_cpp_version=library.version(),
        load_s=load_s,
        sampling=config.sampling,
        notes=chose.notes,
        itl_target_s=config.itl_target_s,
        prompt_chunk=config.prompt_chunk,
        cache_type_k=config.cache_type_k,
        cache_type_v=config.cache_type_v,
        swa_full=config.swa_full,
        context_shift=config.context_shift,
        kv_pool=size.n_pool,
    )


def _memory_kind(config: EngineConfig, header: Header, model: Model, size: ContextSize, fixed_bytes: int) -> MemoryKind:
    # A saved state has one window of the layers that slide, also where the slots have all of their cells.
    cell = cell_bytes(header, msgspec.structs.replace(config, swa_full=False))
    return MemoryKind(
        cell_bytes=cell.full + STATE_CELL_BYTES if cell.full else 0,
        slot_cells=padded(size.n_ctx_slot),
        window_cell_bytes=cell.window + STATE_CELL_BYTES if cell.window else 0,
        n_swa=cell.n_swa,
        fixed_bytes=fixed_bytes,
        can_be_cut=model.can_be_cut,
        pool_cells=size.n_pool,
    )


def _check_context_shift(config: EngineConfig, model: Model, context: Context) -> None:
    """Raises ConfigError where the option is on and no token can be taken out of the middle of a slot."""
    if not config.context_shift or (model.can_be_cut and context.can_shift):
        return
    if not model.can_be_cut:
        why, hint = "has one state a slot, which no token can be taken out of", "no --context-shift"
    elif model.n_swa and not config.swa_full:
        why, hint = f"has layers that keep only the last {model.n_swa:,} tokens of a slot", "--swa-full, or no --context-shift"
    else:
        why, hint = "has positions that llama.cpp cannot change", "no --context-shift"
    raise ConfigError(f"--context-shift cannot be used: the model {config.model_name} ({model.architecture}) {why}", hint=hint)


def _read_meanwhile(model: ModelFile) -> Future[Header]:
    executor = ThreadPoolExecutor(1)
    header = executor.submit(read_header, model)
    executor.shutdown(wait=False)
    return header


def _choose_devices(config: EngineConfig, header: Future[Header], devices: list[Device]) -> tuple[list[Device] | None, int]:
    """The devices to offload to (None: as llama.cpp chooses) and how many layers (-1: all)."""
    gpus = [device for device in devices if device.kind in ("gpu", "igpu")]
    if (config.device or "").casefold() == "cpu" or (config.device is None and not gpus):
        return [], 0
    if config.device is not None:
        gpus = [device for device in gpus if device.name.casefold() == config.device.casefold()]
        if not gpus:
            names = ", ".join(device.name for device in devices)
            raise ConfigError(f"--device is {config.device!r}; this machine has: {names}", hint="slotfile doctor")
    if config.n_gpu_layers is not None:
        return gpus, config.n_gpu_layers
    return gpus, _layers_that_fit(config, header.result(), sum(device.memory_free for device in gpus))


def _layers_that_fit(config: EngineConfig, header: Header, free: int) -> int:
    """-1 (all) where weights, cells and compute buffers fit `free` bytes, else as many layers as do, each with its own cells."""
    memory = SlotMemory.of(header, config)
    cells = memory.total_bytes(config.n_slots or DEFAULT_SLOTS, config.n_ctx_slot or memory.default_ctx(DEFAULT_CTX))
    room = free - RESERVE_BYTES
    if config.model.length + cells <= room:
        return -1
    layer_bytes = (config.model.length + cells) / (header.block_count + 1)
    return max(0, int(room / layer_bytes))


def _capacity(config: EngineConfig, header: Header, model: Model, gpus: list[Device] | None, n_gpu_layers: int) -> Capacity:
    return choose_capacity(
        Wanted(config.n_slots, config.n_ctx_slot),
        n_ctx_train=model.n_ctx_train,
        slot=SlotMemory.of(header, config),
        weights_bytes=model.size_bytes,
        memory_bytes=_usable_memory(n_gpu_layers / (model.n_layers + 1), gpus or []),
    )


def _usable_memory(share_on_gpu: float, gpus: list[Device]) -> int:
    """Bytes for weights and cells together, when this share of both lies on the GPUs (their free memory as of before the load)."""
    host = available_memory() / (1.0 - share_on_gpu) if share_on_gpu < 1.0 else float("inf")
    device = sum(gpu.memory_free for gpu in gpus) / share_on_gpu if share_on_gpu > 0.0 else float("inf")
    return int(min(host, device))


def _template(config: EngineConfig, model: Model) -> "tuple[ChatTemplate | None, list[str]]":
    from runner.llama.template import ChatTemplate

    source = config.chat_template or model.chat_template
    if source is None:
        return None, ["The model has no chat template: chat is refused, completions work"]
    vocabulary = model.vocabulary
    try:
        bos, eos = vocabulary.special_text(vocabulary.bos), vocabulary.special_text(vocabulary.eos)
        return ChatTemplate(source, bos=bos, eos=eos, clock=lambda: datetime.datetime.now().astimezone()), []
    except ModelError as error:
        if config.chat_template is not None:
            raise
        return None, [f"{error.message}: chat is refused, completions work"]


def _window_note(config: EngineConfig, model: Model) -> list[str]:
    return ["--swa-full changes nothing: no layer of the model has a sliding window"] if config.swa_full and model.n_swa == 0 else []


def _throttled(progress: Callable[[float], None]) -> Callable[[float], None]:
    """Pass on every fiftieth: llama.cpp reports each tensor."""
    last = -1.0

    def report(fraction: float) -> None:
        nonlocal last
        if fraction - last >= _PROGRESS_STEP or fraction >= 1.0:
            last = fraction
            progress(fraction)

    return report
