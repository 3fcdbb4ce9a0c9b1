"""docs/reference.md is complete and says nothing that is not so: options, commands, routes, fields, metrics, errors, exit codes.

A row that is missing is shown as it should stand there.
"""

import re
from pathlib import Path

import click
import pytest

from runner.api.app import ROUTES, Route
from runner.api.exposition import Family
from runner.api.metrics import Metrics
from runner.api.parameters import RANGES, UNSUPPORTED
from runner.api.schemas import ChatBody, CompletionBody, GenerationBody
from runner.cli import main as edge
from runner.cli.group import COMMANDS, commands
from runner.config import ANSWER_SETTINGS, LOG_SETTINGS, MODEL_SETTINGS, SERVER_SETTINGS, Setting
from runner.serving.protocol import Counters, Snapshot
from runner.terminal.commands import COMMANDS as CHAT_COMMANDS
from tests.fakes import FakeEngineClient
from tests.test_errors import KINDS, NO_STATUS, drawn

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
LINES = REFERENCE.splitlines()
SETTINGS = (*MODEL_SETTINGS, *SERVER_SETTINGS, *LOG_SETTINGS, *ANSWER_SETTINGS)
FIELDS = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}


# What a setting without choices and bounds takes, by its kind.
WORDS = {
    "path": "file",
    "directory": "directory",
    "list": "text, several",
    "str": "text",
    "flag": "nothing; 1, true, 0 or false in the environment",
}


def section(title: str) -> list[str]:
    """The lines of one section."""
    start = LINES.index(f"## {title}")
    end = next((index for index in range(start + 1, len(LINES)) if LINES[index].startswith("## ")), len(LINES))
    return LINES[start:end]


def firsts(title: str) -> list[str]:
    """The first code word of each row of a section's tables."""
    return [match[1] for line in section(title) if (match := re.match(r"\| `([^`]+)`", line))]


def flag(setting: Setting) -> str:
    """As typed."""
    return f"`{setting.flag}`" if setting.short is None else f"`{setting.flag}`, `{setting.short}`"


def default(setting: Setting) -> str:
    """What holds when nobody says otherwise."""
    if setting.kind == "flag":
        return "off"
    return "" if setting.default is None else f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


def takes(setting: Setting) -> str:
    """Values that are accepted."""
    if setting.choices:
        return ", ".join(setting.choices)
    if setting.min is None:
        return WORDS[setting.kind]
    return f"{setting.min:.0f} to {setting.max:.0f}" if setting.max is not None else f"at least {setting.min:.0f}"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_option_has_its_row(setting: Setting) -> None:
    assert f"| {flag(setting)} | `{setting.env}` | {takes(setting)} | {default(setting)} | {setting.help} |" in LINES


def test_no_other_option_has_a_row() -> None:
    assert sorted(firsts("Options")) == sorted(setting.flag for setting in SETTINGS)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_its_row(name: str) -> None:
    assert any(line.startswith(f"| `{name}` | {COMMANDS[name]} |") for line in section("Commands"))


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_own_options_are_in_its_row(name: str) -> None:
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    (row,) = [line for line in section("Commands") if line.startswith(f"| `{name}` |")]
    own = [param for param in command.params if isinstance(param, click.Option) and param.envvar is None]
    assert [opt for param in own for opt in param.opts if f"`{opt}`" not in row] == []


def test_no_other_command_has_a_row() -> None:
    assert firsts("Commands") == list(COMMANDS)


@pytest.mark.parametrize("name", CHAT_COMMANDS)
def test_command_of_the_chat_has_its_row(name: str) -> None:
    assert f"| `{CHAT_COMMANDS[name].usage}` | {CHAT_COMMANDS[name].help} |" in section("In the chat")


