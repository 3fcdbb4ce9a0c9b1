"""The table of errors.py's docstring is the truth."""

import re
from collections.abc import Iterator

import pytest

from runner import errors
from runner.errors import InternalError, RunnerError, error_for_code

LINE = re.compile(r"^(?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: +(?P<code>\w+) +(?P<status>\d{3}|---))?(?: .*)?$")
NO_STATUS = "---"  # errors that end the program or the engine and never reach the wire


def descendants(kind: type[RunnerError]) -> Iterator[type[RunnerError]]:
    for child in kind.__subclasses__():
        yield child
        yield from descendants(child)


def drawn() -> dict[str, tuple[str, str, str]]:
    """The tree as drawn: name -> parent, code, status."""
    rows: dict[str, tuple[str, str, str]] = {}
    path: list[str] = []
    assert errors.__doc__ is not None
    for line in errors.__doc__.split("\n\n")[1].splitlines():
        match = LINE.match(line)
        assert match is not None, line
        depth = len(match["branch"]) // 4
        if depth:
            rows[match["name"]] = (path[depth - 1], match["code"], match["status"])
        path[depth:] = [match["name"]]
    return rows


KINDS = {kind.__name__: kind for kind in descendants(RunnerError) if kind.__module__ == errors.__name__}


def test_tree_names_every_class_and_no_other() -> None:
    assert sorted(drawn()) == sorted(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_class_is_as_drawn(name: str) -> None:
    kind = KINDS[name]
    parent, code, status = drawn()[name]
    assert (kind.__bases__[0].__name__, kind.code) == (parent, code)
    assert status == NO_STATUS or kind.status == int(status)
    assert kind.__doc__


def test_codes_tell_the_classes_apart() -> None:
    assert len({kind.code for kind in KINDS.values()}) == len(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_error_comes_back_from_another_process_as_what_it_was(name: str) -> None:
    again = error_for_code(KINDS[name].code, "It is so", "field")
    assert (type(again), again.message, again.param) == (KINDS[name], "It is so", "field")


def test_code_that_nobody_knows_is_our_fault() -> None:
    assert type(error_for_code("nonsense", "?", None)) is InternalError
