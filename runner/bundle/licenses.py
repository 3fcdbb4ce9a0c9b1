"""The licence texts that were collected when this executable was built."""

from pathlib import Path
from typing import Final

import msgspec

from runner.bundle.manifest import Manifest
from runner.errors import ConfigError

COLLECTED: Final = Path(__file__).with_name("licenses.json")


class Notice(msgspec.Struct, frozen=True):
    """What one part of the executable is licensed under."""

    name: str
    license: str
    text: str


def collected(path: Path = COLLECTED) -> list[Notice]:
    """Those of the program and its libraries. Raises ConfigError in a source checkout, where nothing is bundled."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Notice])
    except OSError as error:
        raise ConfigError("The licences are collected when an executable is built; this is a source checkout", hint="make exe") from error


def of_model(manifest: Manifest) -> Notice:
    """That of the model inside."""
    return Notice(
        f"model {manifest.name}", manifest.license, manifest.license_text or "No licence text was given when this file was packed."
    )
