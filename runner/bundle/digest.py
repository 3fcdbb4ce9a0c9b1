"""SHA-256 by the fastest code at hand.

OpenSSL's runs at 1.9 GB/s where the processor has instructions for it, Python's own at 0.36. An executable carries OpenSSL's libcrypto,
4.8 MB, and unpacks it only where a model is hashed: no start waits for it (docs/decisions/0012-runtime-contents.md).
"""

import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Final, Protocol

from runner.errors import ConfigError

DIRECTORY: Final = "openssl"
PACKED_SUFFIX: Final = ".z"
MODULE: Final = "_hashlib"


class Digest(Protocol):
    """What `hashlib` returns. `update` lets other threads run meanwhile."""

    def update(self, data: bytes, /) -> None:
        """Take more bytes."""

    def hexdigest(self, /) -> str:
        """Of all bytes so far."""


def sha256() -> Digest:
    """A new one. Raises ConfigError where an executable finds no room to unpack the faster code."""
    unpacked = getattr(sys, "_MEIPASS", None)
    fast = load_openssl(Path(unpacked)) if isinstance(unpacked, str) else None
    if fast is None:
        return hashlib.sha256()
    digest: Digest = fast.openssl_sha256()
    return digest


def load_openssl(unpacked: Path) -> ModuleType | None:
    """Python's module for OpenSSL from what the bootloader has unpacked; None where it is not there.

    libcrypto goes into the directory itself, where the loader looks first: the bootloader started this process with it as
    LD_LIBRARY_PATH.
    """
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    module = next((unpacked / DIRECTORY).glob(f"{MODULE}*"), None)
    packed = next((unpacked / DIRECTORY).glob(f"*{PACKED_SUFFIX}"), None)
    if module is None or packed is None:
        return None
    _unpack(packed, unpacked / packed.stem)
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(module))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    loaded = sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded


def _unpack(packed: Path, target: Path) -> None:
    """Under its name only when whole."""
    if not target.exists():
        part = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            part.write_bytes(zlib.decompress(packed.read_bytes()))
        except OSError as error:
            raise ConfigError(f"{target.parent} has no room for libcrypto: {error.strerror}", hint="TMPDIR=/another/directory") from error
        part.replace(target)
