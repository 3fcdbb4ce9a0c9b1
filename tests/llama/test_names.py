"""One pattern for many names finds what trying each of them would."""

import re
import time

from hypothesis import given
from hypothesis import strategies as st

from runner.llama.names import names_pattern

NAMES = st.sets(st.text("ab<|>0", min_size=1, max_size=6), min_size=1, max_size=12)


def naive(names: set[str]) -> re.Pattern[str]:
    """Each name in turn, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


@given(NAMES, st.text("ab<|>0", max_size=40))
def test_it_finds_the_same_as_trying_each_name(names: set[str], text: str) -> None:
    pattern = names_pattern(names)
    assert pattern is not None
    assert [match.span() for match in pattern.finditer(text)] == [match.span() for match in naive(names).finditer(text)]


@given(st.sets(st.text(min_size=1, max_size=4), min_size=1, max_size=8), st.data())
def test_any_character_may_be_in_a_name(names: set[str], data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from([*sorted(names), "x", "]", "^", "-", "\\"]), max_size=10)))
    pattern = names_pattern(names)
    assert pattern is not None
    assert [match.span() for match in pattern.finditer(text)] == [match.span() for match in naive(names).finditer(text)]


def test_without_names_there_is_no_pattern() -> None:
    assert names_pattern([]) is None
    assert names_pattern([""]) is None


def test_the_number_of_names_costs_nothing() -> None:
    pattern = names_pattern([f"<unused{n}>" for n in range(6242)] + ["<bos>", "[multimodal]"])
    assert pattern is not None
    assert len(pattern.pattern) < 1000
    started = time.perf_counter()
    assert pattern.search("<" * 262_144) is None
    assert pattern.search("<unused" * 37_000) is None
    assert time.perf_counter() - started < 0.1


def test_names_that_each_begin_the_next_are_no_trap() -> None:
    pattern = names_pattern(["a" * n for n in range(1, 3000)])
    assert pattern is not None
    assert pattern.match("a" * 2500 + "b")[0] == "a" * 2500  # type: ignore[index]
