"""The process's environment: the only module that reads it. Imports nothing but os, so that the first thing at start can use it."""

import os


def environment(name: str) -> str | None:
    """The value of an environment variable that is not an option (NO_COLOR, TERM, TMPDIR), or None where unset or empty."""
    return os.environ.get(name) or None


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """The environment for a process of ours: this one's with `extra`."""
    return {**os.environ, **extra}
