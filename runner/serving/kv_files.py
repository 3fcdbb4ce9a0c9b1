"""Parked cells on disk: which states lie in a directory, and reading, writing and deleting them within a bound.

The directory itself is the truth. A file is whole from the moment it has its name (see `PrivateDirectory.new_file`), its age is its
mtime, and how much there is is counted anew before each write. So several processes may use one directory without a lock: what another
one adds counts, what it deletes is missed once, and the longest unused file goes first whoever wrote it, of whatever key.

What goes wrong here costs time and no answer: it is one line in the log, and the cells are computed again.
"""

import array
import hashlib
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from runner.serving.kv_folder import PART_SUFFIX, Found, PrivateDirectory
from runner.serving.kv_format import (
    DamagedFile,
    Header,
    SavedCheckpoint,
    SavedState,
    encode_header,
    is_ours,
    read_header,
    read_parts,
    write_all,
)
from runner.serving.kv_key import StateKey

MIB: Final = 1 << 20

# What was of use later than this from now has the time of a clock that was wrong. It goes first, or it would stay for ever.
_CLOCK_SLACK_S: Final = 86_400.0
_SUFFIX: Final = ".kv"
_NAME: Final = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.kv")
_TEMPORARY: Final = re.compile(rf"\.[0-9a-f]{{16}}-[0-9a-f]{{32}}\.kv\.[0-9a-f]{{16}}{re.escape(PART_SUFFIX)}")
_DIGEST: Final = re.compile(r"(?:[0-9a-f]{2})*")

_LOG: Final = logging.getLogger("slotfile.kv")


@dataclass(slots=True, eq=False)
class KvEntry:
    """A state on disk. Only its `KvDirectory` changes `used_at`.

    `positions` are those of the checkpoints, ascending or not as they were saved; `n_bytes` what cells and checkpoints take in memory.
    """

    name: str
    tokens: list[int]
    domain: str
    session: str
    positions: tuple[int, ...]
    n_bytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class Change:
    """What became of a write. `added`: where the state lies now, None where it could not be written. `gone`: entries that are no more."""

    added: KvEntry | None = None
    gone: list[KvEntry] = field(default_factory=list)


