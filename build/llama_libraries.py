"""`python -m build.llama_libraries cpu,vulkan`: whether the installed llama-cpp-python was built as this program needs it."""

import sys

from build.contents import library_directory, what_lacks


def main(backends: str) -> int:
    """The exit code; what is wrong is one line on standard error."""
    lack = what_lacks(library_directory(), backends.split(","))
    if lack is not None:
        print(f"{lack}; it has to be compiled with the flags of build/llama_cpp.cmake", file=sys.stderr)
    return 0 if lack is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
