"""What is written stands still for nobody and is complete when it is flushed."""

import asyncio
import io
import threading
import time

import msgspec
import pytest

from runner.errors import ConfigError
from runner.serving.protocol import Finished
from runner.terminal.progress import progress_line
from runner.terminal.pump import OutputPump
from runner.terminal.render import chosen_lines, kv_text, speed_line
from tests.fakes import model_info
from tests.terminal.scripted import STAMPS


class StandingStream(io.StringIO):
    """A terminal on which somebody pressed Ctrl-S."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def write(self, text: str) -> int:
        """Wait for Ctrl-Q."""
        self.goes_on.wait()
        return super().write(text)


class FullStream(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        """Always fails."""
        raise OSError(28, "No space left on device")


async def test_stream_that_stands_still_does_not_hold_the_loop() -> None:
    stream = StandingStream()
    pump = OutputPump(stream)
    for piece in ("one ", "two ", "three"):
        pump.write(piece)
    await asyncio.sleep(0.01)
    assert stream.getvalue() == ""
    stream.goes_on.set()
    await pump.flush()
    assert stream.getvalue() == "one two three"
    await pump.close()


async def test_stream_that_stands_still_does_not_hold_up_the_end() -> None:
    stream = StandingStream()
    pump = OutputPump(stream)
    pump.write("never seen")
    started_at = time.monotonic()
    await pump.close()
    assert time.monotonic() - started_at < 1
    stream.goes_on.set()


async def test_first_failure_is_told_at_once_and_again_at_each_flush() -> None:
    pump = OutputPump(FullStream())
    told = asyncio.Event()
    pump.on_broken = told.set
    pump.write("x")
    await asyncio.wait_for(told.wait(), 5)
    with pytest.raises(ConfigError, match=r"^The output cannot be written: No space left on device$"):
        await pump.flush()
    await pump.close()


async def test_missing_stream_swallows_everything() -> None:
    pump = OutputPump(None)
    pump.write("x")
    await pump.flush()
    await pump.close()


async def test_progress_shows_the_fraction_and_goes_away() -> None:
    stream = io.StringIO()
    async with progress_line(stream, lambda: 0.5):
        await asyncio.sleep(0.45)
    assert stream.getvalue() == "\rLoading the model: 50% \r\x1b[K"


async def test_quick_load_shows_nothing() -> None:
    stream = io.StringIO()
    async with progress_line(stream, lambda: 0.5):
        await asyncio.sleep(0)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("n", "line"),
    [(0, "0 tokens, first after 0.50 s"), (1, "1 token, first after 0.50 s"), (1001, "1,001 tokens, 1000.0 tokens/s, first after 0.50 s")],
)
def test_speed_is_that_between_the_first_and_the_last_token(n: int, line: str) -> None:
    assert speed_line(Finished("x", "stop", 5, 0, n, STAMPS)) == line


def test_what_was_chosen_is_three_lines_and_the_notes() -> None:
    assert chosen_lines(model_info()) == [
        "fake-model: fake 1M, loaded in 0.00 s",
        "4 slots x 512 tokens, KV cache 0 MiB (K f16, V f16), 1 thread",
        "CPU only, CPU library fake",
    ]


def test_types_of_keys_and_values_and_full_windows_are_named() -> None:
    info = msgspec.structs.replace(model_info(), cache_type_k="q8_0", cache_type_v="q4_0", swa_full=True)
    assert kv_text(3 << 20, info) == "KV cache 3 MiB (K q8_0, V q4_0, windows kept in full)"
    assert kv_text(3 << 20, info, 5000) == "KV cache 3 MiB (K q8_0, V q4_0, windows kept in full, one pool of 5,000 tokens)"
