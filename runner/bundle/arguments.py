"""Default arguments that travel in a manifest: read from `name=value` and checked against the tables of options and sampling fields."""

import math
import typing
from typing import Final

from runner.bundle.manifest import Argument
from runner.config import MODEL_SETTINGS, SERVER_SETTINGS, SamplingDefaults, Setting
from runner.errors import ConfigError

# A path means another machine's files, and `model` would replace the very model it travels with.
PORTABLE_KINDS: Final = ("str", "int", "float", "choice", "flag")
FLAGS: Final = {"1": True, "true": True, "0": False, "false": False}


def parse_arguments(texts: tuple[str, ...]) -> dict[str, Argument]:
    """`("ctx=4096", "temperature=0.2")` -> `{"ctx": 4096, "temperature": 0.2}`. Raises ConfigError."""
    return dict(_parse(text) for text in texts)


def portable_settings() -> dict[str, Setting]:
    """The options that may travel, by name."""
    return {setting.name: setting for setting in (*MODEL_SETTINGS, *SERVER_SETTINGS) if setting.kind in PORTABLE_KINDS}


def _parse(text: str) -> tuple[str, Argument]:
    name, equals, value = text.partition("=")
    settings, sampling = portable_settings(), typing.get_type_hints(SamplingDefaults)
    if not equals:
        raise ConfigError(f"{text!r} is no argument; write it as name=value")
    if name in settings:
        return name, _of_setting(settings[name], value)
    if name in sampling:
        return name, _number(name, value, is_whole=sampling[name] is int)
    raise ConfigError(f"{name!r} is no argument that can travel with a model; these can: {', '.join(sorted({*settings, *sampling}))}")


def _of_setting(setting: Setting, value: str) -> Argument:
    if setting.kind == "choice" and value not in setting.choices:
        raise ConfigError(f"{setting.name} is {value!r}; it takes {', '.join(setting.choices)}")
    if setting.kind == "flag":
        return _flag(setting.name, value)
    if setting.kind not in ("int", "float"):
        return value
    number = _number(setting.name, value, is_whole=setting.kind == "int")
    if (setting.min is not None and number < setting.min) or (setting.max is not None and number > setting.max):
        raise ConfigError(f"{setting.name} is {value}; it takes {_range(setting)}")
    return number


def _flag(name: str, value: str) -> bool:
    flag = FLAGS.get(value.lower())
    if flag is None:
        raise ConfigError(f"{name} is {value!r}; it takes {', '.join(FLAGS)}")
    return flag


def _number(name: str, value: str, *, is_whole: bool) -> int | float:
    try:
        number = int(value) if is_whole else float(value)
    except ValueError as error:
        raise ConfigError(f"{name} is {value!r}; it takes a {'whole ' if is_whole else ''}number") from error
    if not math.isfinite(number):
        raise ConfigError(f"{name} is {value!r}; it takes a finite number")
    return number


def _range(setting: Setting) -> str:
    if setting.max is None:
        return f"at least {setting.min:g}"
    return f"{setting.min:g} to {setting.max:g}" if setting.min is not None else f"at most {setting.max:g}"
