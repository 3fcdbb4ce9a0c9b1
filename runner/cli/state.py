"""The directory where the program keeps what it may lose: history, log, the last fault. Without one it works all the same."""

import tempfile
from pathlib import Path
from typing import Final

MAX_LOG_BYTES: Final = 10 << 20


def state_dir() -> Path | None:
    """A directory of this user that can be written, or None: no home, no right, a read-only file system."""
    import platformdirs  # 20 ms that most commands do not need

    try:
        path = Path(platformdirs.user_state_dir("slotfile", appauthor=False))
        if not path.is_absolute():
            return None  # without HOME and a passwd entry `~` stays as it is
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except (OSError, RuntimeError):
        return None


def history_path() -> Path | None:
    """Where the chat keeps what was typed."""
    directory = state_dir()
    return None if directory is None else directory / "history"


def log_path() -> Path | None:
    """Where the log goes while the terminal belongs to the chat. One that has grown large is put aside first."""
    directory = state_dir()
    if directory is None:
        return None
    path = directory / "slotfile.log"
    try:
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        path.touch(mode=0o600)
    except OSError:
        return None
    return path


def crash_path() -> Path | None:
    """Where the traceback of a fault goes."""
    directory = state_dir()
    return None if directory is None else directory / "fault.log"
