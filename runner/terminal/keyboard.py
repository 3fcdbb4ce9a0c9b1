"""The terminal between two prompts: what is typed is neither shown nor lost, and Ctrl-C and Ctrl-Z still make signals.

The kernel's line mode would show typed keys inside the answer and drop what a paste holds beyond 4,096 bytes a line.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The terminal's own buffer holds 4,096 bytes; when it is full, the kernel takes no more keys, Ctrl-C included.
MAX_TYPED_AHEAD = 2048

if sys.platform != "win32":
    import array
    import fcntl
    import os
    import signal
    import termios

    @contextmanager
    def quiet_keyboard(descriptor: int, *, is_prompting: Callable[[], bool]) -> Iterator[Callable[[], None]]:
        """Hold the terminal quiet; yields what gives it back at once. At the end nothing typed ahead is left for the shell.

        While `is_prompting` the terminal belongs to the prompt, which has a mode of its own.
        """
        before = termios.tcgetattr(descriptor)

        def give_back() -> None:
            signal.signal(signal.SIGCONT, signal.SIG_DFL)
            termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)

        def on_continue(*_: object) -> None:  # the shell has set a mode of its own while we were stopped (Ctrl-Z)
            if not is_prompting():
                _hush(descriptor)

        _hush(descriptor)
        signal.signal(signal.SIGCONT, on_continue)
        try:
            yield give_back
        finally:
            give_back()

    def _hush(descriptor: int) -> None:
        mode = termios.tcgetattr(descriptor)
        mode[3] &= ~(termios.ECHO | termios.ICANON)
        mode[3] |= termios.ISIG | termios.NOFLSH
        termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)

    def drop_overflow(descriptor: int) -> bool:
        """Whether more was typed ahead than the terminal should hold; it is thrown away then, or Ctrl-C would no longer arrive."""
        n_waiting = array.array("i", [0])
        fcntl.ioctl(descriptor, termios.FIONREAD, n_waiting)
        if n_waiting[0] <= MAX_TYPED_AHEAD:
            return False
        termios.tcflush(descriptor, termios.TCIFLUSH)
        return True

    def is_in_foreground(descriptor: int) -> bool:
        """Whether this process may use the terminal: one started with `&` would be stopped for it."""
        try:
            return os.tcgetpgrp(descriptor) == os.getpgrp()
        except OSError:
            return False

else:

    @contextmanager
    def quiet_keyboard(descriptor: int, *, is_prompting: Callable[[], bool]) -> Iterator[Callable[[], None]]:
        """A Windows console shows no keys while nobody reads them."""
        yield lambda: None

    def drop_overflow(descriptor: int) -> bool:
        """A Windows console has no such bound."""
        return False

    def is_in_foreground(descriptor: int) -> bool:
        """There are no background jobs on a Windows console."""
        return True
