"""The program with faulty engines: `python -m tests.soak.faulty_server SEED RATE LEAK_KIB serve ...`. See `faulty_engine.py`."""

import itertools
import sys
from unittest.mock import patch

from runner.cli.main import main as program
from runner.serving import spawn


def main() -> int:
    """Run the program; each engine that it starts has faults of its own."""
    seed, rate, leak_kib, *arguments = sys.argv[1:]
    seeds = itertools.count(int(seed))

    def engine_command() -> list[str]:
        return [sys.executable, "-m", "tests.soak.faulty_engine", str(next(seeds)), rate, leak_kib]

    with patch.object(spawn, "engine_command", engine_command):
        return program(arguments)


if __name__ == "__main__":
    sys.exit(main())
