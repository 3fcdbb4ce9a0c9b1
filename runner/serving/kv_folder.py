"""A directory of this user alone: whoever else there is can neither read its files nor put any there.

Files are reached by the open directory where the system can (openat and its kind), so that the path may be renamed, or replaced by a
link, while the program runs. Links are followed nowhere inside it, nor where the path itself is one.
"""

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from runner.errors import ConfigError

if sys.platform != "win32":
    import fcntl

PART_SUFFIX: Final = ".part"

_HAS_DIR_FD: Final = {os.open, os.unlink, os.rename, os.utime} <= os.supports_dir_fd and os.scandir in os.supports_fd
_FOLLOWS: Final = os.utime not in os.supports_follow_symlinks  # where links cannot be left alone
_PRIVATE: Final = 0o700
_NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0)
# A pipe under a file's name is not waited for.
_READ: Final = os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | getattr(os, "O_BINARY", 0)
_DIRECTORY: Final = os.O_RDONLY | _NO_LINK | getattr(os, "O_DIRECTORY", 0)


@dataclass(frozen=True, slots=True)
class Found:
    """A name in the directory. `is_file`: a regular file and no link; `used_at` is its mtime."""

    name: str
    n_bytes: int
    used_at: float
    is_file: bool


class PrivateDirectory:
    """Open until `close`. Methods raise OSError; names are plain file names, made by us."""

    def __init__(self, path: Path, *, create: bool = True, has_dir_fd: bool = _HAS_DIR_FD) -> None:
        """Open it, and create it with mode 0700 where it is not there and `create` is on. Raises ConfigError with what is wrong."""
        self.path = path
        try:
            if create:
                path.mkdir(_PRIVATE, parents=True, exist_ok=True)
            _check(path, path.lstat())
            self._handle = _opened(path) if has_dir_fd else None
        except FileExistsError as error:
            raise ConfigError(f"{path} is no directory; --kv-dir names one") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"The directory {path} cannot be used: {getattr(error, 'strerror', None) or error}") from error

    def close(self) -> None:
        """Let go of it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __iter__(self) -> Iterator[Found]:
        """What lies in it, in no order."""
        with os.scandir(self.path if self._handle is None else self._handle) as names:
            for entry in names:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    status = entry.stat(follow_symlinks=False)
                    yield Found(entry.name, status.st_size, status.st_mtime, stat.S_ISREG(status.st_mode))

    def open(self, name: str) -> FileIO:
        """For reading. A link, a pipe and a directory are refused."""
        return _regular(os.open(self._place(name), _READ, dir_fd=self._handle), name)

    @contextmanager
    def new_file(self, name: str) -> Iterator[FileIO]:
        """A file of mode 0600 that takes its name, and the place of one that has it, when the block ends well, and else is gone.

        Without fsync: a state that a power failure takes is computed again, one that it damages has a wrong hash, and to wait for the disk
        would hold up all others that use it. While it has another name it is locked (see `is_abandoned`).
        """
        temporary = f".{name}.{os.urandom(8).hex()}{PART_SUFFIX}"
        descriptor = os.open(self._place(temporary), _CREATE, 0o600, dir_fd=self._handle)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                _lock(file)
                yield file
            os.replace(self._place(temporary), self._place(name), src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except BaseException:
            with contextlib.suppress(OSError):
                self.delete(temporary)
            raise

    def delete(self, name: str) -> None:
        """Remove a file, or a link itself."""
        os.unlink(self._place(name), dir_fd=self._handle)

    def touch(self, name: str, used_at: float) -> None:
        """Set its mtime, in seconds of the wall clock."""
        os.utime(self._place(name), (used_at, used_at), dir_fd=self._handle, follow_symlinks=_FOLLOWS)

    def is_abandoned(self, temporary: str) -> bool:
        """Whether whoever wrote it has ended: its lock went with it. Windows lets nobody delete a file that is open, and needs none."""
        with self.open(temporary) as file:
            return _lock(file)

    def _place(self, name: str) -> str:
        return name if self._handle is not None else str(self.path / name)


def _opened(path: Path) -> int:
    """A descriptor. What is open now is checked, whatever the path has led to before. Raises ConfigError and OSError."""
    handle = os.open(path, _DIRECTORY)
    try:
        _check(path, os.fstat(handle))
    except ConfigError:
        os.close(handle)
        raise
    return handle


def _check(path: Path, status: os.stat_result) -> None:
    """Whether it is a directory of this user that nobody else can write. Raises ConfigError."""
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(f"{path} is a symbolic link; --kv-dir names the directory itself")
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is no directory; --kv-dir names one")
    if sys.platform != "win32":
        if status.st_uid != os.geteuid():
            raise ConfigError(f"The directory {path} belongs to user {status.st_uid}; --kv-dir takes one of user {os.geteuid()} alone")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(status.st_mode)
            raise ConfigError(
                f"Other users can write into the directory {path} (mode {mode:04o}); it must be 0700", hint=f"chmod 700 {path}"
            )


def _regular(descriptor: int, name: str) -> FileIO:
    """Owns the descriptor. Raises OSError for what is no regular file."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{name} is no regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def _lock(file: FileIO) -> bool:
    """Whether nobody else has it, as far as locks go where it lies. Held until the file is closed."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
