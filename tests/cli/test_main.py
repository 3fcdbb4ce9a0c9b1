"""The edge of the program: what it prints, what it returns, and what it does not import."""

import subprocess
import sys
from pathlib import Path

import pytest

from runner import __version__
from runner.cli.group import COMMANDS
from runner.config import ENV_PREFIX
from tests.cli.program import COMMAND, environment, run

HEAVY = ("llama_cpp", "aiohttp", "jinja2", "prompt_toolkit", "asyncio", "numpy", "psutil", "platformdirs", "rich")


def modules_after(code: str, home: Path) -> str:
    """What a fresh interpreter says when it has run `code` and then looks for heavy modules."""
    script = f"import sys\n{code}\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    env = environment(home)
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, encoding="utf-8", check=True).stdout


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_version_and_help_import_nothing_heavy(argument: str, tmp_path: Path) -> None:
    out = modules_after(f"from runner.cli.main import main\nassert main([{argument!r}]) == 0", tmp_path)
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_be_imported_and_has_its_help(command: str, tmp_path: Path) -> None:
    done = run(command, "--help", home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: slotfile {command} ")


@pytest.mark.parametrize("command", ["start", "serve", "chat", "run", "top", "bench", "simulate", "doctor"])
def test_help_of_a_command_imports_nothing_heavy(command: str, tmp_path: Path) -> None:
    out = modules_after(f"from runner.cli.main import main\nassert main([{command!r}, '--help']) == 0", tmp_path)
    assert out.splitlines()[-1] == "[]"


def test_engine_process_starts_before_click_is_imported(tmp_path: Path) -> None:
    code = (
        "import types\n"
        "fake = types.ModuleType('runner.serving.process')\n"
        "fake.engine_main = lambda: print('click' in sys.modules, 'runner.config' in sys.modules) or 0\n"
        "sys.modules['runner.serving.process'] = fake\n"
        "from runner.cli.main import main\n"
        "main(['--engine-process'])"
    )
    assert modules_after(code, tmp_path) == "False False\n[]\n"


def test_version_is_one_line(tmp_path: Path) -> None:
    done = run("--version", home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"slotfile {__version__}\n", "")


def test_help_names_every_command(tmp_path: Path) -> None:
    done = run("--help", home=tmp_path)
    listed = [line.split()[0] for line in done.stdout.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()]
    assert listed == list(COMMANDS)
    assert done.returncode == 0


def test_without_a_model_it_says_what_to_do(tmp_path: Path) -> None:
    done = run(home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: No model is named, and a source checkout holds none\nhint: -m FILE.gguf names one\n"


def test_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = run("serve", "-m", "nothere.gguf", home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "Error: nothere.gguf cannot be read: No such file or directory\n")


def test_foreign_file_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    path = tmp_path / "picture.gguf"
    path.write_bytes(b"\x89PNG" + bytes(200))
    done = run("run", "-m", str(path), "-p", "Hi", home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: picture.gguf is no GGUF")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nosuch"], "Error: No such command 'nosuch'.\n"),
        (["serve", "--nosuch"], "Error: No such option '--nosuch'.\n"),
        (["--slots", "0"], "Error: Invalid value for '--slots': 0 is not in the range 1<=x<=256.\n"),
        (["--slots", "257"], "Error: Invalid value for '--slots': 257 is not in the range 1<=x<=256.\n"),
        (["serve", "--port", "70000"], "Error: Invalid value for '--port': 70000 is not in the range 0<=x<=65535.\n"),
        (["run", "--temperature", "nan", "-p", "x"], "Error: Invalid value for '--temperature': 'nan' is not a finite number.\n"),
        (["run", "-p", " "], "Error: The prompt is empty.\n"),
        (["run"], "Error: The prompt is empty.\n"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_command_line_is_exit_code_2(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    done = run(*arguments, home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"\n\n{sentence}")


def test_environment_is_checked_like_the_command_line(tmp_path: Path) -> None:
    done = run("serve", home=tmp_path, env={f"{ENV_PREFIX}PORT": "70000"})
    assert done.returncode == 2
    assert done.stderr.endswith("Error: Invalid value for '--port' (set by SLOTFILE_PORT): 70000 is not in the range 0<=x<=65535.\n")


def test_prompt_at_a_closed_terminal_is_asked_for(tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&1', "sh", *COMMAND, "run"],
        env=environment(tmp_path),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2


def test_fault_of_our_own_is_one_sentence_and_a_place_to_look(tmp_path: Path) -> None:
    script = (
        "import runner.cli.model as model\n"
        "def broken(_): raise ZeroDivisionError('by zero')\n"
        "model.find_bundle = broken\n"
        "from runner.cli.main import main\n"
        "import sys; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "serve", "-m", "x"]
    env = environment(tmp_path)
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", check=False)
    place = tmp_path / ".local/state/slotfile/fault.log"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: A fault of this program: ZeroDivisionError: by zero\nhint: {place} says where\n"
    assert place.read_text(encoding="utf-8").startswith("Traceback (most recent call last):\n")

    debugging = subprocess.run([*command, "--log-level", "debug"], env=env, capture_output=True, encoding="utf-8", check=False)
    assert debugging.stderr.startswith("Traceback (most recent call last):\n")
    assert debugging.stderr.endswith("Error: A fault of this program: ZeroDivisionError: by zero\n")


@pytest.mark.parametrize("home", ["/nonexistent", "relative", None], ids=["no such directory", "no path", "no HOME"])
def test_missing_home_changes_nothing(home: str | None, tmp_path: Path) -> None:
    env = {name: value for name, value in environment(tmp_path).items() if name != "HOME"} | ({"HOME": home} if home else {})
    done = subprocess.run([*COMMAND, "--version"], env=env, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"slotfile {__version__}\n", "")