def test_routes_are_those_of_the_server() -> None:
    assert firsts("HTTP routes") == [shown(route) for route in ROUTES]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_route_says_whether_it_needs_a_key_and_the_model(route: Route) -> None:
    (row,) = [line for line in section("HTTP routes") if line.startswith(f"| `{shown(route)}` |")]
    assert row.split(" | ")[1:3] == ["yes" if route.needs_key else "no", "yes" if route.needs_model else "no"]


def shown(route: Route) -> str:
    """As a person writes it."""
    return f"{route.method} {route.path.replace('{id:.+}', '{id}')}"


def test_fields_are_those_of_the_bodies() -> None:
    assert sorted(firsts("Request fields")) == sorted(FIELDS - UNSUPPORTED.keys())


@pytest.mark.parametrize("name", RANGES)
def test_field_has_its_range(name: str) -> None:
    low, high = RANGES[name]
    (row,) = [line for line in section("Request fields") if line.startswith(f"| `{name}` |")]
    assert row.split(" | ")[2] == (f"at least {low}" if high == float("inf") else f"{low} to {high}")


@pytest.mark.parametrize("name", sorted(FIELDS - UNSUPPORTED.keys()))
def test_field_says_which_endpoint_takes_it(name: str) -> None:
    (row,) = [line for line in section("Request fields") if line.startswith(f"| `{name}` |")]
    both, chat = name in GenerationBody.__struct_fields__, name in ChatBody.__struct_fields__
    assert row.split(" | ")[1] == ("both" if both else "chat" if chat else "text")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_field_that_is_refused_is_named(name: str) -> None:
    assert f"`{name}`" in "\n".join(section("Request fields that are refused"))


def metrics() -> list[Family]:
    """Every metric that a server with a loaded engine has."""
    client = FakeEngineClient()
    client.snapshot = Snapshot([], 0, Counters(), 1.0)
    return list(Metrics(client).families())


@pytest.mark.parametrize("metric", metrics(), ids=lambda metric: metric.name)
def test_metric_has_its_row(metric: Family) -> None:
    assert any(line.startswith(f"| `{metric.name}` | {metric.kind} | ") and line.endswith(f" | {metric.help_text} |") for line in LINES), (
        f"| `{metric.name}` | {metric.kind} | | {metric.help_text} |"
    )


def test_no_other_metric_has_a_row() -> None:
    assert set(firsts("Metrics")) == {metric.name for metric in metrics()}


@pytest.mark.parametrize("name", [name for name, (_, _, status) in drawn().items() if status != NO_STATUS])
def test_error_has_its_row(name: str) -> None:
    kind = KINDS[name]
    assert kind.__doc__ is not None
    assert f"| `{kind.code}` | {kind.status} | `{kind.type}` | {kind.__doc__.splitlines()[0]} |" in LINES


def test_exit_codes_are_those_of_the_edge() -> None:
    assert edge.__doc__ is not None
    told = re.findall(r"^ {4}(\d+) +(.*)$", edge.__doc__, re.MULTILINE)
    assert [f"| {code} | {meaning} |" for code, meaning in told] == [line for line in section("Exit codes") if re.match(r"\| \d", line)]


def test_readme_names_every_command_or_points_to_the_reference() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/reference.md" in readme or all(f"slotfile {name}" in readme for name in COMMANDS)


CASES = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
WANTED_CASES = (
    2, 4, 5, 6, 7, 9, 11, 16, 19, 20, 21, 22, 23, 24, 25, 29, 30, 31, 32, 33, 35, 36, 38, 39, 40, 43, 44, 45, 48, 50,
    54, 55, 57, 58, 62, 63, 65, 66, 67, 68, 69, 72, 75, 76, 79, 80, 84, 85, 86, 87, 91, 98, 100,
)  # fmt: skip


def test_every_case_has_its_row() -> None:
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", CASES, re.MULTILINE)] == list(WANTED_CASES)


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`(tests/\S+::\w+)`", CASES))))
def test_test_that_shows_a_case_exists(named: str) -> None:
    path, _, name = named.partition("::")
    assert re.search(rf"^ *(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
