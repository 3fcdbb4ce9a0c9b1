"""`doctor`: a line a check, and an exit code that says whether all is well."""

import json
import socket
from pathlib import Path

import pytest

from runner.bundle.gguf import read_header
from runner.cli.checks import Check, Status, check_kv_cache, check_port, check_state_dir, check_temp_dir
from runner.cli.model import ChosenModel
from runner.config import EngineConfig, ModelFile, ServerConfig
from tests.cli.program import run

NAMES = [
    "system",
    "cpus",
    "memory",
    "temp dir",
    "state dir",
    "port",
    "model",
    "kv cache",
    "load",
    "cpu library",
    "devices",
    "engine memory",
    "answer",
]


def test_line_a_check_and_all_is_well(smollm2_path: Path, tmp_path: Path) -> None:
    done = run("doctor", "-m", str(smollm2_path), "--port", "0", home=tmp_path)
    lines = done.stdout.splitlines()
    assert [line[6:19].strip() for line in lines] == NAMES
    assert {line[:6].strip() for line in lines} == {"ok"}
    assert (done.returncode, done.stderr) == (0, "")


def test_json_holds_the_same_checks_and_what_the_engine_chose(smollm2_path: Path, tmp_path: Path) -> None:
    done = run("doctor", "-m", str(smollm2_path), "--port", "0", "--json", home=tmp_path)
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert [check["name"] for check in report["checks"]] == NAMES
    assert (report["engine"]["n_slots"], report["engine"]["n_ctx_slot"]) == (1, 256)


def test_cells_of_the_slots_that_were_asked_for_are_shown_before_the_model_loads(smollm2_path: Path, tmp_path: Path) -> None:
    options = ("--slots", "3", "--ctx", "1000", "--cache-type-k", "q8_0", "--cache-type-v", "q4_0")
    lines = run("doctor", "-m", str(smollm2_path), "--port", "0", *options, home=tmp_path).stdout.splitlines()
    assert lines[7] == "ok    kv cache      3 slots x 1,000 tokens, KV cache 27 MiB (K q8_0, V q4_0)"


def test_cells_that_memory_does_not_hold_are_a_note(smollm2_path: Path) -> None:
    file = ModelFile(str(smollm2_path), 0, smollm2_path.stat().st_size)
    config = EngineConfig(model=file, model_name="m", n_slots=256, n_ctx_slot=1 << 24)
    found = check_kv_cache(ChosenModel(file, "m", read_header(file)), config)
    assert found.status is Status.NOTE
    assert found.text.startswith("256 slots of 16,777,216 tokens need ")


def test_damaged_model_is_a_failed_check(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    done = run("doctor", "-m", str(path), "--port", "0", home=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("fail  model         ")
    assert done.stderr == ""


def test_port_in_use_is_a_failed_check() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = check_port(ServerConfig(port=port))
    assert found == Check("port", Status.FAIL, f"Port {port} of 127.0.0.1 is in use by another program", "--port 0 takes a free one")


def test_state_directory_that_cannot_be_written_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert check_state_dir() == Check("state dir", Status.NOTE, "none can be written: history and log are not kept")


def test_temporary_directory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert check_temp_dir() == Check("temp dir", Status.OK, f"{tmp_path} can be written and executed from")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    found = check_temp_dir()
    assert (found.status, found.hint) == (Status.FAIL, "TMPDIR=/a/directory names another")
