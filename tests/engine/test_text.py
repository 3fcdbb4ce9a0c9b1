"""Stop strings and UTF-8, whole, split at every index, and one piece at a time."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engine.detokenizer import Utf8Assembler
from runner.engine.stops import StopMatcher


def fed(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    """What is released over all pieces, and which stop string ended it."""
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        out += matcher.feed(piece)
        if matcher.matched is not None:
            return out, matcher.matched
    return out + matcher.finish(), None


CASES = [
    ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11", ("9, 10, 11",), "1, 2, 3, 4, 5, 6, 7, 8, ", "9, 10, 11"),
    ("5, 6, 7, 8", ("7, 8, X",), "5, 6, 7, 8", None),
    ("one\ntwo", ("\n",), "one", "\n"),
    ("aaab", ("aab",), "a", "aab"),
    ("abcd", ("bc", "abcd"), "a", "bc"),
    ("xyz", ("yz", "xyz"), "", "xyz"),
    ("nothing here", (), "nothing here", None),
    ("", ("x",), "", None),
]


@pytest.mark.parametrize(("text", "stops", "released", "matched"), CASES)
def test_stops_give_the_same_result_however_the_text_is_split(
    text: str, stops: tuple[str, ...], released: str, matched: str | None
) -> None:
    assert fed(stops, [text]) == (released, matched)
    assert fed(stops, list(text)) == (released, matched)
    for cut in range(len(text) + 1):
        assert fed(stops, [text[:cut], text[cut:]]) == (released, matched)


@given(text=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), cuts=st.sets(st.integers(0, 12)))
def test_no_split_changes_what_a_stop_string_leaves(text: str, stops: list[str], cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert fed(tuple(stops), pieces) == fed(tuple(stops), list(text))


@given(text=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_ever_released(text: str, stops: list[str]) -> None:
    released, matched = fed(tuple(stops), list(text))
    assert text.startswith(released)
    if matched is None:
        assert released == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(released + matched)


EMOJI = "😀 😺 👩‍👩‍👧 漢字 ключ 😀 é"


def test_code_points_are_emitted_whole_however_the_bytes_are_split() -> None:
    data = EMOJI.encode()
    for cut in range(len(data) + 1):
        assembler = Utf8Assembler()
        first, second = assembler.feed(data[:cut]), assembler.feed(data[cut:])
        assert first + second == EMOJI
        assert "\ufffd" not in first + second


def test_one_byte_at_a_time_gives_the_same_text() -> None:
    assembler = Utf8Assembler()
    assert "".join(assembler.feed(bytes([byte])) for byte in EMOJI.encode()) == EMOJI


def test_bytes_that_can_never_be_text_become_replacement_characters_and_nothing_raises() -> None:
    assembler = Utf8Assembler()
    out = "".join(assembler.feed(bytes([byte])) for byte in b"\xff\xc0a\x80\xe2\x28b\xf0\x9f")
    assert out == "\ufffd\ufffda\ufffd\ufffd(b"
    out.encode()


def test_dangling_bytes_at_the_end_are_dropped() -> None:
    assembler = Utf8Assembler()
    assert assembler.feed("😀".encode()[:3]) == ""
