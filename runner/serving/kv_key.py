"""What a file of parked cells is valid for. Cells of another key mean something else, or nothing: they are never loaded."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from runner.bundle.header import Header
from runner.config import ModelFile
from runner.errors import ModelError

FORMAT: Final = 1  # of our files

_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096


class StateKey(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what the bytes of a state are. The fields are those of llama_context_params as they are in effect.

    `n_streams`: slots in partitioned mode, else 1. `rope_*`: frequency base and scale (0: the model's own) and `llama_rope_scaling_type`.
    `adapters`: one identity each, in the order in which they are applied.
    """

    model_id: str
    llama_cpp_version: str
    cache_type_k: str
    cache_type_v: str
    flash_attn: bool
    n_streams: int
    n_ctx_slot: int
    kv_unified: bool
    swa_full: bool
    rope_freq_base: float
    rope_freq_scale: float
    rope_scaling_type: int
    adapters: tuple[str, ...] = ()
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that begin the names of the key's files. A file's header holds the whole key."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()


def model_id(model: ModelFile, header: Header, sha256: str | None) -> str:
    """Which weights these are, without reading them all: a hash over facts about them. Raises ModelError where the file cannot be read.

    Always of its length, its header and samples of its data, with one more that tells it from every other:

    - `sha256`, where a manifest has it: exact, and the same wherever the executable is copied to.
    - Else, as a plain GGUF brings no hash and to make one reads gigabytes at each start, when it was last written (mtime) and last changed
      in any way (ctime, which nobody can set). Whoever writes into the file or puts another in its place makes another identity, whatever
      part differs. The price is an identity too many: a file that was copied, moved or touched finds nothing and computes once more.

    The samples are for hashes that are not true and for file systems whose times are coarse: other weights of one shape differ everywhere.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"slotfile.model")
    try:
        with Path(model.path).open("rb") as file:
            found = os.fstat(file.fileno())
            origin = f"{found.st_mtime_ns} {found.st_ctime_ns}" if sha256 is None else sha256
            digest.update(f"{model.length} {header.data_offset} {origin}\n".encode())
            for start, n_bytes in _looked_at(model.length, header.data_offset):
                file.seek(model.offset + start)
                digest.update(file.read(n_bytes))
    except OSError as error:
        raise ModelError(f"{model.path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _looked_at(length: int, data_offset: int) -> Iterator[tuple[int, int]]:
    """Start and length of the header, and of samples evenly from the first to the last of the tensors' data."""
    yield 0, data_offset
    room = max(0, length - data_offset - _SAMPLE_BYTES)
    for number in range(_SAMPLES):
        yield data_offset + room * number // (_SAMPLES - 1), _SAMPLE_BYTES
