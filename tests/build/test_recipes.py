"""The recipes around the build: the tool check, the Makefile's help, and the licence texts that are kept here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from build.licenses import SYSTEM_LIBRARIES, TEXTS, collect
from runner.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent


def check_tools(path: str) -> subprocess.CompletedProcess[str]:
    python = str(Path(sys.executable).resolve())
    return subprocess.run(
        ["/bin/sh", "build/check_tools.sh", python], cwd=ROOT, env={"PATH": path}, capture_output=True, text=True, check=False
    )


def test_missing_tools_are_named_in_one_line_with_the_command_that_mends_it(tmp_path: Path) -> None:
    done = check_tools(str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "Error: this machine lacks something; this command mends it: sudo apt-get install -y g++ gcc binutils\n"


def test_complete_machine_is_passed_in_silence() -> None:
    done = check_tools(os.environ["PATH"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_make_alone_lists_every_target_with_its_line() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    lines = subprocess.run(["make"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[1] for line in lines] == phony[1].split()


def test_every_system_library_has_its_text() -> None:
    assert {f"{stem}.txt" for stem in SYSTEM_LIBRARIES.values()} <= {path.name for path in TEXTS.iterdir()}


def test_library_without_a_known_licence_stops_the_build() -> None:
    with pytest.raises(ConfigError, match=r"knows no licence for libnew\.so\.1"):
        collect(["/usr/lib/libnew.so.1"])


def test_notices_of_a_build_name_program_llama_cpp_python_and_bootloader() -> None:
    notices = collect([])
    assert [notice.name.split()[0] for notice in notices] == ["slotfile", "llama.cpp", "Python", "PyInstaller's"]
    assert all(len(notice.text) > 500 for notice in notices)
