"""Options come from one table, and their values from four places in a fixed order."""

import importlib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from runner.bundle.header import Header, LongArray, Value
from runner.bundle.manifest import Argument
from runner.cli.model import ChosenModel
from runner.cli.options import Chosen, engine_config, server_config, settings_options
from runner.config import (
    ANSWER_SETTINGS,
    LOG_SETTINGS,
    MODEL_SETTINGS,
    SERVER_SETTINGS,
    ApiKey,
    EngineConfig,
    ModelFile,
    SamplingDefaults,
    ServerConfig,
    Setting,
)
from runner.errors import ConfigError

FILE = ModelFile("tiny.gguf", 0, 100)
METADATA: dict[str, Value | LongArray] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 128,
    "llama.attention.head_count": 2,
}
HEADER = Header(3, METADATA, {}, (), 32, 0, 100)
ALL = (*MODEL_SETTINGS, *SERVER_SETTINGS, *LOG_SETTINGS, *ANSWER_SETTINGS)


def configs(
    *arguments: str, manifest: dict[str, Argument] | None = None, env: dict[str, str] | None = None
) -> tuple[EngineConfig, ServerConfig]:
    """What a command with all options makes of this command line, manifest and environment."""
    found: list[tuple[EngineConfig, ServerConfig]] = []
    model = ChosenModel(FILE, "tiny", HEADER, manifest or {}, "the manifest's template")

    @click.command()
    @settings_options(MODEL_SETTINGS, SERVER_SETTINGS, LOG_SETTINGS)
    @click.pass_context
    def command(ctx: click.Context, /, **_: object) -> None:
        chosen = Chosen(ctx, model.arguments)
        found.append((engine_config(model, chosen), server_config(chosen)))

    done = CliRunner(env=env or {}).invoke(command, arguments)
    if done.exception is not None:
        raise done.exception
    return found[0]


def test_defaults_leave_the_choice_to_the_engine() -> None:
    expected = EngineConfig(model=FILE, model_name="tiny", chat_template="the manifest's template")
    assert configs() == (expected, ServerConfig())


def test_pool_reaches_its_config() -> None:
    assert configs("--kv", "unified", "--kv-pool", "3000")[0] == EngineConfig(
        model=FILE, model_name="tiny", chat_template="the manifest's template", kv="unified", kv_pool=3000
    )


def test_every_setting_reaches_its_config(tmp_path: Path) -> None:
    template, keys = tmp_path / "template.jinja", tmp_path / "keys"
    template.write_text("{{ messages }}", encoding="utf-8")
    keys.write_text("# mine\nkey-3\n", encoding="utf-8")
    line = (
        "--slots 3 --ctx 1000 --threads 5 --batch 64 --gpu-layers 7 --device Vulkan0 --flash-attn on --seed 9 --temperature 0.5"
        " --cache-type-k q8_0 --cache-type-v iq4_nl --swa-full --context-shift --kv-dir kept --kv-dir-mib 100"
        " --host 0.0.0.0 --port 0 --api-key key-1 --api-key key-2 --allowed-host box --cors-origin http://a.example"
        " --trusted-proxy 10.0.0.0/8 --max-queue-tokens 5000 --max-waiting-per-client 6 --tokens-per-minute 7000"
        " --queue-timeout 8.5 --request-timeout 90 --isolate-clients --stateless"
        f" --max-body 2048 --max-queue 0 --drain-timeout 1.5 --chat-template {template} --api-key-file {keys}"
    )
    engine = EngineConfig(
        model=FILE,
        model_name="tiny",
        n_slots=3,
        n_ctx_slot=1000,
        n_threads=5,
        n_batch=64,
        n_gpu_layers=7,
        device="Vulkan0",
        flash_attn="on",
        cache_type_k="q8_0",
        cache_type_v="iq4_nl",
        swa_full=True,
        context_shift=True,
        kv_dir=str(Path("kept").absolute()),
        kv_dir_mib=100,
        seed=9,
        chat_template="{{ messages }}",
        sampling=SamplingDefaults(temperature=0.5),
    )
    server = ServerConfig(
        host="0.0.0.0",
        port=0,
        api_keys=("key-1", "key-2"),
        file_keys=(ApiKey.plain("key-3"),),
        allowed_hosts=("box",),
        cors_origins=("http://a.example",),
        max_body_bytes=2048,
        max_queue=0,
        trusted_proxies=("10.0.0.0/8",),
        max_queue_tokens=5000,
        max_waiting_per_client=6,
        tokens_per_minute=7000,
        queue_timeout_s=8.5,
        request_timeout_s=90,
        drain_timeout_s=1.5,
        isolate_clients=True,
        is_stateless=True,
    )
    assert configs(*line.split()) == (engine, server)