class KvDirectory:
    """The states of one key in a directory that may hold others. For one thread at a time.

    `max_bytes` bounds all files of ours, `model_name` is for people who look.
    """

    def __init__(self, path: Path, key: StateKey, max_bytes: int, *, model_name: str = "", clock: Callable[[], float] = time.time) -> None:
        """Open and scan: reads the headers of the key's files, deletes damaged ones and what dead writers left. Raises ConfigError."""
        self._key, self._prefix, self._max_bytes, self._model_name, self._clock = key, key.digest, max_bytes, model_name, clock
        self._entries: dict[str, KvEntry] = {}
        # Files with names like ours that are not: never deleted, never counted.
        self._foreign: set[str] = set()
        self._directory = PrivateDirectory(path)
        try:
            self._scan()
        except OSError as error:
            self._tell("cannot be listed", error)

    def close(self) -> None:
        """Let go of the directory."""
        self._directory.close()

    @property
    def entries(self) -> list[KvEntry]:
        """Those that can be read, as far as is known."""
        return list(self._entries.values())

    def write(self, state: SavedState) -> Change:
        """Save a state, and delete what was longest unused where there is no room for it. One that is there is not written again."""
        assert _DIGEST.fullmatch(state.domain), "a domain that is no digest does not go to disk"
        assert _DIGEST.fullmatch(state.session), "a session that is no digest does not go to disk"
        name = f"{self._prefix}-{_digest(state.domain, state.tokens)}{_SUFFIX}"
        known = self._entries.get(name)
        if known is not None and _is_like(known, state) and self._touch(known, state.used_at):
            return Change(known)
        gone: list[KvEntry] = []
        try:
            head = encode_header(self._key, self._model_name, state)
            if not self._make_room(len(head) + state.n_bytes, name, gone):
                return Change(None, gone)
            with self._directory.new_file(name) as file:
                write_all(file, [head, *state.parts])
            self._directory.touch(name, state.used_at)
        except OSError as error:
            self._tell(f"took no state of {len(state.tokens):,} tokens", error)
            return Change(None, gone)
        gone += self._let_go([name])
        positions = tuple(checkpoint.pos for checkpoint in state.checkpoints)
        entry = KvEntry(name, list(state.tokens), state.domain, state.session, positions, state.n_bytes, state.used_at)
        self._entries[name] = entry
        return Change(entry, gone)

    def read(self, entry: KvEntry) -> SavedState | None:
        """The state, which has been of use now; None where it cannot be had: the entry is one no more."""
        try:
            with self._directory.open(entry.name) as file:
                header = self._checked(read_header(file), entry.name)
                cells, *checkpoints = read_parts(file, header)
        except DamagedFile as damage:
            self._refuse(entry.name, damage)
        except (OSError, MemoryError) as error:
            self._tell(f"gave no state of {len(entry.tokens):,} tokens", error)
        else:
            self._touch(entry, self._clock())
            saved = tuple(SavedCheckpoint(pos, data) for pos, data in zip(header.positions, checkpoints, strict=True))
            return SavedState(header.tokens, header.domain, header.session, cells, saved, entry.used_at)
        self._let_go([entry.name])
        return None

    def delete(self, entry: KvEntry) -> None:
        """Remove a state. One that is not there is no fault."""
        self._let_go([entry.name])
        self._remove(entry.name)

    def _scan(self) -> None:
        now = self._clock()
        for found in list(self._directory):
            if is_temporary_name(found.name):
                self._sweep(found.name)
            elif is_state_name(found.name) and found.name.startswith(self._prefix):
                self._take_in(found, now)

    def _take_in(self, found: Found, now: float) -> None:
        try:
            with self._directory.open(found.name) as file:
                header = self._checked(read_header(file), found.name)
        except DamagedFile as damage:
            self._refuse(found.name, damage)
        except (OSError, MemoryError) as error:
            self._tell(f"has {found.name}, which is ignored", error)
        else:
            self._entries[found.name] = KvEntry(
                found.name,
                header.tokens,
                header.domain,
                header.session,
                tuple(header.positions),
                sum(header.lengths),
                min(found.used_at, now),
            )

    def _checked(self, header: Header, name: str) -> Header:
        """Raises DamagedFile where a header belongs to another key or under another name."""
        if header.key != self._key:
            raise DamagedFile("it is of another model or other settings")
        if f"{self._prefix}-{_digest(header.domain, header.tokens)}{_SUFFIX}" != name:
            raise DamagedFile("it holds other tokens than its name says")
        return header

    def _sweep(self, temporary: str) -> None:
        try:
            if self._directory.is_abandoned(temporary):
                self._remove(temporary)
        except OSError as error:
            self._tell(f"has {temporary}, which is ignored", error)

    def _make_room(self, n_bytes: int, name: str, gone: list[KvEntry]) -> bool:
        """Whether so many bytes are within the bound now, those of the file of that name left out. Adds to `gone` what is no more."""
        if n_bytes > self._max_bytes:
            _LOG.warning("A state of %.1f MiB is not saved: --kv-dir-mib is %.1f", n_bytes / MIB, self._max_bytes / MIB)
            return False
        files = {found.name: found for found in self._directory if self._counts(found)}
        vanished = self._let_go(list(self._entries.keys() - files.keys()))
        if vanished:
            _LOG.info("%d states in %s were deleted by others", len(vanished), self._directory.path)
        gone += vanished
        files.pop(name, None)
        excess = sum(found.n_bytes for found in files.values()) + n_bytes - self._max_bytes
        latest = self._clock() + _CLOCK_SLACK_S
        for found in sorted(files.values(), key=lambda found: (found.used_at <= latest, found.used_at)):
            if excess <= 0:
                break
            if self._remove(found.name):
                excess -= found.n_bytes
                gone += self._let_go([found.name])
        return excess <= 0

    def _let_go(self, names: Iterable[str]) -> list[KvEntry]:
        """Those of the names that were entries, and are no more."""
        return [self._entries.pop(name) for name in names if name in self._entries]

    def _counts(self, found: Found) -> bool:
        return found.is_file and is_state_name(found.name) and found.name not in self._foreign

    def _refuse(self, name: str, damage: DamagedFile) -> None:
        """Say why a file is ignored, and remove it where it is ours."""
        _LOG.warning("The file %s in %s is ignored: %s", name, self._directory.path, damage)
        self._remove(name)

    def _remove(self, name: str) -> bool:
        """Whether the file counts no more: it is gone, or was none of ours and stays."""
        try:
            if not remove_ours(self._directory, name):
                self._foreign.add(name)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._tell(f"keeps {name}", error)
            return False
        return True

    def _touch(self, entry: KvEntry, used_at: float) -> bool:
        """Whether the file is there."""
        try:
            self._directory.touch(entry.name, used_at)
        except OSError:
            return False
        entry.used_at = used_at
        return True

    def _tell(self, what: str, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        _LOG.warning("The directory %s %s: %s", self._directory.path, what, reason)


def is_state_name(name: str) -> bool:
    """Whether files of ours, of whatever key, are named so."""
    return _NAME.fullmatch(name) is not None


def is_temporary_name(name: str) -> bool:
    """Whether files of ours are named so while they are written."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_ours(directory: PrivateDirectory, name: str) -> bool:
    """Delete a file that begins as ours do; False for any other, which stays. Raises OSError."""
    with directory.open(name) as file:
        if not is_ours(file):
            return False
    directory.delete(name)
    return True


def _is_like(entry: KvEntry, state: SavedState) -> bool:
    """Whether a file of the same name has the same state in it."""
    positions = tuple(checkpoint.pos for checkpoint in state.checkpoints)
    return (entry.session, entry.positions, entry.n_bytes) == (state.session, positions, state.n_bytes)


def _digest(domain: str, tokens: list[int]) -> str:
    """What a file is named by: nobody's text. The domain is closed by a byte that no digest has."""
    numbers = array.array("i", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return hashlib.blake2b(domain.encode() + b"\0" + numbers.tobytes(), digest_size=16, person=b"slotfile.tokens").hexdigest()
