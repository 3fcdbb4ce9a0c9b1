"""The recipes around the build: the tool check, the Makefile's help, and the licence texts that are kept here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from build.contents import what_lacks
from build.licenses import SYSTEM_LIBRARIES, TEXTS, collect
from runner.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent


def check_tools(path: str, backends: str = "cpu") -> subprocess.CompletedProcess[str]:
    python = str(Path(sys.executable).resolve())
    return subprocess.run(
        ["/bin/sh", "build/check_tools.sh", python, backends], cwd=ROOT, env={"PATH": path}, capture_output=True, text=True, check=False
    )


def test_missing_tools_are_named_in_one_line_with_the_command_that_mends_it(tmp_path: Path) -> None:
    done = check_tools(str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "Error: this machine lacks something; this command mends it: sudo apt-get install -y g++ gcc binutils\n"


def test_complete_machine_is_passed_in_silence() -> None:
    done = check_tools(os.environ["PATH"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_tools_of_a_back_end_are_asked_for_with_it(tmp_path: Path) -> None:
    done = check_tools(str(tmp_path), "cpu,vulkan")
    assert done.returncode == 1
    assert re.search(r"apt-get install -y glslc( libvulkan-dev)? g\+\+ gcc binutils\n", done.stderr)


def test_back_end_that_cannot_be_built_is_named_before_anything_starts() -> None:
    done = check_tools(os.environ["PATH"], "cpu,abacus")
    assert (done.returncode, done.stderr) == (1, "Error: BACKENDS names abacus; it takes cpu and vulkan, comma-separated\n")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_make_alone_lists_every_target_with_its_line() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    done = make()
    assert [line.split()[1] for line in done.stdout.splitlines()] == phony[1].split()
    assert "web page" not in done.stdout


def test_make_bench_without_a_peer_says_what_it_needs() -> None:
    done = make("bench")
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.splitlines()[0] == "Error: make bench PEER=path/to/llama-server needs the server to compare with"


@pytest.mark.parametrize("verdicts", ["0", "1 0", "1 1"], ids=["as it is needed", "built with other flags", "beyond mending"])
def test_llama_cpp_built_with_other_flags_is_built_again_from_source(tmp_path: Path, verdicts: str) -> None:
    """What lies in the cache of pip, or is installed already, is taken without asking how it was built."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f"""#!/bin/sh
        echo "$@" >> {tmp_path}/calls
        case "$*" in *build.llama_libraries*)
            read -r verdict < {tmp_path}/verdicts
            sed -i 1d {tmp_path}/verdicts
            exit $verdict;;
        esac
        """
    )
    python.chmod(0o755)
    (tmp_path / "verdicts").write_text("".join(f"{verdict}\n" for verdict in verdicts.split()))
    done = make("setup", "BACKENDS=cpu", f"VENV={tmp_path}", f"PYTHON={sys.executable}")
    calls = (tmp_path / "calls").read_text().splitlines()
    pip = [call for call in calls if "pip install" in call]
    assert ["--no-cache-dir --no-binary llama-cpp-python --force-reinstall" in call for call in pip] == [False, True][: len(pip)]
    assert len(calls) == 2 * len(pip) == 2 * len(verdicts.split())
    assert (tmp_path / ".setup-cpu").exists() is (done.returncode == 0) is verdicts.endswith("0")


@pytest.mark.parametrize(
    ("names", "backends", "lack"),
    [
        (["libggml-cpu-x64.so", "libggml-cpu-haswell.so"], ["cpu"], None),
        (["libggml-cpu.so"], ["cpu"], "compiled for one kind of CPU: it has no libggml-cpu-x64.so"),
        ([], ["cpu"], "compiled for one kind of CPU"),
        (["libggml-cpu-x64.so"], ["cpu", "vulkan"], "has no back end 'vulkan'"),
        (["libggml-cpu-x64.so", "libggml-vulkan.so"], ["cpu", "vulkan"], None),
    ],
)
def test_libraries_for_one_cpu_or_without_a_back_end_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], backends: list[str], lack: str | None
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in names:
        (tmp_path / name).touch()
    found = what_lacks(tmp_path, backends)
    assert found is None if lack is None else lack in (found or "")


def test_every_system_library_has_its_text() -> None:
    assert {f"{stem}.txt" for stem in SYSTEM_LIBRARIES.values()} <= {path.name for path in TEXTS.iterdir()}


def test_library_without_a_known_licence_stops_the_build() -> None:
    with pytest.raises(ConfigError, match=r"knows no licence for libnew\.so\.1"):
        collect(["/usr/lib/libnew.so.1"])


def test_notices_of_a_build_name_program_llama_cpp_python_and_bootloader() -> None:
    notices = collect([])
    assert [notice.name.split()[0] for notice in notices] == ["slotfile", "llama.cpp", "Python", "PyInstaller's"]
    assert all(len(notice.text) > 500 for notice in notices)
