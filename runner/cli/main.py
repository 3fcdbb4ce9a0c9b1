"""Where the program starts, and where every error of it ends: one sentence, and an exit code.

    0    done; the chat was left; the server was ended by SIGTERM
    1    an error that a sentence on standard error names
    2    the command line is wrong
    129  the terminal was closed (SIGHUP)
    130  Ctrl-C (SIGINT)
    141  nobody reads standard output any more (a pipe into `head`)

The engine process is this same program: its start waits for nothing that only the command line needs, so the imports stand below.
"""

import gc
import os
import sys
from collections.abc import Sequence
from typing import Final

from runner.cli.output import standard_output
from runner.serving.spawn import ENGINE_FLAG, EarlyEngine, can_spawn, spawn

EXIT_INTERRUPTED: Final = 130
NEEDS_ENGINE: Final = ("serve", "chat", "run", "start")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` None: what the process was started with."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _fill_standard_descriptors()
    if arguments[:1] == [ENGINE_FLAG]:
        gc.disable()  # until the load is done: 5 ms of walking over what stays for ever
        from runner.serving.process import engine_main  # the engine loads its model while the front imports the rest

        return engine_main()
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # before the command could take signals: while its engine is spawned, while it is imported
        return EXIT_INTERRUPTED


def _run(arguments: list[str]) -> int:
    early = EarlyEngine(spawn() if can_spawn() and needs_engine(arguments) else None)
    gc.disable()  # the imports make what stays for ever; a session lets the collector go on (session.py)
    try:
        _use_utf8()
        from runner.cli.failure import guarded  # the engine starts and imports while this one does

        return guarded(arguments, early)
    finally:
        early.close()


def needs_engine(arguments: Sequence[str]) -> bool:
    """Whether these arguments will start an engine, as far as a look can tell: an engine that is not needed ends unused."""
    if "--help" in arguments or "--version" in arguments[:1]:
        return False
    return not arguments or arguments[0] in NEEDS_ENGINE or arguments[0].startswith("-")


def _fill_standard_descriptors() -> None:
    """Open what the caller closed (`>&-`), or a socket would get its number and native code would print into it."""
    if os.name == "nt":
        return
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _use_utf8() -> None:
    """Text goes in and out as UTF-8 whatever the locale says, and nothing a model says can fail to be written."""
    for stream in (sys.stdin, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="replace")
    sys.stdout = standard_output()


if __name__ == "__main__":
    sys.exit(main())
