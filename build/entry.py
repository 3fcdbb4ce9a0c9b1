"""Where the executable starts, as the program and, with the engine's flag, as the engine's process."""

import sys
from pathlib import Path

from runner.cli.main import ENGINE_FLAG, main

if sys.argv[1:2] == [ENGINE_FLAG]:
    from runner.bundle.cpu_library import unpack_cpu_library  # only the process that loads llama.cpp needs it

    unpack_cpu_library(Path(__file__).parent / "llama_cpp" / "lib")

sys.exit(main())
