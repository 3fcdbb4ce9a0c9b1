"""A model's weights and vocabulary, mapped where they lie."""

import ctypes
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from runner.config import ModelFile
from runner.errors import ModelError
from runner.llama.library import Device, Library
from runner.llama.vocabulary import Vocabulary

_META_BYTES = 1 << 16
_SPLIT_NAME = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


class Model:
    """A loaded llama_model. `handle` belongs to this object; `close` frees it."""

    def __init__(
        self,
        library: Library,
        file: ModelFile,
        *,
        n_gpu_layers: int,
        devices: Sequence[Device] | None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Load `file`. `devices` None: all that the back ends offer. Raises ModelError where llama.cpp does."""
        self._library, self._api = library, library.api
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        if devices is not None:
            self._device_list = (ctypes.c_void_p * (len(devices) + 1))(*(d.handle for d in devices), None)
            params.devices = ctypes.cast(self._device_list, ctypes.c_void_p)
        if progress is not None:
            self._progress = self._api.llama_progress_callback(_keep_loading(progress))
            params.progress_callback = self._progress
        self.handle: int = _load(self._api, file, params)
        if not self.handle:
            raise ModelError(f"llama.cpp could not load the model in {file.path}")
        if not self._api.llama_model_has_decoder(self.handle):
            raise ModelError(f"The model in {file.path} has no decoder: it cannot generate text")
        self.vocabulary = Vocabulary(library, self.handle)

    def meta(self, key: str) -> str | None:
        """A scalar metadata value as text; None where the file has none or it is longer than 64 KiB."""
        buffer = ctypes.create_string_buffer(_META_BYTES)
        n = self._api.llama_model_meta_val_str(self.handle, key.encode(), buffer, _META_BYTES)
        return None if n < 0 or n >= _META_BYTES else buffer.value.decode("utf-8", errors="replace")

    @property
    def architecture(self) -> str:
        """`general.architecture`, as "llama" or "gemma3"."""
        return self.meta("general.architecture") or "unknown"

    @property
    def chat_template(self) -> str | None:
        """The Jinja template the file carries."""
        template = self._api.llama_model_chat_template(self.handle, None)
        return template.decode("utf-8", errors="replace") if template else None

    @property
    def description(self) -> str:
        """Architecture, size and quantisation in llama.cpp's words."""
        buffer = ctypes.create_string_buffer(256)
        self._api.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", errors="replace")

    @property
    def n_ctx_train(self) -> int:
        """Tokens of context the model was trained on."""
        return int(self._api.llama_model_n_ctx_train(self.handle))

    @property
    def n_swa(self) -> int:
        """The sliding window in tokens, 0 where there is none."""
        return int(self._api.llama_model_n_swa(self.handle))

    @property
    def n_params(self) -> int:
        """Weights, counted."""
        return int(self._api.llama_model_n_params(self.handle))

    @property
    def size_bytes(self) -> int:
        """Weights, in bytes as stored."""
        return int(self._api.llama_model_size(self.handle))

    @property
    def n_layers(self) -> int:
        """Transformer blocks."""
        return int(self._api.llama_model_n_layer(self.handle))

    @property
    def can_be_cut(self) -> bool:
        """Whether a prefix of a slot's cells can be kept: recurrent and hybrid memories have one state and no cells."""
        return not (self._api.llama_model_is_recurrent(self.handle) or self._api.llama_model_is_hybrid(self.handle))

    def close(self) -> None:
        """Free the weights."""
        if self.handle:
            self._api.llama_model_free(self.handle)
            self.handle = 0


def _keep_loading(progress: Callable[[float], None]) -> Callable[[float, Any], bool]:
    def report(fraction: float, _data: Any) -> bool:
        progress(fraction)
        return True

    return report


def _load(api: Any, file: ModelFile, params: Any) -> int:
    if file.offset == 0 and _SPLIT_NAME.search(file.path):
        return api.llama_model_load_from_file(os.fsencode(file.path), params) or 0
    libc = _c_runtime()
    stream = libc.fopen(os.fsencode(file.path), b"rb")
    if not stream:
        raise ModelError(f"The model file {file.path} cannot be opened")
    try:
        if _seek(libc, stream, file.offset):
            raise ModelError(f"The model file {file.path} has no position {file.offset}")
        return api.llama_model_load_from_file_ptr(stream, params) or 0
    finally:
        libc.fclose(stream)


def _c_runtime() -> ctypes.CDLL:
    """The C library whose FILE* libllama understands: on Windows the one that its compiler links to."""
    libc = ctypes.CDLL("ucrtbase") if sys.platform == "win32" else ctypes.CDLL(None)
    libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
    libc.fclose.argtypes = [ctypes.c_void_p]
    return libc


def _seek(libc: ctypes.CDLL, stream: int, offset: int) -> int:
    seek = libc["_fseeki64" if sys.platform == "win32" else "fseeko"]
    seek.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    return int(seek(stream, offset, os.SEEK_SET))
