"""The log: one line a record, whatever is in it."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import log
from runner.errors import ConfigError


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Leave the root logger as it was."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(before):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    for name in log.LOGGERS:
        logging.getLogger(name).setLevel(logging.NOTSET)


def written(path: Path) -> str:
    """What the file holds once all is written."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "a\u2028b\u2029\x85", "\x1b[31mred", "\x00", "\ud800", "tab\there"])
def test_record_is_one_printable_line(tmp_path: Path, text: str) -> None:
    log.setup("info", tmp_path / "log")
    logging.getLogger("slotfile.test").info("%s", text)
    content = written(tmp_path / "log")
    assert content.endswith("\n")
    assert content[:-1].isprintable()


def test_traceback_stays_on_its_line(tmp_path: Path) -> None:
    log.setup("info", tmp_path / "log")
    try:
        raise ValueError("inner\nline")
    except ValueError:
        logging.getLogger("slotfile.test").exception("it failed")
    (line,) = written(tmp_path / "log").splitlines()
    assert "ValueError: inner" in line


@pytest.mark.parametrize(("level", "lines"), [("debug", 3), ("info", 2), ("error", 1)])
def test_level_decides_what_is_written(tmp_path: Path, level: str, lines: int) -> None:
    log.setup(level, tmp_path / "log")
    logger = logging.getLogger("slotfile.test")
    logger.debug("a")
    logger.info("b")
    logger.error("c")
    logging.getLogger("somebody.else").info("not ours")
    assert len(written(tmp_path / "log").splitlines()) == lines


def test_second_setup_replaces_the_first(tmp_path: Path) -> None:
    log.setup("info", tmp_path / "one")
    log.setup("info", tmp_path / "two")
    logging.getLogger("slotfile.test").info("x")
    assert written(tmp_path / "one") == ""
    assert written(tmp_path / "two").count("\n") == 1


def test_file_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        log.setup("info", tmp_path / "missing" / "log")


def test_reader_that_stands_still_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    readable, writable = os.pipe()
    with os.fdopen(writable, "w") as stream, os.fdopen(readable) as reader:
        monkeypatch.setattr("sys.stderr", stream)
        log.setup("info", None)
        logger = logging.getLogger("slotfile.test")
        started = time.monotonic()
        for number in range(log.MAX_WAITING + 5_000):
            logger.info("line %d %s", number, "x" * 100)
        assert time.monotonic() - started < 5.0
        threading.Thread(target=lambda: logging.getLogger().handlers[-1].close(), daemon=True).start()
        lines = [reader.readline() for _ in range(log.MAX_WAITING)]
        assert [line.split()[4] for line in lines] == [str(number) for number in range(log.MAX_WAITING)]
        while "lines were dropped here" not in (line := reader.readline()):
            assert "line 1" in line
