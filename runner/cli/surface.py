"""What the standard streams are: a terminal to chat on, or pipes and files."""

import sys
from dataclasses import dataclass
from typing import TextIO

from runner.environment import environment


@dataclass(frozen=True, slots=True)
class Streams:
    """Standard input, output and error.

    `is_conversation`: input and output are this process's own terminal. `asks`: a person types, but without a cursor to edit with.
    """

    is_conversation: bool
    asks: bool
    has_cursor: bool
    has_colour: bool
    shows_progress: bool


def streams() -> Streams:
    """Look at the standard streams once."""
    is_conversation = _is_terminal(sys.stdin) and _is_terminal(sys.stdout) and _is_ours()
    has_person = _is_terminal(sys.stdin) and _is_terminal(sys.stderr)
    is_dumb = environment("TERM") in (None, "dumb") and sys.platform != "win32"
    return Streams(
        is_conversation=is_conversation,
        asks=has_person and not (is_conversation and not is_dumb),
        has_cursor=is_conversation and not is_dumb,
        has_colour=is_conversation and not is_dumb and environment("NO_COLOR") is None,
        shows_progress=_is_terminal(sys.stderr) and not is_dumb,
    )


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _is_ours() -> bool:
    from runner.terminal.keyboard import is_in_foreground

    return is_in_foreground(sys.stdin.fileno())
