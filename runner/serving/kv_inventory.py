"""What lies in a directory of parked cells, whoever put it there: for people who look, and who clear it."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from runner.serving.kv_files import is_state_name, is_temporary_name, remove_ours
from runner.serving.kv_folder import Found, PrivateDirectory
from runner.serving.kv_format import DamagedFile, read_header
from runner.serving.kv_key import StateKey


@dataclass(slots=True)
class Stored:
    """The states of one key. `oldest_at` is when the longest unused one was of use, in seconds of the wall clock."""

    model_name: str
    key: StateKey
    n_states: int = 0
    n_bytes: int = 0
    oldest_at: float = float("inf")


@dataclass(frozen=True, slots=True)
class Inventory:
    """By key, the largest first; and files of ours that cannot be used: damaged, of another format, not to be read."""

    stored: list[Stored]
    n_unusable: int
    n_unusable_bytes: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was deleted, and how many files of ours could not be."""

    n_files: int
    n_bytes: int
    n_kept: int


def take_inventory(path: Path) -> Inventory:
    """Read all headers in a directory. Raises ConfigError where it cannot be used."""
    directory = PrivateDirectory(path, create=False)
    stored: dict[StateKey, Stored] = {}
    unusable = []
    for found in directory:
        if is_state_name(found.name) and found.is_file:
            try:
                _count(directory, found, stored)
            except (OSError, DamagedFile):
                unusable.append(found)
    directory.close()
    by_size = sorted(stored.values(), key=lambda of_key: of_key.n_bytes, reverse=True)
    return Inventory(by_size, len(unusable), sum(found.n_bytes for found in unusable))


def clear(path: Path) -> Cleared:
    """Delete our files of all keys and nothing else; what is being written stays. Raises ConfigError where the directory cannot be used."""
    directory = PrivateDirectory(path, create=False)
    deleted, n_kept = [], 0
    for found in list(directory):
        if _may_go(directory, found):
            try:
                if remove_ours(directory, found.name):
                    deleted.append(found)
            except FileNotFoundError:
                continue
            except OSError:
                n_kept += 1
    directory.close()
    return Cleared(len(deleted), sum(found.n_bytes for found in deleted), n_kept)


def _count(directory: PrivateDirectory, found: Found, stored: dict[StateKey, Stored]) -> None:
    with directory.open(found.name) as file:
        header = read_header(file)
    of_key = stored.setdefault(header.key, Stored(header.model_name, header.key))
    of_key.n_states += 1
    of_key.n_bytes += found.n_bytes
    of_key.oldest_at = min(of_key.oldest_at, found.used_at)


def _may_go(directory: PrivateDirectory, found: Found) -> bool:
    if is_temporary_name(found.name) and found.is_file:
        with contextlib.suppress(OSError):
            return directory.is_abandoned(found.name)
    return is_state_name(found.name) and found.is_file
