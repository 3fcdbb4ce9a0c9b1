"""Reads the header of a GGUF file: metadata and tensor table, checked against the file's length before native code sees it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the limits are those of llama.cpp's own reader (ggml/src/gguf.cpp),
so that what passes here is not refused there for its form. Nothing of the tensor data is read.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from runner.bundle.header import DEFAULT_ALIGNMENT, TENSOR_TYPES, Header, LongArray, Scalar, Tensor, Value, shown
from runner.config import ModelFile
from runner.errors import ModelDamaged

MAGIC: Final = b"GGUF"
# How executables of Linux, Windows and macOS begin.
PROGRAMS: Final = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
MAX_ALIGNMENT: Final = 1 << 20
MAX_STRING_BYTES: Final = 1 << 30
MAX_ARRAY_LENGTH: Final = 1 << 30
MAX_KEPT_ARRAY: Final = 4096
MAX_NAME_BYTES: Final = 63
MAX_DIMS: Final = 4
MAX_INT64: Final = (1 << 63) - 1

STRING: Final = 8
ARRAY: Final = 9
SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
U32: Final = SCALARS[4]
U64: Final = SCALARS[10]


def read_header(model: ModelFile | Path) -> Header:
    """Read and check a GGUF's header. Raises ModelDamaged with one sentence; never reads past the file or the stated part of it."""
    place = model if isinstance(model, ModelFile) else ModelFile(str(model), 0, _size_of(model))
    try:
        with Path(place.path).open("rb") as file:
            n_available = os.fstat(file.fileno()).st_size - place.offset
            if min(n_available, place.length) < 24:
                raise ModelDamaged(f"{place.path} is no GGUF model: it has {max(0, min(n_available, place.length))} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as whole:
                end = min(place.offset + place.length, len(whole))
                with whole[place.offset : end] as part:
                    return _Parser(part, Path(place.path).name).header()
    except OSError as error:
        raise ModelDamaged(f"{place.path} cannot be read: {error.strerror or error}") from error


def _size_of(path: Path) -> int:
    try:
        if not path.is_file():
            raise ModelDamaged(f"{path} is no file" if path.exists() else f"There is no file {path}")
        return path.stat().st_size
    except (OSError, ValueError) as error:
        raise ModelDamaged(f"{path} cannot be read: {error}") from error


class _Parser:
    """Walks once over the bytes of a header. Every read is checked against the end first."""

    def __init__(self, data: memoryview, label: str) -> None:
        self._data = data
        self._label = label
        self._end = len(data)
        self._at = 0

    def header(self) -> Header:
        version, n_tensors, n_kv = self._preamble()
        metadata, spans = self._metadata(n_kv)
        alignment = self._alignment(metadata)
        tensors = tuple(self._tensors(n_tensors))
        data_offset = -(-self._at // alignment) * alignment if tensors else self._at
        self._check_layout(tensors, alignment, data_offset)
        return Header(version, metadata, spans, tensors, alignment, data_offset, self._end)

    def _fail(self, what: str) -> ModelDamaged:
        return ModelDamaged(f"{self._label} is damaged: {what}")

    def _take(self, n_bytes: int, what: str) -> int:
        start = self._at
        if n_bytes > self._end - start:
            raise self._fail(f"{what} needs {n_bytes} bytes at {start}, the file ends at {self._end}")
        self._at = start + n_bytes
        return start

    def _u32(self, what: str) -> int:
        return int(U32.unpack_from(self._data, self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(U64.unpack_from(self._data, self._take(8, what))[0])

    def _string(self, what: str, limit: int = MAX_STRING_BYTES, *, strict: bool = True) -> str:
        length = self._u64(what)
        if length > limit:
            raise self._fail(f"{what} is {length} bytes long; the limit is {limit}")
        start = self._take(length, what)
        try:
            return str(self._data[start : start + length], "utf-8", "strict" if strict else "replace")
        except UnicodeDecodeError as error:
            raise self._fail(f"{what} is not UTF-8") from error

    def _preamble(self) -> tuple[int, int, int]:
        if bytes(self._data[:4]) != MAGIC:
            first = bytes(self._data[:4])
            if first.startswith(PROGRAMS):
                raise ModelDamaged(f"{self._label} is a program without a model: it was cut off, or is none of slotfile's executables")
            raise ModelDamaged(f"{self._label} is no GGUF model: it starts with {first!r}, not {MAGIC!r}")
        self._at = 4
        version, n_tensors, n_kv = self._u32("the version"), self._u64("the tensor count"), self._u64("the metadata count")
        if version not in (2, 3):
            raise self._fail(f"its GGUF version is {version}; 2 and 3 can be read, little-endian")
        # The shortest entry takes 13 bytes of metadata or 24 bytes of tensor table: larger counts cannot be true.
        for name, count, shortest in (("tensors", n_tensors, 24), ("metadata entries", n_kv, 13)):
            if count * shortest > self._end - self._at:
                raise self._fail(f"it announces {count} {name}; its {self._end} bytes hold {(self._end - self._at) // shortest} at most")
        return version, n_tensors, n_kv

    def _metadata(self, n_kv: int) -> tuple[dict[str, Value | LongArray], dict[str, tuple[int, int]]]:
        metadata: dict[str, Value | LongArray] = {}
        spans = {}
        for _ in range(n_kv):
            start = self._at
            key = self._string("a metadata key", (1 << 16) - 1)
            if not key or key in metadata:
                raise self._fail(f"the metadata key {shown(key)} stands twice" if key else "a metadata key is empty")
            metadata[key] = self._value(key, self._u32(f"the type of {key}"))
            spans[key] = (start, self._at)
        return metadata, spans

    def _value(self, key: str, type_id: int) -> Value | LongArray:
        if type_id == STRING:
            return self._string(key, strict=False)
        if type_id == ARRAY:
            return self._array(key)
        return self._scalar(key, type_id)

    def _scalar(self, key: str, type_id: int) -> Scalar:
        layout = SCALARS.get(type_id)
        if layout is None:
            raise self._fail(f"{shown(key)} has the unknown value type {type_id}")
        value: Scalar = layout.unpack_from(self._data, self._take(layout.size, key))[0]
        return value

    def _array(self, key: str) -> tuple[Scalar, ...] | LongArray:
        type_id, length = self._u32(key), self._u64(key)
        if length > MAX_ARRAY_LENGTH:
            raise self._fail(f"{shown(key)} announces {length} entries; the limit is {MAX_ARRAY_LENGTH}")
        if type_id == STRING:
            self._skip_strings(key, length)
            return LongArray(length)
        layout = SCALARS.get(type_id)
        if layout is None:
            raise self._fail(f"{shown(key)} has the unknown entry type {type_id}")
        start = self._take(length * layout.size, key)
        if length > MAX_KEPT_ARRAY:
            return LongArray(length)
        return struct.unpack_from(f"<{length}{layout.format[1:]}", self._data, start)

    def _skip_strings(self, key: str, length: int) -> None:
        """Step over `length` strings. The loop is bare: half a million entries must pass in a few hundredths of a second."""
        if length * 8 > self._end - self._at:
            raise self._fail(f"{shown(key)} announces {length} strings; the file ends at {self._end}")
        at, data, unpack = self._at, self._data, U64.unpack_from
        try:
            for _ in range(length):
                at += 8 + unpack(data, at)[0]
        except (struct.error, OverflowError) as error:
            raise self._fail(f"a string of {shown(key)} reaches past the file's end at {self._end}") from error
        if at > self._end:
            raise self._fail(f"a string of {shown(key)} ends at {at}, the file ends at {self._end}")
        self._at = at

    def _alignment(self, metadata: dict[str, Value | LongArray]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._fail(f"its alignment is {shown(alignment)}; it must be a power of two up to {MAX_ALIGNMENT}")
        return alignment

    def _tensors(self, n_tensors: int) -> Iterator[Tensor]:
        names = set()
        for _ in range(n_tensors):
            tensor = self._tensor()
            if tensor.name in names:
                raise self._fail(f"the tensor {tensor.name!r} stands twice")
            names.add(tensor.name)
            yield tensor

    def _tensor(self) -> Tensor:
        name = self._string("a tensor name", MAX_NAME_BYTES)
        n_dims = self._u32(f"tensor {name!r}")
        if n_dims > MAX_DIMS:
            raise self._fail(f"the tensor {name!r} has {n_dims} dimensions; the limit is {MAX_DIMS}")
        shape = tuple(self._u64(f"tensor {name!r}") for _ in range(n_dims))
        type_id, offset = self._u32(f"tensor {name!r}"), self._u64(f"tensor {name!r}")
        n_elements = 1
        for n in shape:
            n_elements *= n
        if type_id not in TENSOR_TYPES:
            raise self._fail(f"the tensor {name!r} has the unknown type {type_id}")
        if max(shape, default=0) > MAX_INT64 or n_elements > MAX_INT64:
            raise self._fail(f"the tensor {name!r} has the impossible shape {list(shape)}")
        _, per_block, block_bytes = TENSOR_TYPES[type_id]
        if (shape[0] if shape else 1) % per_block:
            raise self._fail(f"the tensor {name!r} has the shape {list(shape)}; its type takes rows of a multiple of {per_block}")
        return Tensor(name, shape, type_id, offset, n_elements, n_elements // per_block * block_bytes)

    def _check_layout(self, tensors: tuple[Tensor, ...], alignment: int, data_offset: int) -> None:
        """Tensors lie one after the other, each padded to the alignment; the last may lack its padding."""
        expected = 0
        for tensor in tensors:
            if tensor.offset != expected:
                raise self._fail(f"the tensor {tensor.name!r} lies at {tensor.offset}; it must lie at {expected}")
            ends = data_offset + expected + tensor.n_bytes
            if ends > self._end:
                raise self._fail(f"the tensor {tensor.name!r} ends at {ends}, the file ends at {self._end}: it is not complete")
            expected += -(-tensor.n_bytes // alignment) * alignment
