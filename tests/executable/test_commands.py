"""The built file's own commands: what it says of itself, and how it makes another."""

import hashlib
import importlib.metadata
import json
import re
import shutil
from pathlib import Path

import pytest
from PyInstaller.archive.readers import CArchiveReader, pkg_archive_contents

from runner.bundle.gguf import read_header
from runner.bundle.locate import COOKIE_MAGIC, FOOTER_MAGIC, find_bundle
from tests.bundle.ggufs import Gguf
from tests.executable.conftest import Run

MAX_RUNTIME_BYTES = 30_000_000


def test_version_and_help_come_without_a_model_being_loaded(run: Run) -> None:
    version, usage = run("--version"), run("--help")
    assert (version.code, version.err, usage.code, usage.err) == (0, "", 0, "")
    assert version.out.startswith("slotfile ")
    assert "pack" in usage.out


def test_info_shows_the_model_and_verifies_it(run: Run, smollm2_path: Path) -> None:
    ended = run("info", "--verify", "--json")
    assert (ended.code, ended.err) == (0, "")
    facts = json.loads(ended.out)
    assert facts["model"]["sha256"] == hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert facts["gguf"]["architecture"] == "llama"
    assert facts["verified"]


def test_program_adds_at_most_30_mb_to_the_model(run: Run) -> None:
    assert json.loads(run("info", "--json").out)["program_bytes"] <= MAX_RUNTIME_BYTES


def test_extract_recovers_the_model(run: Run, tmp_path: Path, smollm2_path: Path) -> None:
    ended = run("extract", "-o", tmp_path / "out.gguf")
    assert ended.code == 0
    assert ended.err == (
        "The executable's chat template and default arguments are no part of a GGUF: pack takes them as --chat-template and --arg.\n"
    )
    assert (tmp_path / "out.gguf").read_bytes() == smollm2_path.read_bytes()


def test_executable_packs_another_model_without_python_or_compiler(
    run: Run, tmp_path: Path, gemma3_path: Path, gemma3_template: str
) -> None:
    template, packed = tmp_path / "gemma.jinja", tmp_path / "gemma"
    template.write_text(gemma3_template)
    bare = {"TMPDIR": str(tmp_path)}
    ended = run("pack", "-m", gemma3_path, "-o", packed, "--chat-template", template, "--arg", "ctx=512", "--arg", "slots=1", env=bare)
    assert (ended.code, ended.err) == (0, "")
    facts = json.loads(run("info", "--verify", "--json", file=packed).out)
    assert facts["model"]["arguments"] == {"ctx": 512, "slots": 1}
    assert facts["gguf"]["architecture"] == "gemma3"
    answer = run("run", "-p", "Hello", "--max-tokens", "4", "--temperature", "0", file=packed)
    assert (answer.code, bool(answer.out.strip())) == (0, True)


def test_model_given_by_option_goes_before_the_one_inside(run: Run, gemma3_path: Path) -> None:
    ended = run("run", "-m", gemma3_path, "-p", "Hello", "--max-tokens", "2")
    assert (ended.code, len(ended.errors)) == (1, 1)
    assert "gemma3" in ended.errors[0] and "no chat template" in ended.errors[0]


@pytest.mark.parametrize("alignment", [4, 64])
def test_packed_model_is_aligned_for_the_map(run: Run, tmp_path: Path, alignment: int) -> None:
    model, packed = tmp_path / "small.gguf", tmp_path / "small"
    model.write_bytes(Gguf(alignment=alignment).add("a", 64, 3).add("b", 5).encode())
    assert run("pack", "-m", model, "-o", packed).code == 0
    bundle = find_bundle(packed)
    assert bundle is not None
    assert bundle.model is not None
    header = read_header(bundle.model)
    assert (bundle.model.offset % 65536, header.alignment, header.data_offset % max(32, alignment)) == (0, max(32, alignment), 0)


def test_magic_bytes_planted_in_the_model_do_not_break_the_start(run: Run, tmp_path: Path) -> None:
    model, packed = tmp_path / "planted.gguf", tmp_path / "planted"
    gguf = Gguf().add("a", 5000)
    gguf.metadata["general.description"] = "COOKIE-8 FOOTER---12"
    gguf.tensors["a"] = ((5000,), (FOOTER_MAGIC + COOKIE_MAGIC + bytes(80)) * 200)
    model.write_bytes(gguf.encode().replace(b"COOKIE-8 FOOTER---12", COOKIE_MAGIC + FOOTER_MAGIC))
    assert run("pack", "-m", model, "-o", packed).code == 0
    assert run("--version", file=packed).out.startswith("slotfile ")
    assert run("info", "--verify", file=packed).code == 0


