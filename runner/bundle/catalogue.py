"""`models.toml`: the models that the project knows how to get, each under a name that is also its executable's."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from runner.bundle.manifest import Argument
from runner.errors import ConfigError

WHEEL: Final = re.compile(r"^pypi:(?P<distribution>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9._+!-]+):(?P<member>[^\\]+)$")
NAME: Final = re.compile(r"^[a-z0-9][a-z0-9._-]*$")


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file inside a wheel of the package index."""

    distribution: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class Url:
    """A file behind an https address."""

    url: str


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of this machine; a relative path counts from the directory of models.toml."""

    path: Path


Origin = WheelMember | Url | LocalFile


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model. `sha256` and `size` are those of the file that the source gives, before `quantize`.

    `source` has one text, or one for each part of a file that is joined: `pypi:DISTRIBUTION==VERSION:FILE`, `https://…` or a path.
    `license_text` is written the same way. `context` is the default for tokens per slot, `arguments` for other options.
    """

    description: str
    source: list[str]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    size: Annotated[int, msgspec.Meta(gt=0)]
    license: str
    license_text: str
    context: Annotated[int, msgspec.Meta(ge=16)]
    chat_template: str | None = None
    quantize: Literal["Q8_0", "Q4_0"] | None = None
    arguments: dict[str, Argument] = {}
    default: bool = False

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where the parts come from, in order. Raises ConfigError."""
        return tuple(parse_origin(text) for text in self.source)


def parse_origin(text: str) -> Origin:
    """Tell the three kinds of source apart. Raises ConfigError."""
    if match := WHEEL.match(text):
        return WheelMember(match["distribution"], match["version"], match["member"])
    if text.startswith("https://"):
        return Url(text)
    if text.startswith("pypi:") or "://" in text or not text:
        raise ConfigError(f"{text!r} is no source: it takes pypi:DISTRIBUTION==VERSION:FILE, https://… or a path")
    return LocalFile(Path(text))


def read_catalogue(path: Path) -> dict[str, CatalogueEntry]:
    """All entries by name, in the file's order. Raises ConfigError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = msgspec.convert(table, dict[str, CatalogueEntry])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is not as it should be: {error}") from error
    for name, entry in entries.items():
        if not NAME.match(name) or not entry.origins:
            raise ConfigError(f"{path}: the entry {name!r} has no usable name or no source")
    return entries


def find_entry(entries: dict[str, CatalogueEntry], name: str | None) -> tuple[str, CatalogueEntry]:
    """The entry of that name, or the default one. Raises ConfigError."""
    wanted = name or next((name for name, entry in entries.items() if entry.default), None)
    if wanted is None or wanted not in entries:
        raise ConfigError(f"models.toml has no entry {wanted!r}; it has {', '.join(entries)}")
    return wanted, entries[wanted]
