"""Options made from the settings table, and the typed values that come out of them.

Where a value comes from, first to last: the command line, the environment, the arguments in the model's manifest, the table.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec

from runner.bundle.kv_cells import check_cache_types
from runner.bundle.manifest import Argument
from runner.cli.keys import check_api_keys, read_key_file
from runner.cli.model import ChosenModel, choose_model
from runner.config import (
    CacheType,
    EngineConfig,
    FlashAttn,
    KvMode,
    PolicyName,
    SamplingDefaults,
    ServerConfig,
    Setting,
    check_kv,
    parse_gpu_layers,
)
from runner.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., object])
Given = TypeVar("Given", str, int, float)
Value = str | int | float | bool | Path | tuple[str, ...] | None

METAVARS: Final = {"int": "N", "float": "X", "path": "FILE", "directory": "DIR", "str": "TEXT", "list": "TEXT"}
MAX_TEMPLATE_BYTES: Final = 1 << 20


class FiniteRange(click.FloatRange):
    """A number in a range; `nan` compares with nothing and would slip through."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Raises click.BadParameter."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class SettingOption(click.Option):
    """An option whose list form is split at commas in the environment, and whose empty variable counts as unset."""

    def value_from_envvar(self, ctx: click.Context) -> str | list[str] | None:
        """The variable's value."""
        text = self.resolve_envvar_value(ctx)
        if not text:
            return None
        return [part.strip() for part in text.split(",") if part.strip()] if self.multiple else text

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """What an error calls it: the variable too, where that set it."""
        hint = super().get_error_hint(ctx)
        is_from_environment = ctx is not None and ctx.get_parameter_source(self.name) is click.core.ParameterSource.ENVIRONMENT
        return f"{hint} (set by {self.envvar})" if is_from_environment else hint


def settings_options(*tables: Sequence[Setting]) -> Callable[[Function], Function]:
    """Give a command all options of these tables, in their order."""

    def decorate(function: Function) -> Function:
        for setting in reversed([setting for table in tables for setting in table]):
            function = _option(setting)(function)
        return function

    return decorate


def _option(setting: Setting) -> Callable[[Function], Function]:
    names = [setting.flag] if setting.short is None else [setting.short, setting.flag]
    is_list = setting.kind == "list"
    return click.option(
        *names,
        _key(setting.name),
        cls=SettingOption,
        type=_type(setting),
        default=None if is_list else setting.default,
        multiple=is_list,
        is_flag=setting.kind == "flag",
        metavar=METAVARS.get(setting.kind),
        envvar=setting.env,
        show_default=setting.default is not None,
        help=setting.help,
    )


def _type(setting: Setting) -> click.ParamType[Any]:
    match setting.kind:
        case "int":
            return click.IntRange(_whole(setting.min), _whole(setting.max))
        case "float":
            return FiniteRange(setting.min, setting.max)
        case "choice":
            return click.Choice(setting.choices)
        case "path" | "directory":
            return click.Path(path_type=Path)
        case "flag":
            return click.BOOL
        case _:
            return click.STRING


def _whole(limit: float | None) -> int | None:
    return None if limit is None else int(limit)


def _key(name: str) -> str:
    return name.replace("-", "_")


class Chosen:
    """The values of one command's options. `arguments` are the manifest's: they count where nothing was typed or set."""

    def __init__(self, ctx: click.Context, arguments: dict[str, Argument]) -> None:
        self._ctx = ctx
        self._arguments = arguments

    def value(self, name: str) -> Value:
        """The value of a setting by its name. Raises ConfigError where the manifest's is of the wrong kind."""
        if name in self._arguments and not self.was_given(name):
            return self._from_manifest(name)
        found: Value = self._ctx.params[_key(name)]
        return found

    def was_given(self, name: str) -> bool:
        """Whether the person set it, by an option or in the environment."""
        return self._ctx.get_parameter_source(_key(name)) is not click.core.ParameterSource.DEFAULT

    def text(self, name: str) -> str | None:
        """A setting of kind str or choice."""
        value = self.value(name)
        assert value is None or isinstance(value, str)
        return value

    def number(self, name: str) -> int | None:
        """A setting of kind int."""
        value = self.value(name)
        assert value is None or isinstance(value, int)
        return value

    def real(self, name: str) -> float | None:
        """A setting of kind float."""
        value = self.value(name)
        assert value is None or isinstance(value, float | int)
        return value

    def flag(self, name: str) -> bool:
        """A setting of kind flag."""
        value = self.value(name)
        assert isinstance(value, bool)
        return value

    def path(self, name: str) -> Path | None:
        """A setting of kind path or directory."""
        value = self.value(name)
        assert value is None or isinstance(value, Path)
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A setting of kind list."""
        value = self.value(name)
        assert isinstance(value, tuple)
        return value

    def _from_manifest(self, name: str) -> Value:
        option = next(param for param in self._ctx.command.params if param.name == _key(name))
        try:
            value: Value = option.type_cast_value(self._ctx, str(self._arguments[name]))
        except click.BadParameter as error:
            raise ConfigError(f"The model's manifest sets {name} to {self._arguments[name]!r}: {error.message}") from error
        return value


def chosen_model(ctx: click.Context) -> tuple[ChosenModel, Chosen]:
    """Find the model, and the options' values in its light. Raises ConfigError and ModelDamaged."""
    path: Path | None = ctx.params["model"]
    model = choose_model(path)
    return model, Chosen(ctx, model.arguments)


