"""Writes a new executable: the runtime of an existing one around another model."""

import shutil
import zlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from runner.bundle.copying import Progress, copy_pieces, hash_range, new_file, write_all
from runner.bundle.locate import FOOTER, FOOTER_MAGIC, Bundle, find_bundle
from runner.bundle.manifest import Argument, Manifest, encode
from runner.bundle.source import Piece, Source
from runner.errors import ConfigError, ModelDamaged

MODEL_ALIGNMENT: Final = 64 * 1024  # the largest granularity of any platform's file mapping
MAX_PE_BYTES: Final = (1 << 32) - 1
EXECUTABLE_MODE: Final = 0o755


class Platform(StrEnum):
    """What a runtime runs on, told by its first bytes."""

    LINUX = "Linux"
    WINDOWS = "Windows"
    MACOS = "macOS"
    UNKNOWN = "an unknown system"


@dataclass(frozen=True, slots=True)
class Label:
    """What goes into the manifest beside the model's hash and size."""

    name: str
    license: str = "unknown"
    license_text: str = ""
    chat_template: str | None = None
    arguments: dict[str, Argument] | None = None


def platform_of(first_bytes: bytes) -> Platform:
    """Tell ELF, PE and Mach-O apart."""
    if first_bytes.startswith(b"\x7fELF"):
        return Platform.LINUX
    if first_bytes.startswith(b"MZ"):
        return Platform.WINDOWS
    if first_bytes[:4] in {b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"\xca\xfe\xba\xbf"}:
        return Platform.MACOS
    return Platform.UNKNOWN


def check_platform(platform: Platform, n_bytes: int) -> None:
    """Whether a file of that size can be an executable there. Raises ConfigError."""
    if platform is Platform.WINDOWS and n_bytes > MAX_PE_BYTES:
        raise ConfigError(
            f"The executable would have {n_bytes} bytes; Windows runs up to {MAX_PE_BYTES}",
            hint="keep the model beside the executable and start it with --model FILE.gguf",
        )
    if platform is Platform.MACOS:
        raise ConfigError(
            "Packing for macOS needs the code signature written anew, which this version does not do",
            hint="keep the model beside the executable and start it with --model FILE.gguf",
        )


def pack(runtime: Bundle, source: Source, label: Label, out: Path, progress: Progress) -> Bundle:
    """Write `out`, check what was written against what was read, and only then give it its name.

    `progress` hears of twice the model's bytes: written, then read again. Raises ConfigError and ModelDamaged.
    """
    with runtime.path.open("rb") as file:
        bootloader = file.read(runtime.bootloader_bytes)
        file.seek(runtime.pkg_offset)
        pkg = file.read()
    model_at = -(-len(bootloader) // _alignment(source)) * _alignment(source)
    total = model_at + source.length + len(pkg)
    check_platform(platform_of(bootloader), total)
    _check_target(out, (runtime.path, *source.paths), total)
    with new_file(out, EXECUTABLE_MODE) as target:
        write_all(target, bootloader + bytes(model_at - len(bootloader)))
        digest = copy_pieces(source.pieces, target, progress)
        manifest = _manifest(label, digest, source.length)
        write_all(target, _tail(len(bootloader), model_at, manifest) + pkg)
        if hash_range(target, model_at, source.length, progress) != digest:
            raise ModelDamaged(f"{out} does not hold what was written into it: the disk or the memory of this machine is faulty")
    packed = find_bundle(out)
    assert packed is not None
    assert packed.manifest == manifest
    return packed


def _alignment(source: Source) -> int:
    return max(MODEL_ALIGNMENT, source.alignment)


def _manifest(label: Label, digest: str, size: int) -> Manifest:
    return Manifest(
        name=label.name,
        sha256=digest,
        size=size,
        license=label.license,
        license_text=label.license_text,
        chat_template=label.chat_template,
        arguments=label.arguments or {},
    )


def _tail(n_bootloader: int, model_at: int, manifest: Manifest) -> bytes:
    text = encode(manifest)
    model_end = model_at + manifest.size
    manifest_at = model_end + -model_end % 16
    footer = FOOTER.pack(n_bootloader, model_at, manifest.size, manifest_at, len(text), zlib.crc32(text), FOOTER_MAGIC)
    return bytes(manifest_at - model_end) + text + footer


def _check_target(out: Path, inputs: tuple[Path, ...], n_bytes: int) -> None:
    if not out.parent.is_dir():
        raise ConfigError(f"There is no directory {out.parent}")
    for path in inputs:
        if out.exists() and out.samefile(path):
            raise ConfigError(f"{out} is what is being read; write to another name")
    free = shutil.disk_usage(out.parent).free
    if free < n_bytes:
        raise ConfigError(f"{out} takes {n_bytes} bytes; {free} are free in {out.parent}")


def extract(bundle: Bundle, out: Path, progress: Progress) -> None:
    """Write the model of `bundle` as a GGUF of its own, checked against the manifest's hash. Raises ConfigError and ModelDamaged."""
    if bundle.model is None or bundle.manifest is None:
        raise ConfigError(f"{bundle.path} holds no model")
    _check_target(out, (bundle.path,), bundle.model.length)
    piece = Piece(bundle.model.length, path=bundle.path, offset=bundle.model.offset)
    with new_file(out) as target:
        if copy_pieces((piece,), target, progress) != bundle.manifest.sha256:
            raise ModelDamaged(f"{bundle.path.name} is damaged: its model does not have the SHA-256 of its manifest")


def verify(bundle: Bundle, progress: Progress) -> None:
    """Hash the whole model. Raises ModelDamaged where it is not what the manifest says, ConfigError where there is none."""
    if bundle.model is None or bundle.manifest is None:
        raise ConfigError(f"{bundle.path} holds no model")
    with bundle.path.open("rb", buffering=0) as file:
        digest = hash_range(file, bundle.model.offset, bundle.model.length, progress)
    if digest != bundle.manifest.sha256:
        raise ModelDamaged(f"{bundle.path.name} is damaged: its model has the SHA-256 {digest}, the manifest says {bundle.manifest.sha256}")
