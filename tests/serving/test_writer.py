"""The engine's end of the pipe: a real pipe, and a reader that may stand still."""

import os
import threading
from collections.abc import Iterator

import msgspec
import pytest

from runner.serving.process import Writer
from runner.serving.protocol import FrameReader, FromEngine, LoadProgress

N_MESSAGES = 20_000  # several times what a pipe holds


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def received(fd: int, n: int) -> list[float]:
    """The fractions of the next `n` LoadProgress messages."""
    decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
    frames = FrameReader()
    found: list[float] = []
    while len(found) < n:
        for frame in frames.feed(os.read(fd, 1 << 16)):
            message = decoder.decode(frame)
            assert isinstance(message, LoadProgress)
            found.append(message.fraction)
    return found


def test_a_message_is_in_the_pipe_when_put_returns(pipe: tuple[int, int]) -> None:
    reader, fd = pipe
    writer = Writer(fd)
    os.set_blocking(reader, False)
    for number in range(100):
        writer.put(LoadProgress(float(number)))
        assert received(reader, 1) == [number]
    writer.finish()


def test_nobody_waits_for_a_reader_that_stands_still_and_nothing_is_lost_or_reordered(pipe: tuple[int, int]) -> None:
    reader, fd = pipe
    writer = Writer(fd)
    for number in range(N_MESSAGES):  # returns, although nobody has read a byte
        writer.put(LoadProgress(float(number)))
    assert received(reader, N_MESSAGES) == list(range(N_MESSAGES))
    writer.put(LoadProgress(-1.0))  # the backlog is gone or goes first
    assert received(reader, 1) == [-1.0]
    writer.finish()


def test_messages_of_several_threads_stay_whole_and_each_threads_in_order(pipe: tuple[int, int]) -> None:
    reader, fd = pipe
    writer, n_each = Writer(fd), N_MESSAGES // 4

    def put(first: int) -> None:
        for number in range(first, first + n_each):
            writer.put(LoadProgress(float(number)))

    threads = [threading.Thread(target=put, args=(number * n_each,)) for number in range(4)]
    for thread in threads:
        thread.start()
    found = received(reader, 4 * n_each)
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(4 * n_each))
    for number in range(4):
        own = [value for value in found if number * n_each <= value < (number + 1) * n_each]
        assert own == sorted(own)
    writer.finish()


def test_finish_writes_what_is_queued(pipe: tuple[int, int]) -> None:
    reader, fd = pipe
    writer = Writer(fd)
    for number in range(N_MESSAGES):
        writer.put(LoadProgress(float(number)))
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.extend(received(reader, N_MESSAGES)))
    thread.start()
    writer.finish()
    thread.join()
    assert found == list(range(N_MESSAGES))
