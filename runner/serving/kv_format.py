"""The bytes of one file of parked cells.

    [ magic | format | length of the header | BLAKE2b of the header ][ header: msgpack ][ cells ][ checkpoint ] ...

The header holds a hash of all that follows it, the BLAKE2b of the BLAKE2bs of each MiB: what was read is what was written, or it is
refused. It shows damage, not forgery: whoever can write into the directory is its owner. Payloads go out of and into memory without a
copy. llama.cpp understands the cells and checkpoints, nobody else does; the tokens are a conversation that can be read: see
`PrivateDirectory` for who may.
"""

import hashlib
import mmap
import os
import struct
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from typing import Annotated, Final

import msgspec

from runner.serving.kv_key import FORMAT, StateKey

MAGIC: Final = b"slotkv\r\n"
DIGEST_BYTES: Final = 32

_PREFIX: Final = struct.Struct(f"<8sII{DIGEST_BYTES}s")
# What a look at a header reads at once: that of 2,000 tokens.
_FIRST_READ: Final = 8192
_BLOCK_BYTES: Final = 1 << 20
_HASHERS: Final = 4
# From this size on a buffer is a mapping of its own: freed, its memory goes back to the system at once, whole.
_LEAST_MAPPED: Final = 1 << 16


class DamagedFile(Exception):
    """A file that is not what was written. `str(error)` says why."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """What llama.cpp needs to cut cells back to the first `pos`: a partial state."""

    pos: int
    data: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """The state of a slot outside llama.cpp. `tokens[i]` lies in the cell at position i.

    `domain` and `session` are digests or empty, `used_at` is in seconds of the wall clock. The views are of single bytes; those of a state
    that was read are writable and own their memory. What is being saved must not change until it is.
    """

    tokens: list[int]
    domain: str
    session: str
    cells: memoryview
    checkpoints: tuple[SavedCheckpoint, ...]
    used_at: float

    @property
    def n_bytes(self) -> int:
        """Of cells and checkpoints."""
        return sum(part.nbytes for part in self.parts)

    @property
    def parts(self) -> list[memoryview]:
        """In the order in which they are written."""
        return [self.cells, *(checkpoint.data for checkpoint in self.checkpoints)]


# llama.cpp's llama_token.
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of itself. `lengths` are those of the parts in bytes, `positions` those of the checkpoints."""

    key: StateKey
    model_name: str
    tokens: list[_Token]
    domain: str
    session: str
    lengths: list[int]
    positions: list[int]
    payload_digest: bytes


def encode_header(key: StateKey, model_name: str, state: SavedState) -> bytes:
    """Prefix and header of a state's file. Hashes the payload."""
    header = msgspec.msgpack.encode(
        Header(
            key=key,
            model_name=model_name,
            tokens=state.tokens,
            domain=state.domain,
            session=state.session,
            lengths=[part.nbytes for part in state.parts],
            positions=[checkpoint.pos for checkpoint in state.checkpoints],
            payload_digest=_payload_digest(state.parts),
        )
    )
    return _PREFIX.pack(MAGIC, FORMAT, len(header), _digest(header)) + header


def write_all(file: FileIO, parts: Iterable[bytes | memoryview]) -> None:
    """Write the parts one after the other. Raises OSError."""
    for part in parts:
        view = memoryview(part)
        while view.nbytes:
            view = view[file.write(view) :]


def read_header(file: FileIO) -> Header:
    """The header of a file from its start, checked; the file's position is behind it. Raises DamagedFile and OSError."""
    size = os.fstat(file.fileno()).st_size
    first = file.read(_FIRST_READ) or b""
    if first[: len(MAGIC)] != MAGIC[: len(first)]:
        raise DamagedFile("it is none of ours")
    if len(first) < _PREFIX.size:
        raise DamagedFile(f"it ends after {len(first)} bytes")
    _, format_number, n_header, digest = _PREFIX.unpack_from(first)
    if format_number != FORMAT:
        raise DamagedFile(f"its format is {format_number}; this program reads {FORMAT}")
    end = _PREFIX.size + n_header
    if end > size:
        raise DamagedFile(f"its header ends at {end}, the file at {size}")
    text = bytearray(n_header)
    n_known = min(n_header, len(first) - _PREFIX.size)
    text[:n_known] = first[_PREFIX.size : _PREFIX.size + n_known]
    file.seek(_PREFIX.size + n_known)
    _read_into(file, memoryview(text)[n_known:])
    if _digest(text) != digest:
        raise DamagedFile("its header was altered")
    header = _decode(bytes(text))
    if end + sum(header.lengths) != size:
        raise DamagedFile(f"it has {size} bytes and must have {end + sum(header.lengths)}")
    return header


def read_parts(file: FileIO, header: Header) -> list[memoryview]:
    """The payload behind a header that was read. Raises DamagedFile, OSError, and MemoryError where there is no room for it."""
    parts = [_buffer(n_bytes) for n_bytes in header.lengths]
    for part in parts:
        _read_into(file, part)
    if _payload_digest(parts) != header.payload_digest:
        raise DamagedFile("its cells were altered")
    return parts


def is_ours(file: FileIO) -> bool:
    """Whether a file begins as ours do, or was cut off where it still did."""
    first = file.read(len(MAGIC)) or b""
    return first == MAGIC[: len(first)]


def _decode(text: bytes) -> Header:
    try:
        header = msgspec.msgpack.decode(text, type=Header)
    except msgspec.MsgspecError as error:
        raise DamagedFile(f"its header cannot be read: {error}") from error
    if len(header.lengths) != 1 + len(header.positions) or min(header.lengths) < 0:
        raise DamagedFile(f"its header names {len(header.lengths)} parts and {len(header.positions)} checkpoints")
    return header


def _digest(data: bytes | bytearray | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _payload_digest(parts: Iterable[memoryview]) -> bytes:
    """Made by several threads: a request waits for it, and one that decodes is held up by a busy CPU as long as it is busy."""
    blocks = [part[start : start + _BLOCK_BYTES] for part in parts for start in range(0, part.nbytes, _BLOCK_BYTES)]
    with ThreadPoolExecutor(_HASHERS) as hashers:
        return _digest(b"".join(hashers.map(_digest, blocks)))


def _read_into(file: FileIO, view: memoryview) -> None:
    while view.nbytes:
        n_read = file.readinto(view)
        if not n_read:
            raise DamagedFile(f"it ends {view.nbytes} bytes early")
        view = view[n_read:]


def _buffer(n_bytes: int) -> memoryview:
    return memoryview(_mapping(n_bytes) if n_bytes >= _LEAST_MAPPED else bytearray(n_bytes))


def _mapping(n_bytes: int) -> mmap.mmap:
    """Private pages: the default, shared ones, take half as long again to fill, and huge ones five times as long where none are at hand."""
    if sys.platform == "win32":
        return mmap.mmap(-1, n_bytes)
    return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
