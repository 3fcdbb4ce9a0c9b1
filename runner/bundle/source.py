"""A GGUF on disk as the pieces that go into an executable: one file as it is, or splits and badly aligned data written anew.

Nothing is copied here: a `Source` says which bytes of which files, with what between them, make one valid GGUF.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from runner.bundle.gguf import MAGIC, read_header
from runner.bundle.header import DEFAULT_ALIGNMENT, Header, Tensor
from runner.errors import ModelDamaged

SPLIT_NAME: Final = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")
ALIGNMENT_KEY: Final = "general.alignment"


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes: `data` as it stands, or the bytes of `path` from `offset`, or zeros where there is neither."""

    length: int
    data: bytes | None = None
    path: Path | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """One whole GGUF. `paths` are the files it is read from; `notes` say what was changed on the way."""

    pieces: tuple[Piece, ...]
    paths: tuple[Path, ...]
    alignment: int
    notes: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """Bytes of the GGUF."""
        return sum(piece.length for piece in self.pieces)


def open_source(path: Path) -> Source:
    """Read what is needed to pack the model at `path` (of splits: any part). Raises ModelDamaged."""
    header = read_header(path)
    if header.split_count > 1:
        return _merged(_split_paths(path, header))
    if header.alignment % DEFAULT_ALIGNMENT:
        note = f"tensors aligned to {DEFAULT_ALIGNMENT} bytes instead of {header.alignment}"
        return _written_anew((path,), (header,), note)
    header.check_usable()
    return Source((Piece(header.size, path=path),), (path,), header.alignment)


def _split_paths(path: Path, header: Header) -> tuple[Path, ...]:
    match = SPLIT_NAME.match(path.name)
    if match is None or int(match["count"]) != header.split_count:
        raise ModelDamaged(f"{path.name} is part {header.split_no + 1} of {header.split_count}; its name must end in -00001-of-0000N.gguf")
    names = [f"{match['stem']}-{no:05}-of-{match['count']}.gguf" for no in range(1, header.split_count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise ModelDamaged(f"{path.name} is part {header.split_no + 1} of {header.split_count}; {missing[0]} is missing")
    return tuple(path.parent / name for name in names)


def _merged(paths: tuple[Path, ...]) -> Source:
    headers = tuple(read_header(path) for path in paths)
    for no, (path, header) in enumerate(zip(paths, headers, strict=True)):
        if (header.split_no, header.split_count) != (no, len(paths)):
            raise ModelDamaged(
                f"{path.name} says that it is part {header.split_no + 1} of {header.split_count}, not {no + 1} of {len(paths)}"
            )
    n_tensors = sum(len(header.tensors) for header in headers)
    announced = headers[0].metadata.get("split.tensors.count", n_tensors)
    if announced != n_tensors:
        raise ModelDamaged(f"{paths[0].name} announces {announced} tensors; its {len(paths)} parts hold {n_tensors}")
    return _written_anew(paths, headers, f"{len(paths)} parts joined")


def _written_anew(paths: tuple[Path, ...], headers: tuple[Header, ...], note: str) -> Source:
    """One header for the tensors of all files; their data follows in the same order, each padded to the alignment."""
    alignment = max(DEFAULT_ALIGNMENT, headers[0].alignment)
    tensors = [tensor for header in headers for tensor in header.tensors]
    kept = {key: value for key, value in headers[0].metadata.items() if _is_kept(key)}
    replace(headers[0], metadata=kept, tensors=tuple(tensors), alignment=alignment).check_usable()
    head = _head(paths[0], headers[0], tensors, alignment)
    pieces = [Piece(len(head), data=head)]
    for path, header in zip(paths, headers, strict=True):
        pieces += _data(path, header, alignment)
    return Source(tuple(pieces), paths, alignment, (note,))


def _head(path: Path, first: Header, tensors: list[Tensor], alignment: int) -> bytes:
    with path.open("rb") as file:
        old = file.read(first.data_offset)
    entries = [old[start:end] for key, (start, end) in first.spans.items() if _is_kept(key)]
    if alignment != DEFAULT_ALIGNMENT:
        entries.append(_string(ALIGNMENT_KEY.encode()) + struct.pack("<II", 4, alignment))
    out = bytearray(MAGIC + struct.pack("<IQQ", first.version, len(tensors), len(entries)) + b"".join(entries))
    offset = 0
    for tensor in tensors:
        out += _string(tensor.name.encode()) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        out += struct.pack("<IQ", tensor.type_id, offset)
        offset += tensor.n_bytes + _padding(tensor.n_bytes, alignment)
    return bytes(out) + bytes(_padding(len(out), alignment))


def _is_kept(key: str) -> bool:
    return not key.startswith("split.") and key != ALIGNMENT_KEY


def _data(path: Path, header: Header, alignment: int) -> Iterator[Piece]:
    for tensor in header.tensors:
        yield Piece(tensor.n_bytes, path=path, offset=header.data_offset + tensor.offset)
        yield Piece(_padding(tensor.n_bytes, alignment))


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _padding(n_bytes: int, alignment: int) -> int:
    return -n_bytes % alignment
