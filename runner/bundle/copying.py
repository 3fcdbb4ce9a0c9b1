"""Writes pieces of files into a new file that appears under its name whole and verified, or not at all."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final

from runner.bundle.digest import sha256
from runner.bundle.source import Piece
from runner.errors import ConfigError, ModelDamaged

CHUNK_BYTES: Final = 8 * 1024 * 1024
GATHERED_BYTES: Final = 1024 * 1024

Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call."""


@contextmanager
def new_file(path: Path, mode: int = 0o644) -> Iterator[FileIO]:
    """A file beside `path` that takes its name when the block ends well and is removed when it does not. Raises ConfigError."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name a file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is a device, a pipe or a socket; name a file")
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "w+b", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except OSError as error:
        raise ConfigError(_sentence(error, path)) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def copy_pieces(pieces: tuple[Piece, ...], target: FileIO, progress: Progress) -> str:
    """Append the pieces and return the SHA-256 of what was read; hashing runs beside writing. ModelDamaged where a file ends early."""
    digest = sha256()
    with ThreadPoolExecutor(1) as hasher:
        for chunk in _chunks(pieces):
            hashed = hasher.submit(digest.update, chunk)
            write_all(target, chunk)
            hashed.result()
            progress(len(chunk))
    return digest.hexdigest()


def hash_range(file: FileIO, offset: int, length: int, progress: Progress) -> str:
    """SHA-256 of a part of a file; the next chunk is read while the last is hashed."""
    digest = sha256()
    file.seek(offset)
    with ThreadPoolExecutor(1) as hasher:
        pending = None
        for chunk in _read_exactly(file, length, Path(file.name).name if isinstance(file.name, str) else "the new file"):
            if pending is not None:
                pending.result()
            pending = hasher.submit(digest.update, chunk)
            progress(len(chunk))
    return digest.hexdigest()


def write_all(target: FileIO, data: bytes) -> None:
    """Write all of `data`: a raw file may take less at once."""
    view = memoryview(data)
    while view:
        view = view[target.write(view) :]


def _chunks(pieces: tuple[Piece, ...]) -> Iterator[bytes]:
    """Small pieces are gathered: a merged model has hundreds of paddings of a few bytes."""
    gathered = bytearray()
    for piece in pieces:
        for chunk in _piece_chunks(piece):
            if len(chunk) < GATHERED_BYTES:
                gathered += chunk
            if gathered and (len(chunk) >= GATHERED_BYTES or len(gathered) >= CHUNK_BYTES):
                yield bytes(gathered)
                gathered.clear()
            if len(chunk) >= GATHERED_BYTES:
                yield chunk
    if gathered:
        yield bytes(gathered)


def _piece_chunks(piece: Piece) -> Iterator[bytes]:
    if piece.data is not None:
        yield piece.data
    elif piece.path is None:
        yield bytes(piece.length)
    else:
        with piece.path.open("rb", buffering=0) as file:
            file.seek(piece.offset)
            yield from _read_exactly(file, piece.length, piece.path.name)


def _read_exactly(file: FileIO, length: int, label: str) -> Iterator[bytes]:
    while length:
        chunk = file.read(min(length, CHUNK_BYTES))
        if not chunk:
            raise ModelDamaged(f"{label} ends {length} bytes early")
        length -= len(chunk)
        yield chunk


def _sentence(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{path} cannot be written: there is no space left in {path.parent}"
    return f"{path} cannot be written: {error.strerror or error}"
