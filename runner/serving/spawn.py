"""Starts an engine's process with as little as that takes: the front does it first of all, before it has imported anything.

The engine reads its configuration from its stdin, so it can start, import and wait while the front still reads its options.
"""

import os
import signal
import sys

from runner.environment import child_environment

ENGINE_FLAG = "--engine-process"


class Spawned:
    """A started engine: its id, and our ends of its standard streams (file descriptors, owned by whoever takes this)."""

    __slots__ = ("pid", "stderr", "stdin", "stdout")

    def __init__(self, pid: int, stdin: int, stdout: int, stderr: int) -> None:
        self.pid, self.stdin, self.stdout, self.stderr = pid, stdin, stdout, stderr

    def close(self) -> None:
        """Nobody takes it: it has done nothing yet and is ended."""
        os.kill(self.pid, signal.SIGKILL)
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.close(descriptor)
        os.waitpid(self.pid, 0)


class EarlyEngine:
    """An engine that was started before anybody knew what it would be for. The first who asks gets it."""

    __slots__ = ("_spawned",)

    def __init__(self, spawned: Spawned | None) -> None:
        self._spawned = spawned

    def take(self) -> Spawned | None:
        """Once; None from then on."""
        spawned, self._spawned = self._spawned, None
        return spawned

    def close(self) -> None:
        """End it where nobody took it."""
        spawned = self.take()
        if spawned is not None:
            spawned.close()


def can_spawn() -> bool:
    """Whether the OS starts processes the way of POSIX (on Windows asyncio does it, whose pipes are of another kind)."""
    return os.name == "posix"


def spawn(command: list[str] | None = None) -> Spawned:
    """Start an engine in a session of its own: the terminal's Ctrl-C is the front's to handle. Raises OSError."""
    command = command or engine_command()
    ours, theirs = [], []
    for reads in (True, False, False):
        readable, writable = os.pipe()
        theirs.append(readable if reads else writable)
        ours.append(writable if reads else readable)
    actions = [(os.POSIX_SPAWN_DUP2, theirs[number], number) for number in range(3)]
    # A failed assertion in ggml would start gdb to print a backtrace: seconds in which the front waits for the end.
    environment = child_environment({"GGML_NO_BACKTRACE": "1"})
    try:
        pid = os.posix_spawn(command[0], command, environment, file_actions=actions, setsid=True)
    except OSError:
        for descriptor in ours:
            os.close(descriptor)
        raise
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    return Spawned(pid, *ours)


def engine_command() -> list[str]:
    """The same program again, as an engine."""
    if getattr(sys, "frozen", False):
        return [sys.executable, ENGINE_FLAG]
    return [sys.executable, "-m", "runner.serving.process"]
