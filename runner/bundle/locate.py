"""Finds the model inside an executable without scanning the file.

    [ bootloader ][ pad ][ GGUF ][ pad ][ manifest JSON ][ footer ][ PyInstaller PKG … cookie ]
                   ^ multiple of 64 KiB                  ^ fixed size, ends where the PKG starts

The cookie at the file's end gives the length of the PKG (the bootloader finds it the same way), the footer lies right before the
PKG and says where everything else is. Positions are counted from the end, so the magic bytes may stand anywhere in the model.
"""

import os
import struct
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from runner.bundle.manifest import MAX_MANIFEST_BYTES, Manifest, decode
from runner.config import ModelFile
from runner.errors import ConfigError, ModelDamaged

# From PyInstaller's CArchiveReader: magic, length of the PKG, offset and length of its table, Python version, name of libpython.
COOKIE: Final = struct.Struct("!8sIIII64s")
COOKIE_MAGIC: Final = b"MEI\014\013\012\013\016"
# A code signature may follow the cookie.
MAX_TRAILER_BYTES: Final = 64 * 1024

# Length of the bootloader, model offset and length, manifest offset and length, CRC-32 of the manifest, magic.
FOOTER: Final = struct.Struct("<QQQQQI12s")
FOOTER_MAGIC: Final = b"slotfile\r\n\x1a\x01"


@dataclass(frozen=True, slots=True)
class Bundle:
    """An executable taken apart. Both `manifest` and `model` are None in a runtime that holds no model."""

    path: Path
    size: int
    bootloader_bytes: int
    pkg_offset: int
    manifest: Manifest | None = None
    model: ModelFile | None = None

    @property
    def runtime_bytes(self) -> int:
        """What the program adds to the model: everything in the file that is not GGUF."""
        return self.size - (self.model.length if self.model else 0)


def current_bundle() -> Bundle | None:
    """The executable that runs this code, or None in a source checkout. Raises ModelDamaged where its footer or manifest is."""
    return find_bundle(Path(sys.executable)) if getattr(sys, "frozen", False) else None


def find_bundle(path: Path) -> Bundle | None:
    """Take an executable apart; None for a file that is none of ours. Raises ModelDamaged, and ConfigError for an unreadable file."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file")  # a pipe would be waited for without end
        with path.open("rb") as file:
            return _read(file, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _read(file: BinaryIO, path: Path) -> Bundle | None:
    size = os.fstat(file.fileno()).st_size
    pkg_offset = _pkg_offset(file, size)
    if pkg_offset is None:
        return None
    start = pkg_offset - FOOTER.size
    if start < 0:
        return Bundle(path, size, pkg_offset, pkg_offset)
    file.seek(start)
    bootloader, model_at, model_length, manifest_at, manifest_length, checksum, magic = FOOTER.unpack(file.read(FOOTER.size))
    if magic != FOOTER_MAGIC:
        return Bundle(path, size, pkg_offset, pkg_offset)
    is_ordered = bootloader <= model_at <= model_at + model_length <= manifest_at <= manifest_at + manifest_length <= start
    if not is_ordered or manifest_length > MAX_MANIFEST_BYTES:
        raise ModelDamaged(f"{path.name} is damaged: its footer points outside the file")
    file.seek(manifest_at)
    text = file.read(manifest_length)
    if zlib.crc32(text) != checksum:
        raise ModelDamaged(f"{path.name} is damaged: its manifest was altered")
    manifest = decode(text, path.name)
    if manifest.size != model_length:
        raise ModelDamaged(f"{path.name} is damaged: its model has {model_length} bytes, the manifest says {manifest.size}")
    return Bundle(path, size, bootloader, pkg_offset, manifest, ModelFile(str(path), model_at, model_length))


def _pkg_offset(file: BinaryIO, size: int) -> int | None:
    """Where the PKG starts: the last cookie within reach of the end whose numbers fit into the file."""
    n_tail = min(size, COOKIE.size + MAX_TRAILER_BYTES)
    file.seek(size - n_tail)
    tail = file.read(n_tail)
    at = len(tail) - COOKIE.size + len(COOKIE_MAGIC)
    while (at := tail.rfind(COOKIE_MAGIC, 0, at)) >= 0:
        _, pkg_length, toc_offset, toc_length, _, library = COOKIE.unpack_from(tail, at)
        end = size - n_tail + at + COOKIE.size
        if COOKIE.size <= pkg_length <= end and toc_offset + toc_length <= pkg_length and library.rstrip(b"\0"):
            return int(end - pkg_length)
        at += len(COOKIE_MAGIC) - 1
    return None
