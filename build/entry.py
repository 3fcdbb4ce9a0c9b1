"""Where the executable starts, as the program and, with the engine's flag, as the engine's process."""

import sys
from pathlib import Path

import runner.cli.origin  # first: it reads the parent's id  # noqa: F401
from runner.cli.main import main
from runner.serving.spawn import ENGINE_FLAG

if sys.argv[1:2] == [ENGINE_FLAG]:
    from runner.bundle.cpu_library import unpack_cpu_library  # only the process that loads llama.cpp needs it

    unpack_cpu_library(Path(__file__).parent / "llama_cpp" / "lib")

sys.exit(main())
