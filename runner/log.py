"""The log: one line a record, whatever the record holds, to standard error or to a file. Prompt and answer text never go in."""

import logging
import sys
import time
from pathlib import Path
from typing import Final

from runner.errors import ConfigError

LOGGERS: Final = ("slotfile", "runner")


class OneLineFormatter(logging.Formatter):
    """Writes a record, its traceback included, as one line: what cannot be printed is escaped, so no text can forge a record."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The record as one printable line."""
        return escape(super().format(record))


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
        return logging.StreamHandler(sys.stderr)
    try:
        return logging.FileHandler(file, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"The log file {file} cannot be written: {error.strerror or error}") from error
