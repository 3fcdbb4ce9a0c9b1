"""The bootloader of a one-file executable: it waits for us and removes what it unpacked. When it is killed, we go too."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

POLL_S: Final = 0.5
UNPACKED_PREFIX: Final = "_MEI"


def is_one_file() -> bool:
    """Whether a bootloader process runs above this one."""
    unpacked = getattr(sys, "_MEIPASS", None)
    return sys.platform != "win32" and isinstance(unpacked, str) and Path(unpacked).name.startswith(UNPACKED_PREFIX)


async def parent_gone() -> None:
    """Wait until the bootloader has ended; forever where there is none."""
    if not is_one_file():
        await asyncio.Event().wait()
    parent = os.getppid()
    while os.getppid() == parent:  # noqa: ASYNC110 - no event tells of a parent's end
        await asyncio.sleep(POLL_S)
