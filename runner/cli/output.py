"""Standard output whose failures can be told from those of every other file."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class OutputLost(OSError):
    """Standard output is closed, or takes no more. That nobody reads it is a BrokenPipeError as ever."""


class Output(io.TextIOWrapper):
    """A text stream over the buffer of another. Raises OutputLost where the system refuses what is written."""

    def write(self, text: str, /) -> int:
        """See TextIOWrapper."""
        with _told_apart():
            return super().write(text)

    def flush(self) -> None:
        """See TextIOWrapper."""
        with _told_apart():
            super().flush()


def standard_output() -> Output:
    """What this process has, in UTF-8. Where the caller closed it, one that takes nothing: what has something to say there fails."""
    if sys.stdout is None:
        return Output(os.fdopen(os.open(os.devnull, os.O_RDONLY), "wb"), "utf-8")
    return Output(sys.stdout.buffer, "utf-8", "replace", line_buffering=sys.stdout.isatty())


@contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = "it is closed" if error.errno == errno.EBADF else error.strerror
        raise OutputLost(error.errno, reason) from error
