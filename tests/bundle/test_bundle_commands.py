"""`pack`, `info`, `extract`, `models` and `licenses` as typed, on small files."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from runner.bundle.locate import find_bundle
from runner.cli.extract import extract
from runner.cli.info import info
from runner.cli.licenses import licenses
from runner.cli.models import models
from runner.cli.pack import model_name, pack
from runner.errors import ConfigError, RunnerError
from tests.bundle.ggufs import fake_runtime, small_gguf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-model.gguf"
    path.write_bytes(small_gguf().encode())
    return path


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    return fake_runtime(tmp_path / "runtime").path


def packed(tmp_path: Path, model: Path, runtime: Path, *options: str) -> Path:
    out = tmp_path / "packed"
    result = CliRunner().invoke(pack, ["-m", str(model), "-o", str(out), "--runtime", str(runtime), *options], catch_exceptions=False)
    assert result.exit_code == 0
    return out


def failure_of(result: Result) -> str:
    assert isinstance(result.exception, RunnerError)
    return result.exception.message


def test_pack_writes_what_the_options_say_into_the_manifest(tmp_path: Path, model: Path, runtime: Path) -> None:
    (tmp_path / "LICENSE").write_text("the text")
    (tmp_path / "t.jinja").write_text("{{ x }}")
    options = [
        "--license",
        "MIT",
        "--license-file",
        str(tmp_path / "LICENSE"),
        "--chat-template",
        str(tmp_path / "t.jinja"),
        "--arg",
        "ctx=64",
    ]
    bundle = find_bundle(packed(tmp_path, model, runtime, *options))
    assert bundle is not None
    assert bundle.manifest is not None
    found = bundle.manifest
    assert (found.name, found.license, found.license_text) == ("tiny-model", "MIT", "the text")
    assert (found.chat_template, found.arguments) == ("{{ x }}", {"ctx": 64})


@pytest.mark.parametrize(
    ("file", "name"), [("a-b.Q8_0.gguf", "a-b.Q8_0"), ("big-00002-of-00003.gguf", "big"), ("plain", "plain"), (".gguf", ".gguf")]
)
def test_models_name_comes_from_the_files_name(file: str, name: str) -> None:
    assert model_name(Path(file)) == name


def test_pack_from_a_checkout_says_what_is_missing(tmp_path: Path, model: Path) -> None:
    result = CliRunner().invoke(pack, ["-m", str(model), "-o", str(tmp_path / "out")])
    assert "source checkout" in failure_of(result)
    result = CliRunner().invoke(pack, ["-m", str(model), "-o", str(tmp_path / "out"), "--runtime", str(model)])
    assert "no executable of this program" in failure_of(result)


def test_info_shows_an_executable_a_runtime_and_a_plain_gguf(tmp_path: Path, model: Path, runtime: Path) -> None:
    shown = [
        json.loads(CliRunner().invoke(info, [str(path), "--json"]).stdout) for path in (packed(tmp_path, model, runtime), runtime, model)
    ]
    assert shown[0]["model"]["name"] == "tiny-model"
    assert shown[0]["gguf"] == shown[2]["gguf"]
    assert shown[0]["gguf"]["layers"] == 2
    assert shown[1]["model"].startswith("none")


def test_info_for_people_names_every_fact_on_a_line(tmp_path: Path, model: Path, runtime: Path) -> None:
    lines = CliRunner().invoke(info, [str(packed(tmp_path, model, runtime, "--arg", "ctx=64")), "--verify"]).stdout.splitlines()
    assert "  arguments             ctx=64" in lines
    assert lines[lines.index("kv cache") : -1] == [
        "kv cache",
        "  slots                 4",
        "  tokens per slot       64",
        "  keys                  f16",
        "  values                f16",
        "  bytes per token       192",
        "  bytes                 196,608",
    ]
    assert lines[-1].startswith("verified")


def test_info_counts_the_cells_of_the_slots_and_types_that_are_asked_for(model: Path) -> None:
    options = ["--slots", "8", "--ctx", "1000", "--cache-type-k", "f32"]
    shown = json.loads(CliRunner().invoke(info, [str(model), "--json", *options]).stdout)
    assert shown["kv_cache"] == {
        "slots": 8,
        "tokens_per_slot": 1000,
        "keys": "f32",
        "values": "f16",
        "bytes_per_token": 288,
        "bytes": 8 * 1024 * 288,
    }
    pool = json.loads(CliRunner().invoke(info, [str(model), "--json", *options, "--kv", "unified", "--kv-pool", "1500"]).stdout)
    assert pool["kv_cache"] == {**shown["kv_cache"], "tokens_of_pool": 1500, "bytes": 1536 * 288}
    assert "no multiple of 32" in failure_of(CliRunner().invoke(info, [str(model), "--cache-type-k", "q8_0"]))


def test_verify_needs_a_manifest(model: Path) -> None:
    assert "no hash of itself" in failure_of(CliRunner().invoke(info, [str(model), "--verify"]))


def test_extract_gives_the_model_back(tmp_path: Path, model: Path, runtime: Path) -> None:
    result = CliRunner().invoke(extract, [str(packed(tmp_path, model, runtime)), "-o", str(tmp_path / "back.gguf")])
    assert (result.exit_code, result.stderr) == (0, "")
    assert (tmp_path / "back.gguf").read_bytes() == model.read_bytes()
    assert "holds no model" in failure_of(CliRunner().invoke(extract, [str(runtime), "-o", str(tmp_path / "x")]))


def test_models_lists_the_catalogue_of_a_checkout() -> None:
    lines = CliRunner().invoke(models).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["smollm2-135m", "gemma3-270m"]
    assert "default" in lines[0]


def test_licences_are_collected_when_an_executable_is_built() -> None:
    result = CliRunner().invoke(licenses)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.hint == "make exe"