def test_cache_types_that_the_model_does_not_take_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="quantised values need flash attention"):
        configs("--cache-type-v", "q8_0", "--flash-attn", "off")


def test_command_line_goes_before_environment_before_manifest() -> None:
    manifest: dict[str, Argument] = {"ctx": 1, "slots": 2, "threads": 3, "temperature": 0.25, "top_k": 7}
    engine, _ = configs("--slots", "20", manifest=manifest | {"ctx": 100}, env={"SLOTFILE_SLOTS": "10", "SLOTFILE_THREADS": "30"})
    assert (engine.n_ctx_slot, engine.n_slots, engine.n_threads) == (100, 20, 30)
    assert engine.sampling == SamplingDefaults(temperature=0.25, top_k=7)


def test_list_in_the_environment_is_split_at_commas() -> None:
    _, server = configs(env={"SLOTFILE_API_KEY": "one, two,", "SLOTFILE_ALLOWED_HOST": ""})
    assert (server.api_keys, server.allowed_hosts) == (("one", "two"), ())


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("true", True), ("True", True), ("0", False), ("false", False), ("", False)])
def test_flag_in_the_environment_is_on_or_off(text: str, expected: bool) -> None:
    _, server = configs(env={"SLOTFILE_STATELESS": text})
    assert (server.is_stateless, server.isolate_clients) == (expected, False)
    assert configs("--stateless", env={"SLOTFILE_STATELESS": text})[1].is_stateless


@pytest.mark.parametrize("text", ["2", "maybe", "auto"])
def test_flag_that_is_neither_on_nor_off_is_told_with_its_variable(text: str) -> None:
    with pytest.raises(SystemExit):
        configs(env={"SLOTFILE_STATELESS": text})
    shown = CliRunner(env={"SLOTFILE_STATELESS": text}).invoke(importlib.import_module("runner.cli.serve").serve, [])
    assert shown.exit_code == 2
    assert f"Invalid value for '--stateless' (set by SLOTFILE_STATELESS): '{text}' is not a valid boolean" in shown.output


def test_flag_takes_no_value() -> None:
    shown = CliRunner().invoke(importlib.import_module("runner.cli.serve").serve, ["--stateless=1"])
    assert shown.exit_code == 2
    assert "'--stateless' does not take a value" in shown.output


@pytest.mark.parametrize(("value", "env", "expected"), [(True, "", True), (False, "", False), (1, "", True), (True, "0", False)])
def test_flag_in_the_manifest_counts_where_nothing_else_is_said(value: Argument, env: str, expected: bool) -> None:
    _, server = configs(manifest={"isolate-clients": value}, env={"SLOTFILE_ISOLATE_CLIENTS": env})
    assert server.isolate_clients is expected


def test_flag_of_the_wrong_kind_in_the_manifest_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^The model's manifest sets stateless to 'often': 'often' is not a valid boolean"):
        configs(manifest={"stateless": "often"})


def test_manifest_value_of_the_wrong_kind_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^The model's manifest sets ctx to 'much': 'much' is not a valid integer range\.$"):
        configs(manifest={"ctx": "much"})
    with pytest.raises(ConfigError, match=r"^The model's manifest has a sampling default of the wrong kind"):
        configs(manifest={"top_k": "many"})


def test_template_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"template\.jinja cannot be read"):
        configs("--chat-template", str(tmp_path / "template.jinja"))


@pytest.mark.parametrize("text", ["many", "-1", "1.5"])
def test_gpu_layers_are_auto_or_a_number(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--gpu-layers is "):
        configs(f"--gpu-layers={text}")


@pytest.mark.parametrize(
    ("command", "tables"),
    [
        ("start", (MODEL_SETTINGS, SERVER_SETTINGS, LOG_SETTINGS, ANSWER_SETTINGS)),
        ("serve", (MODEL_SETTINGS, SERVER_SETTINGS, LOG_SETTINGS)),
        ("chat", (MODEL_SETTINGS, LOG_SETTINGS, ANSWER_SETTINGS)),
        ("run", (MODEL_SETTINGS, LOG_SETTINGS, ANSWER_SETTINGS)),
    ],
)
def test_commands_offer_all_settings_that_concern_them(command: str, tables: tuple[tuple[Setting, ...], ...]) -> None:
    offered = {option.name: option for option in getattr(importlib.import_module(f"runner.cli.{command}"), command).params}
    for setting in (setting for table in tables for setting in table):
        option = offered[setting.name.replace("-", "_")]
        assert option.opts == ([setting.short, setting.flag] if setting.short else [setting.flag])
        assert option.envvar == setting.env == "SLOTFILE_" + setting.name.upper().replace("-", "_")


def test_no_two_settings_share_a_name() -> None:
    assert len({setting.name for setting in ALL}) == len(ALL)
