"""The log: one line a record, whatever is in it."""

import logging
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


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "a\u2028b\u2029\x85", "\x1b[31mred", "\x00", "\ud800", "tab\there"])
def test_record_is_one_printable_line(tmp_path: Path, text: str) -> None:
    log.setup("info", tmp_path / "log")
    logging.getLogger("slotfile.test").info("%s", text)
    content = (tmp_path / "log").read_text(encoding="utf-8")
    assert content.endswith("\n")
    assert content[:-1].isprintable()


def test_traceback_stays_on_its_line(tmp_path: Path) -> None:
    log.setup("info", tmp_path / "log")
    try:
        raise ValueError("inner\nline")
    except ValueError:
        logging.getLogger("slotfile.test").exception("it failed")
    (line,) = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert "ValueError: inner" in line


@pytest.mark.parametrize(("level", "lines"), [("debug", 3), ("info", 2), ("error", 1)])
def test_level_decides_what_is_written(tmp_path: Path, level: str, lines: int) -> None:
    log.setup(level, tmp_path / "log")
    logger = logging.getLogger("slotfile.test")
    logger.debug("a")
    logger.info("b")
    logger.error("c")
    logging.getLogger("somebody.else").info("not ours")
    assert len((tmp_path / "log").read_text(encoding="utf-8").splitlines()) == lines


def test_second_setup_replaces_the_first(tmp_path: Path) -> None:
    log.setup("info", tmp_path / "one")
    log.setup("info", tmp_path / "two")
    logging.getLogger("slotfile.test").info("x")
    assert (tmp_path / "one").read_text(encoding="utf-8") == ""
    assert (tmp_path / "two").read_text(encoding="utf-8").count("\n") == 1


def test_file_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        log.setup("info", tmp_path / "missing" / "log")
