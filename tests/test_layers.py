"""Imports point down only: cli → api | terminal | web | bench | simulate → serving → llama → engine → bundle | config | log → errors."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNNER = ROOT / "runner"

LAYERS = (
    ("errors",),
    ("bundle", "config", "log", "environment"),
    ("engine",),
    ("llama",),
    ("serving",),
    ("api", "terminal", "web", "bench", "simulate"),
    ("cli",),
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
SURFACES = {"api", "terminal", "web", "bench", "simulate"}
IMPURE = {"asyncio", "threading", "time", "random", "os", "llama_cpp", "ctypes", "subprocess", "socket", "logging", "pathlib", "datetime"}

FILES = sorted(RUNNER.rglob("*.py"))
MODULES = [path for path in FILES if path.parent != RUNNER or path.stem in RANKS]


def layer(path: Path) -> str:
    """`runner/api/app.py` -> `api`, `runner/config.py` -> `config`."""
    return path.relative_to(RUNNER).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere in it, at once, later, or for types only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            yield node.module
            if node.module == "runner":
                yield from (f"runner.{alias.name}" for alias in node.names if alias.name in RANKS)


def layers_of(path: Path) -> set[str]:
    """The layers of ours that a file imports from, its own left out."""
    found = {name.split(".")[1] for name in imported(path) if name.startswith("runner.")}
    return found - {layer(path)}


def packages_of(path: Path) -> set[str]:
    """The packages of others."""
    return {name.partition(".")[0] for name in imported(path)} - {"runner"}


def name_of(path: Path) -> str:
    """For a test's id."""
    return str(path.relative_to(RUNNER))


def test_every_part_of_the_program_has_a_layer() -> None:
    parts = {layer(path) for path in FILES} - {"__init__", "__main__"}
    assert parts == set(RANKS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    own = layer(path)
    assert {name for name in layers_of(path) if RANKS[name] > RANKS[own]} == set()
    if own in SURFACES:
        assert layers_of(path) & SURFACES == set()


@pytest.mark.parametrize("path", [path for path in MODULES if layer(path) != "llama"], ids=name_of)
def test_only_llama_touches_native_code(path: Path) -> None:
    assert packages_of(path) & {"ctypes", "llama_cpp"} == set()


@pytest.mark.parametrize("path", [path for path in MODULES if layer(path) == "engine"], ids=name_of)
def test_engine_is_pure(path: Path) -> None:
    assert packages_of(path) & IMPURE == set()


@pytest.mark.parametrize("path", [path for path in FILES if path.stem != "environment"], ids=name_of)
def test_only_one_module_reads_the_environment(path: Path) -> None:
    names = {node.attr for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)}
    assert names & {"environ", "environb", "getenv"} == set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_program_imports_no_recipe_and_no_test(path: Path) -> None:
    assert packages_of(path) & {"build", "tests"} == set()
