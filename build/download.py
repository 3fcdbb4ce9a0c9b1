"""A download that goes on where it was broken off, with a progress bar, and that takes its name only when it is whole."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from build.progress import progress_bar
from runner.errors import ConfigError, ModelDamaged

PARTIAL_CONTENT: Final = 206
OUT_OF_RANGE: Final = 416
READ_BYTES: Final = 1 << 20
AGAIN: Final = "run the same command again: it goes on where it stopped"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says to a request from some byte on: 206 where it starts there, 200 where it starts from the first."""

    status: int
    length: int | None
    chunks: Iterator[bytes]


@dataclass(frozen=True, slots=True)
class Source:
    """Where bytes come from. `open_at` asks from a byte on and raises ConfigError where nobody answers."""

    name: str
    open_at: Callable[[int], Answer]
    sha256: str | None = None


def fetch(source: Source, target: Path) -> Path:
    """Download to `target`; what is there under its `.part` name is not asked for again. Raises ConfigError and ModelDamaged."""
    part = target.with_name(f"{target.name}.part")
    n_present = part.stat().st_size if part.exists() else 0
    answer = source.open_at(n_present)
    if answer.status == OUT_OF_RANGE and n_present:  # what is there is no beginning of this file
        part.unlink()
        n_present, answer = 0, source.open_at(0)
    if answer.status not in (200, PARTIAL_CONTENT):
        raise ConfigError(f"{source.name}: the server answers {answer.status}")
    n_bytes, total = _append(answer, source.name, part, n_present if answer.status == PARTIAL_CONTENT else 0)
    if total is not None and n_bytes < total:
        raise ConfigError(f"{source.name} ended at {n_bytes:,} of {total:,} bytes", hint=AGAIN)
    _check(source, part)
    part.replace(target)
    return target


def _append(answer: Answer, name: str, part: Path, start: int) -> tuple[int, int | None]:
    """Bytes that are there now, and how many there should be."""
    total = None if answer.length is None else answer.length + start
    with part.open("ab" if start else "wb") as file, progress_bar(name, total or 0) as progress:
        progress(start)
        try:
            for chunk in answer.chunks:
                file.write(chunk)
                progress(len(chunk))
        except OSError as error:
            raise ConfigError(f"{name} was broken off at {file.tell():,} bytes: {error}", hint=AGAIN) from error
        return file.tell(), total


def _check(source: Source, part: Path) -> None:
    if source.sha256 is None:
        return
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.sha256:
        part.unlink()
        raise ModelDamaged(f"{source.name} has the SHA-256 {digest}; its source says {source.sha256}")
