"""`python -m build.quantize SOURCE TARGET Q8_0|Q4_0`: one requantisation in a process of its own."""

import sys
from pathlib import Path

from runner.errors import RunnerError
from runner.llama.quantize import quantize


def main(source: str, target: str, file_type: str) -> int:
    """The exit code."""
    assert file_type in ("Q8_0", "Q4_0")
    try:
        quantize(Path(source), Path(target), "Q8_0" if file_type == "Q8_0" else "Q4_0")
    except RunnerError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
