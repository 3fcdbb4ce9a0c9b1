"""The bootloader of a one-file executable: it waits for us and removes what it unpacked. When it is killed, we go too."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

from runner.cli.origin import PARENT_PID

POLL_S: Final = 0.2  # with what the teardown may take, less than the two seconds in which nothing must be left
UNPACKED_PREFIX: Final = "_MEI"


def is_one_file() -> bool:
    """Whether a bootloader process runs above this one."""
    unpacked = getattr(sys, "_MEIPASS", None)
    return sys.platform != "win32" and isinstance(unpacked, str) and Path(unpacked).name.startswith(UNPACKED_PREFIX)


async def parent_gone() -> None:
    """Wait until the bootloader has ended; forever where there is none."""
    if not is_one_file():
        await asyncio.Event().wait()
    if is_stranger(PARENT_PID):
        return
    while os.getppid() == PARENT_PID:  # noqa: ASYNC110 - no event tells of a parent's end
        await asyncio.sleep(POLL_S)


def is_stranger(pid: int) -> bool:
    """Whether a process was started with another command line than we were: then our bootloader ended before we could ask for its id.

    The process 1 of a container may well be our bootloader. Where the system does not tell, it is taken for that.
    """
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes().endswith(Path("/proc/self/cmdline").read_bytes())
    except OSError:
        return False