@pytest.mark.parametrize("damage", ["truncated", "altered", "foreign", "empty", "absent"])
def test_bad_model_is_one_sentence_and_exit_code_1(run: Run, tmp_path: Path, smollm2_path: Path, damage: str) -> None:
    model = tmp_path / "bad.gguf"
    data = smollm2_path.read_bytes()[: 4 << 20]
    contents = {
        "truncated": data,
        "altered": data[:16] + b"\xff" * 8 + data[24:],
        "foreign": b"\x7fELF" + data[4:],
        "empty": b"",
    }
    if damage in contents:
        model.write_bytes(contents[damage])
    for arguments in (
        ("run", "-m", model, "-p", "x"),
        ("serve", "-m", model, "--port", "0"),
        ("pack", "-m", model, "-o", tmp_path / "out"),
    ):
        ended = run(*arguments)
        assert (ended.code, ended.out, len(ended.errors)) == (1, "", 1), (arguments, ended)
        assert "bad.gguf" in ended.errors[0]
        assert "Traceback" not in ended.err


def test_executable_whose_model_was_altered_fails_before_native_code(run: Run, executable: Path, tmp_path: Path) -> None:
    bundle = find_bundle(executable)
    assert bundle is not None
    assert bundle.model is not None
    altered = tmp_path / "altered"
    shutil.copy(executable, altered)
    with altered.open("r+b") as file:
        file.seek(bundle.model.offset + 8)
        file.write(b"\xff" * 8)
    ended = run("run", "-p", "x", file=altered)
    assert (ended.code, ended.out, len(ended.errors)) == (1, "", 1)
    assert run("info", file=altered).code == 1


def test_truncated_executable_ends_with_a_message(run: Run, executable: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(executable.read_bytes()[:-1000])
    cut.chmod(0o755)
    ended = run("--version", file=cut)
    assert ended.code != 0
    assert ended.err
    inspected = run("info", cut)
    assert (inspected.code, len(inspected.errors)) == (1, 1)


def test_every_bundled_distribution_has_its_licence(run: Run, executable: Path) -> None:
    named = {re.sub(r"[-_.]+", "-", line.split(" ")[0].lower()) for line in run("licenses", "--list").out.splitlines()}
    owners = importlib.metadata.packages_distributions()
    modules = {name.replace("/", ".").split(".")[0] for name in pkg_archive_contents(str(executable))}
    bundled = {re.sub(r"[-_.]+", "-", owner.lower()) for module in modules for owner in owners.get(module, [])}
    assert len(bundled) > 10
    assert bundled - named == set()


def test_every_bundled_library_of_the_system_has_its_licence(run: Run, executable: Path) -> None:
    named = {line.split(": ")[0] for line in run("licenses", "--list").out.splitlines()}
    libraries = {name.split(".so")[0] for name in CArchiveReader(str(executable)).toc if re.match(r"lib[^/]*\.so", name)}
    assert {"libgomp", "libstdc++"} <= libraries
    assert {name for name in libraries if not name.startswith("libpython")} - named == set()


@pytest.mark.parametrize("part", ["slotfile", "llama.cpp and ggml", "Python 3", "PyInstaller's bootloader", "model smollm2-135m"])
def test_licences_name_program_python_llama_cpp_and_model(run: Run, part: str) -> None:
    ended = run("licenses")
    assert (ended.code, ended.err) == (0, "")
    assert re.search(rf"^{re.escape(part)}.*\n=+\n\n\S", ended.out, re.MULTILINE)


def test_executable_measures_itself(run: Run) -> None:
    ended = run("bench", "--slots", "2", "--ctx", "128", "--threads", "1", "--prompt-tokens", "16", "--steps", "4")
    assert (ended.code, ended.err) == (0, "")
    assert re.search(r"^cpu library  libggml-cpu-\w+\.so", ended.out, re.MULTILINE)
    assert re.search(r"^generated, 2 sequences +\d", ended.out, re.MULTILINE)


def test_only_one_copy_of_each_llama_library_and_no_numpy_is_inside(executable: Path) -> None:
    names = list(CArchiveReader(str(executable)).toc)
    libraries = [name for name in names if "libllama" in name or "libggml" in name]
    assert len(libraries) == len({re.sub(r"\.so.*", "", name) for name in libraries})
    assert not [
        name for name in (*names, *pkg_archive_contents(str(executable))) if name.startswith(("numpy", "tkinter", "llama_cpp.llama_chat"))
    ]
