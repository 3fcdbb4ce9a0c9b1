"""llama.cpp's shared libraries: found, loaded once, and asked which devices they offer.

The package `llama_cpp` imports numpy and a chat framework on sight; its low-level module needs neither. So a bare package
object with the right search path stands in for it, and only `llama_cpp.llama_cpp` is imported (0.3 s and 70 MB saved).
"""

import ctypes
import functools
import importlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import ModelError

# Values of enum ggml_log_level (ggml.h).
LOG_WARN = 3
LOG_ERROR = 4
# Values of enum ggml_backend_dev_type (ggml-backend.h).
DEVICE_KINDS = ("cpu", "gpu", "igpu", "accel", "meta")

LogSink = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class Device:
    """One back-end device. `handle` is a ggml_backend_dev_t; memory in bytes, 0 where the driver does not say."""

    handle: int
    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int


class Library:
    """The loaded libraries: `api` is the low-level binding, `held` the same functions bound so that they keep the GIL.

    A call that takes microseconds must not give the GIL away: beside a busy thread winning it back costs milliseconds.
    """

    def __init__(self, log: LogSink) -> None:
        self.api: Any = _import_binding()
        self.lib_dir = Path(str(self.api.__file__)).parent / "lib"
        self.held = ctypes.PyDLL(self.api._lib._name)  # noqa: SLF001 - the binding has no public name for its library's path
        self._log_callback = self.api.llama_log_callback(self._forward(log))
        self.api.llama_log_set(self._log_callback, None)
        self._ggml = ctypes.CDLL(str(_ggml_path(self.lib_dir)))
        self._declare()
        self._ggml.ggml_backend_load_all_from_path(os.fsencode(self.lib_dir))
        self.api.llama_backend_init()
        if not self._ggml.ggml_backend_dev_count():
            raise ModelError(f"No back end could be loaded from {self.lib_dir}: this CPU may lack what every one of them needs")

    def devices(self) -> list[Device]:
        """All devices that the loaded back ends found, in their order of registration."""
        ggml, found = self._ggml, []
        for index in range(ggml.ggml_backend_dev_count()):
            handle = ggml.ggml_backend_dev_get(index)
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            ggml.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
            kind = DEVICE_KINDS[ggml.ggml_backend_dev_type(handle)]
            name, description = (
                f(handle).decode(errors="replace") for f in (ggml.ggml_backend_dev_name, ggml.ggml_backend_dev_description)
            )
            found.append(Device(handle, name, description, kind, free.value, total.value))
        return found

    def cpu_library(self) -> str:
        """The file name of the CPU back end that was picked for this processor; empty where the OS does not tell."""
        try:
            maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        match = re.search(r"(libggml-cpu[^/\s]*)", maps)
        return match[1] if match else ""

    def version(self) -> str:
        """llama.cpp's own version string."""
        return str(self.api.llama_version().decode()) if hasattr(self.api, "llama_version") else "unknown"

    def fingerprint(self) -> str:
        """Of the file that was loaded: two builds of one version may lay out a state in two ways."""
        import hashlib  # loads OpenSSL; only an engine with files asks

        return hashlib.blake2b(Path(self.api._lib._name).read_bytes(), digest_size=16).hexdigest()  # noqa: SLF001 - see above

    def hold(self, name: str, restype: Any, *argtypes: Any) -> Any:
        """A function of libllama that keeps the GIL during the call."""
        function = self.held[name]
        function.restype, function.argtypes = restype, list(argtypes)
        return function

    def _declare(self) -> None:
        ggml = self._ggml
        ggml.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
        ggml.ggml_backend_load_all_from_path.restype = None
        ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
        ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
        ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
        for name in ("ggml_backend_dev_name", "ggml_backend_dev_description"):
            getattr(ggml, name).argtypes = [ctypes.c_void_p]
            getattr(ggml, name).restype = ctypes.c_char_p
        ggml.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
        ggml.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]
        ggml.ggml_backend_dev_memory.restype = None

    @staticmethod
    def _forward(log: LogSink) -> Callable[[int, bytes | None, Any], None]:
        def forward(level: int, text: bytes | None, _data: Any) -> None:
            log(level, text.decode("utf-8", errors="replace").rstrip() if text else "")

        return forward


@functools.cache
def _import_binding() -> types.ModuleType:
    if "llama_cpp" not in sys.modules:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or not spec.submodule_search_locations:
            raise ModelError("llama-cpp-python is not installed", hint="make setup")
        package = types.ModuleType("llama_cpp")
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")


def _ggml_path(lib_dir: Path) -> Path:
    """The copy of libggml that libllama is linked to: back ends registered in another copy are seen by nobody."""
    for name in ("libggml.so.0", "libggml.so", "libggml.0.dylib", "libggml.dylib", "ggml.dll", "libggml.dll"):
        if (lib_dir / name).exists():
            return lib_dir / name
    raise ModelError(f"No ggml library lies in {lib_dir}")