def engine_config(model: ChosenModel, chosen: Chosen) -> EngineConfig:
    """What the engine process is told. Raises ConfigError."""
    config = EngineConfig(
        model=model.file,
        model_name=model.name,
        n_slots=chosen.number("slots"),
        n_ctx_slot=chosen.number("ctx"),
        n_threads=chosen.number("threads"),
        n_threads_batch=chosen.number("threads-batch"),
        n_batch=known(chosen.number("batch")),
        n_gpu_layers=parse_gpu_layers(known(chosen.text("gpu-layers"))),
        device=chosen.text("device"),
        flash_attn=msgspec.convert(chosen.text("flash-attn"), FlashAttn),
        cache_type_k=cache_type(chosen, "cache-type-k"),
        cache_type_v=cache_type(chosen, "cache-type-v"),
        swa_full=chosen.flag("swa-full"),
        kv=kv_mode(chosen),
        kv_pool=chosen.number("kv-pool"),
        context_shift=chosen.flag("context-shift"),
        seed=chosen.number("seed"),
        itl_target_s=known(chosen.real("itl-target")),
        prompt_chunk=known(chosen.number("prompt-chunk")),
        policy=msgspec.convert(chosen.text("policy"), PolicyName),
        share_grace_s=known(chosen.real("share-grace")),
        max_running_per_client=known(chosen.number("max-running-per-client")),
        kv_host_mib=chosen.number("kv-host-mib"),
        checks_each_step=chosen.text("log-level") == "debug",
        kv_dir=_absolute(chosen.path("kv-dir")),
        kv_dir_mib=known(chosen.number("kv-dir-mib")),
        model_sha256=model.sha256,
        chat_template=_chat_template(model, chosen.path("chat-template")),
        sampling=sampling_defaults(model.arguments, chosen.real("temperature")),
    )
    check_cache_types(model.header, config)
    check_kv(config)
    return config


def server_config(chosen: Chosen) -> ServerConfig:
    """What the HTTP server is told. Raises ConfigError."""
    return ServerConfig(
        host=chosen.text("host"),
        port=known(chosen.number("port")),
        api_keys=check_api_keys(chosen.strings("api-key")),
        file_keys=read_key_file(chosen.path("api-key-file")),
        allowed_hosts=chosen.strings("allowed-host"),
        cors_origins=chosen.strings("cors-origin"),
        trusted_proxies=chosen.strings("trusted-proxy"),
        max_body_bytes=known(chosen.number("max-body")),
        max_queue=known(chosen.number("max-queue")),
        max_queue_tokens=known(chosen.number("max-queue-tokens")),
        max_waiting_per_client=known(chosen.number("max-waiting-per-client")),
        tokens_per_minute=known(chosen.number("tokens-per-minute")),
        queue_timeout_s=known(chosen.real("queue-timeout")),
        request_timeout_s=known(chosen.real("request-timeout")),
        drain_timeout_s=known(chosen.real("drain-timeout")),
        isolate_clients=chosen.flag("isolate-clients"),
        is_stateless=chosen.flag("stateless"),
    )


def cache_type(chosen: Chosen, name: str) -> CacheType:
    """The type of keys or values in the KV cache."""
    found: CacheType = msgspec.convert(chosen.text(name), CacheType)
    return found


def kv_mode(chosen: Chosen) -> KvMode:
    """Whether each slot has cells of its own."""
    found: KvMode = msgspec.convert(chosen.text("kv"), KvMode)
    return found


def known(value: Given | None) -> Given:
    """The value of a setting that the table gives a default."""
    assert value is not None
    return value


def sampling_defaults(arguments: dict[str, Argument], temperature: float | None) -> SamplingDefaults:
    """What requests that say nothing get: the manifest's sampling fields, and the temperature that was asked for. Raises ConfigError."""
    fields = {name: value for name, value in arguments.items() if name in SamplingDefaults.__struct_fields__}
    if temperature is not None:
        fields["temperature"] = temperature
    try:
        return msgspec.convert(fields, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The model's manifest has a sampling default of the wrong kind: {error}") from error


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _chat_template(model: ChosenModel, path: Path | None) -> str | None:
    if path is None:
        return model.chat_template
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_TEMPLATE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The chat template {path} cannot be read: {error}") from error
