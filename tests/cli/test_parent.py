"""The bootloader above a one-file program: whether it is still there."""

import asyncio
import os
import subprocess
from collections.abc import Iterator

import pytest

from runner.cli import parent
from runner.cli.parent import is_stranger, parent_gone


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process that runs another program."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def test_process_with_our_command_line_may_be_our_bootloader() -> None:
    assert not is_stranger(os.getpid())


def test_process_with_another_one_took_our_bootloaders_place(stranger: int) -> None:
    assert is_stranger(stranger)


def test_process_that_cannot_be_asked_is_no_stranger() -> None:
    assert not is_stranger(2**22 + 1)


async def test_source_checkout_has_no_bootloader_that_could_go() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(parent_gone(), 0.05)


@pytest.mark.parametrize("gone", ["before we asked", "after"])
async def test_bootloader_that_went_is_noticed_whenever_that_was(monkeypatch: pytest.MonkeyPatch, stranger: int, gone: str) -> None:
    monkeypatch.setattr("sys._MEIPASS", "/tmp/_MEIabc", raising=False)
    monkeypatch.setattr(parent, "POLL_S", 0.01)
    monkeypatch.setattr(parent, "PARENT_PID", stranger if gone == "before we asked" else os.getpid())
    await asyncio.wait_for(parent_gone(), 1)
