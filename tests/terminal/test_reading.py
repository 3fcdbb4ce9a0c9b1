"""Messages from a pipe: lines and blocks, whole, whatever pieces they come in."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.history import InMemoryHistory

from runner.terminal.reading import PipeReader, QuietFileHistory, is_open_block, open_history, unquoted


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe's two ends."""
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


async def messages_of(pipe: tuple[int, int], *pieces: bytes) -> list[str]:
    """What a reader makes of these writes, to the end of the file."""
    reader = PipeReader(pipe[0])
    found = []
    reading = asyncio.ensure_future(reader.read())
    for piece in pieces:
        os.write(pipe[1], piece)
        await asyncio.sleep(0)
    os.close(pipe[1])
    while (message := await reading) is not None:
        found.append(message)
        reading = asyncio.ensure_future(reader.read())
    return found


async def test_each_line_is_a_message_and_blank_lines_are_none(pipe: tuple[int, int]) -> None:
    assert await messages_of(pipe, b"one\n\n  \r\ntwo\r\nthree") == ["one", "two", "three"]


async def test_block_between_triple_quotes_is_one_message(pipe: tuple[int, int]) -> None:
    assert await messages_of(pipe, b'"""one\n\n two\n"""\nthree\n') == ["one\n\n two", "three"]


async def test_block_that_never_ends_loses_nothing(pipe: tuple[int, int]) -> None:
    assert await messages_of(pipe, b'"""one\ntwo\n') == ["one\ntwo"]


TEXT = '"""é\n漢"""\nso\n😀'


@pytest.mark.parametrize("at", range(len(TEXT.encode()) + 1))
async def test_pieces_may_be_cut_anywhere(pipe: tuple[int, int], at: int) -> None:
    data = TEXT.encode()
    assert await messages_of(pipe, data[:at], data[at:]) == ["é\n漢", "so", "😀"]


async def test_line_is_answered_before_the_pipe_closes(pipe: tuple[int, int]) -> None:
    reader = PipeReader(pipe[0])
    os.write(pipe[1], b"hello\n")
    assert await asyncio.wait_for(reader.read(), 5) == "hello"


async def test_bytes_that_are_no_text_become_replacement_characters(pipe: tuple[int, int]) -> None:
    assert await messages_of(pipe, b"a\xffb\n") == ["a\ufffdb"]


def test_block_is_open_from_the_first_quotes_to_the_second() -> None:
    assert [is_open_block(text) for text in ('"""a', '"""a"""', 'a """ b', "")] == [True, False, False, False]


def test_only_quotes_around_the_whole_message_are_taken_off() -> None:
    assert [unquoted(text) for text in ('"""a\nb"""', '"""doc"""\ncode', '"""a""" + """b"""')] == [
        "a\nb",
        '"""doc"""\ncode',
        '"""a""" + """b"""',
    ]


def test_history_without_a_place_is_in_memory(tmp_path: Path) -> None:
    assert isinstance(open_history(None), InMemoryHistory)
    assert isinstance(open_history(tmp_path / "nowhere" / "history"), InMemoryHistory)


def test_history_that_can_no_longer_be_written_is_no_error(tmp_path: Path) -> None:
    history = open_history(tmp_path / "history")
    assert isinstance(history, QuietFileHistory)
    (tmp_path / "history").unlink()
    (tmp_path / "history").mkdir()
    history.append_string("kept in memory")
