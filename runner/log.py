"""The log: one line a record, whatever the record holds, to standard error or to a file. Prompt and answer text never go in."""

import logging
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Final, TextIO

from runner.errors import ConfigError

LOGGERS: Final = ("slotfile", "runner")
MAX_WAITING: Final = 10_000
FLUSH_WITHIN_S: Final = 0.5


class OneLineFormatter(logging.Formatter):
    """Writes a record, its traceback included, as one line: what cannot be printed is escaped, so no text can forge a record."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The record as one printable line."""
        return escape(super().format(record))


class PatientHandler(logging.Handler):
    """Writes from a thread of its own: whoever logs never waits for a disk, or for a pipe whose reader stands still.

    Beyond MAX_WAITING lines new ones are dropped, and their number is told once the reader goes on.
    """

    def __init__(self, stream: TextIO, *, owns_stream: bool) -> None:
        super().__init__()
        self._stream, self._owns_stream = stream, owns_stream
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._n_dropped = 0
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one line."""
        if self._lines.qsize() >= MAX_WAITING:
            self._n_dropped += 1
            return
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - as logging's own handlers have it: no log line is worth the program
            self._n_dropped += 1
            return
        self._is_idle.clear()
        self._lines.put(line)

    def flush(self) -> None:
        """Wait until all is written, but no longer than half a second."""
        self._is_idle.wait(FLUSH_WITHIN_S)

    def close(self) -> None:
        """Write what is queued, as far as the reader takes it, and let go of the file."""
        self.flush()
        self._lines.put(None)
        self._thread.join(FLUSH_WITHIN_S)
        super().close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            if self._lines.empty():
                if self._n_dropped:
                    n_dropped, self._n_dropped = self._n_dropped, 0
                    self._write(f"{n_dropped} lines were dropped here: whoever reads the log stood still")
                self._is_idle.set()
        if self._owns_stream:
            self._stream.close()

    def _write(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._n_dropped += 1  # the disk is full or the reader has gone: the program goes on without a log


def setup(level: str, file: Path | None = None) -> None:
    """Send our loggers' records from `level` up, and other libraries' warnings, to `file` (appended) or standard error.

    May be called again: the new place replaces the old one. Raises ConfigError where the file cannot be opened.
    """
    handler = _handler(file)
    handler.setFormatter(OneLineFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old.formatter, OneLineFormatter)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(level.upper())


def escape(text: str) -> str:
    """Replace every character that is not printable (newlines, terminal codes, lone surrogates) by its escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _handler(file: Path | None) -> logging.Handler:
    if file is None:
        return PatientHandler(sys.stderr, owns_stream=False)
    try:
        return PatientHandler(file.open("a", encoding="utf-8", errors="backslashreplace"), owns_stream=True)
    except OSError as error:
        raise ConfigError(f"The log file {file} cannot be written: {error.strerror or error}") from error
