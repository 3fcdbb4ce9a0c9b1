"""What `doctor` looks at before any model is loaded: the machine, the directories, the port, the model's file. One function a check."""

import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from runner.api.listen import bind, urls
from runner.bundle.pack import verify
from runner.cli.model import ChosenModel
from runner.cli.state import state_dir
from runner.config import EngineConfig, ServerConfig
from runner.engine.capacity import SlotMemory, Wanted, choose_capacity
from runner.errors import ConfigError, RunnerError
from runner.serving.machine import available_memory, cgroup_cpus, physical_cores, usable_threads
from runner.terminal.render import counted, kv_text

GIB: Final = 1 << 30
MIB: Final = 1 << 20


class Status(StrEnum):
    """What a check came to. NOTE: the program works all the same."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `doctor`. `hint` is what mends it."""

    name: str
    status: Status
    text: str
    hint: str | None = None


def check_system() -> Check:
    """Operating system and processor."""
    return Check("system", Status.OK, f"{platform.system()} {platform.release()}, {platform.machine()}")


def check_cpus() -> Check:
    """Cores, and how many threads this process should compute with."""
    quota = cgroup_cpus()
    limit = "no quota" if quota is None else f"a quota of {quota:g} CPUs"
    text = f"{os.cpu_count()} CPUs, {physical_cores() or '?'} physical cores, {limit}: {usable_threads()} threads for computing"
    return Check("cpus", Status.OK, text)


def check_memory() -> Check:
    """Memory that can still be had."""
    import psutil  # 20 ms that no other command needs

    return Check("memory", Status.OK, f"{available_memory() / GIB:.1f} GiB available of {psutil.virtual_memory().total / GIB:.1f} GiB")


def check_temp_dir() -> Check:
    """A one-file executable unpacks its libraries into the temporary directory and loads them from there."""
    try:
        path = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Check(
            "temp dir", Status.FAIL, f"nothing can be written to a temporary directory: {error}", "TMPDIR=/a/directory names another"
        )
    if sys.platform != "win32" and os.statvfs(path).f_flag & os.ST_NOEXEC:
        return Check("temp dir", Status.FAIL, f"{path} is mounted noexec", "TMPDIR=/a/directory names another")
    return Check("temp dir", Status.OK, f"{path} can be written and executed from")


def check_state_dir() -> Check:
    """History and log go there."""
    path = state_dir()
    if path is None:
        return Check("state dir", Status.NOTE, "none can be written: history and log are not kept")
    return Check("state dir", Status.OK, str(path))


def check_port(config: ServerConfig) -> Check:
    """Whether the server could listen."""
    try:
        sockets = bind(config)
    except RunnerError as error:
        return Check("port", Status.FAIL, error.message, error.hint)
    addresses = urls(sockets)
    for listener in sockets:
        listener.close()
    return Check("port", Status.OK, f"free: {' and '.join(addresses)}")


def check_model(model: ChosenModel) -> Check:
    """What the header says, and for a model inside an executable the hash of all its bytes."""
    words = [f"{model.name}: {model.header.architecture} {model.header.file_type}, {model.file.length / MIB:,.0f} MiB"]
    if model.bundle is not None:
        words.append(f"at offset {model.file.offset:,} of {Path(model.file.path).name}")
        try:
            verify(model.bundle, lambda _: None)
        except RunnerError as error:
            return Check("model", Status.FAIL, error.message)
        words.append("hash as in the manifest")
    return Check("model", Status.OK, ", ".join(words))


def check_kv_cache(model: ChosenModel, config: EngineConfig) -> Check:
    """The slots that would be made in this machine's memory, and what their cells take. The memory of a GPU is not looked at."""
    header = model.header
    try:
        capacity = choose_capacity(
            Wanted(config.n_slots, config.n_ctx_slot),
            n_ctx_train=header.n_ctx_train,
            slot=SlotMemory.of(header, config),
            weights_bytes=header.weights_bytes,
            memory_bytes=available_memory(),
        )
    except ConfigError as error:
        return Check("kv cache", Status.NOTE, error.message, error.hint)
    slots = f"{counted(capacity.n_slots, 'slot')} x {capacity.n_ctx_slot:,} tokens"
    return Check("kv cache", Status.OK, f"{slots}, {kv_text(capacity.kv_bytes, config, capacity.n_pool)}")
