"""The API keys of a server, as options and a file give them."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from runner.config import ApiKey, TierName
from runner.errors import ConfigError

_KEY_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TIER_NAMES: Final[tuple[TierName, ...]] = ("high", "normal", "low", "batch")
_MIN_WEIGHT: Final = 0.01
_MAX_WEIGHT: Final = 100.0


def check_api_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Keys given as options, each once. Raises ConfigError for one that no client could send."""
    if not all(_is_key(key) for key in keys):
        raise ConfigError("An API key must be of printable ASCII characters without spaces")
    return tuple(dict.fromkeys(keys))


def read_key_file(file: Path | None) -> tuple[ApiKey, ...]:
    """The keys of a file: `KEY name=team-a weight=2 tier=high admin` a line, `#` starts a comment. Raises ConfigError."""
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The API key file {file} cannot be read: {error}") from error
    found: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        words = list(_before_comment(line.split()))
        if not words:
            continue
        key = _api_key(words, f"The API key file {file}, line {number}")
        if key.secret in found:
            raise ConfigError(f"The API key file {file}, line {number}: this key was there before")
        if any(key.name == other.name and key.weight != other.weight for other in found.values()):
            raise ConfigError(f"The API key file {file}, line {number}: 'weight' differs from that of another key of the name {key.name!r}")
        found[key.secret] = key
    if not found:
        raise ConfigError(f"The API key file {file} holds no key")
    return tuple(found.values())


def _is_key(text: str) -> bool:
    return text.isascii() and text.isprintable() and text != "" and " " not in text


def _before_comment(words: list[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("#"):
            return
        yield word


def _api_key(words: list[str], where: str) -> ApiKey:
    """One line's words: the key, then its attributes. Raises ConfigError that names file, line and attribute, never the key."""
    secret, *attributes = words
    if not _is_key(secret):
        raise ConfigError(f"{where}: an API key must be of printable ASCII characters without spaces")
    fields: dict[str, object] = {}
    for attribute in attributes:
        name, _, value = attribute.partition("=")
        if name in fields:
            raise ConfigError(f"{where}: {name!r} is given twice")
        fields[name] = _attribute(attribute, name, value, where)
    return ApiKey(
        secret=secret,
        name=str(fields.get("name", ApiKey.plain(secret).name)),
        weight=msgspec.convert(fields.get("weight", 1.0), float),
        best_tier=msgspec.convert(fields.get("tier", "normal"), TierName),
        is_admin="admin" in fields,
    )


def _attribute(attribute: str, name: str, value: str, where: str) -> object:
    match name:
        case "name" if _KEY_NAME.fullmatch(value):
            return value
        case "name":
            raise ConfigError(f"{where}: 'name' is {value!r}; it takes 1 to 64 letters, digits, dots, dashes and underscores")
        case "weight":
            return _weight(value, where)
        case "tier" if value in _TIER_NAMES:
            return value
        case "tier":
            raise ConfigError(f"{where}: 'tier' is {value!r}; it takes {', '.join(_TIER_NAMES)}")
        case "admin" if attribute == "admin":
            return True
        case "admin":
            raise ConfigError(f"{where}: 'admin' takes no value")
    raise ConfigError(f"{where}: {attribute!r} is no attribute; a key takes name=, weight=, tier= and admin")


def _weight(text: str, where: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not _MIN_WEIGHT <= weight <= _MAX_WEIGHT:
        raise ConfigError(f"{where}: 'weight' is {text!r}; it takes a number from {_MIN_WEIGHT:g} to {_MAX_WEIGHT:g}")
    return weight
