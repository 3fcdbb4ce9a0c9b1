"""What an executable knows of the model inside it: one JSON object behind the GGUF."""

from typing import Final

import msgspec

from runner.errors import ModelDamaged

FORMAT: Final = 1
MAX_MANIFEST_BYTES: Final = 16 * 1024 * 1024

Argument = bool | int | float | str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`sha256` and `size` are those of the GGUF as it lies in the executable.

    `arguments` are defaults for options and sampling fields by their names (`{"ctx": 4096, "temperature": 0.2}`); what the person
    types or a request brings goes before them. `chat_template` replaces the GGUF's own.
    """

    name: str
    sha256: str
    size: int
    license: str = "unknown"
    license_text: str = ""
    chat_template: str | None = None
    arguments: dict[str, Argument] = {}
    format: int = FORMAT


def encode(manifest: Manifest) -> bytes:
    """The JSON that goes into the file: readable with any tool that prints strings."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def decode(data: bytes, label: str) -> Manifest:
    """Raises ModelDamaged; `label` names the file in the message."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelDamaged(f"{label} is damaged: its manifest cannot be read: {error}") from error
    if manifest.format > FORMAT:
        raise ModelDamaged(f"{label} has a manifest of format {manifest.format}; this program reads up to {FORMAT}")
    return manifest
