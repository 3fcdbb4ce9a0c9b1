"""What of the libraries goes into the executable, and what stays out."""

import importlib.util
import platform
import zlib
from pathlib import Path
from typing import Final

from runner.bundle.cpu_library import PREFIX, SUFFIX
from runner.bundle.digest import DIRECTORY, MODULE, PACKED_SUFFIX
from runner.errors import ConfigError

# Name in the runtime, file, kind: as PyInstaller lists them.
Entry = tuple[str, str, str]

# Packages that something names in passing and the program never imports at run time.
FOREIGN: Final = """
    numpy diskcache pydantic pydantic_core annotated_types typing_inspection mypy mypy_extensions librt ast_serialize
    hypothesis sortedcontainers pygments brotli brotlicffi aiodns pycares uvloop gunicorn twisted IPython ipywidgets babel
    setuptools pkg_resources pip wcwidth._wcwidth_c markdown_it mdurl rich.markdown rich.syntax rich.traceback rich.json rich.__main__
"""

# The standard library's share of the same. Nothing here speaks TLS, and aiohttp reads the machine's certificates for it on sight: 34 ms.
# PyInstaller's run-time hook for `multiprocessing` would cost 20 ms at every start.
UNUSED: Final = """
    ssl _ssl tkinter _tkinter sqlite3 curses _curses _curses_panel readline pydoc doctest unittest lib2to3 distutils xmlrpc test ensurepip
    idlelib turtle pdb multiprocessing _multiprocessing _posixshmem lzma _lzma bz2 _bz2 _uuid zoneinfo _zoneinfo _pydecimal
    ftplib _testcapi _codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp _codecs_kr _codecs_tw _multibytecodec
"""

# Libraries that stay compressed inside the executable. The other shared libraries lie there as they are: unpacking is a third of
# the way to the first token, and most of it was zlib (docs/log.md). This one is large.
COMPRESSED: Final = ("libstdc++",)

# llama-cpp-python beyond its low-level binding, which imports none of it.
BINDING: Final = """
    llama llama_cache llama_chat_format llama_cpp_ext llama_grammar llama_speculative llama_tokenizer llama_types llava_cpp mtmd_cpp
    server _ggml _internals _logger _utils
"""

EXCLUDED: Final = [*FOREIGN.split(), *UNUSED.split(), *(f"llama_cpp.{name}" for name in BINDING.split())]

# Run-time hooks of PyInstaller for what this program does not do: reading sources, and walking packages.
UNUSED_HOOKS: Final = ("pyi_rth_inspect", "pyi_rth_pkgutil")

# libllama is opened by its plain name; the others are found by the names that it is linked to.
LIBRARY_DIR: Final = "llama_cpp/lib"
NEEDED_LIBRARIES: Final = ("libllama.so", "libggml.so.0", "libggml-base.so.0")

# The variant that every processor of a kind can run: there where the CPU back end was built for all of them.
OLDEST_CPU: Final = {"x86_64": f"{PREFIX}x64.so", "aarch64": f"{PREFIX}armv8.0_1.so"}


def wanted(name: str, source: str | None, libraries: list[Path]) -> bool:
    """Whether a file that PyInstaller found is needed. Of llama.cpp's libraries only the chosen ones are, each once.

    The CPU variants are seen by PyInstaller for what they are linked to, and go in by `compressed_variants`.
    """
    if name.startswith(("llama_cpp/lib/", "libggml", "libllama")):
        names = {f"{LIBRARY_DIR}/{path.name}" for path in libraries if not path.name.startswith(PREFIX)}
        return name in names and source is not None and Path(source) in libraries
    return ".dist-info/" not in name and not name.endswith((".pyi", ".h", "/py.typed", ".c"))


def llama_libraries(backends: list[str]) -> list[Path]:
    """One copy of each library: what libllama needs, every CPU variant, and the other back ends that were asked for. Raises ConfigError."""
    directory = library_directory()
    lack = what_lacks(directory, backends)
    if lack is not None:
        raise ConfigError(lack, hint=f"rm -rf .venv && make setup BACKENDS={','.join(backends)}")
    found = [directory / name for name in NEEDED_LIBRARIES]
    for backend in backends:
        found += sorted(directory.glob(f"libggml-{backend}*.so"))
    return found


def library_directory() -> Path:
    """Where the installed llama-cpp-python keeps its libraries."""
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "lib"


def what_lacks(directory: Path, backends: list[str]) -> str | None:
    """What libraries built with other flags than ours do not have, as a sentence; None where all is there.

    pip takes a wheel from its cache without asking how it was built, and one for a single CPU would end on another with SIGILL.
    """
    oldest = OLDEST_CPU.get(platform.machine(), f"{PREFIX}*.so")
    if "cpu" in backends and not any(directory.glob(oldest)):
        return f"The installed llama-cpp-python was compiled for one kind of CPU: it has no {oldest}"
    absent = [backend for backend in backends if not any(directory.glob(f"libggml-{backend}*.so"))]
    return f"The installed llama-cpp-python has no back end {absent[0]!r}" if absent else None


def set_openssl_apart(entries: list[Entry], work: Path) -> list[Entry]:
    """libcrypto, packed, and Python's module for it where runner/bundle/digest.py finds them and no start does."""
    return [_apart(entry, work) for entry in entries]


def _apart(entry: Entry, work: Path) -> Entry:
    name, source, _ = entry
    file = Path(source)
    if file.name.startswith("libcrypto"):
        packed = _packed(file, work / (file.name + PACKED_SUFFIX))
        return f"{DIRECTORY}/{packed.name}", str(packed), "ZIPFILE"
    if Path(name).name.startswith(MODULE):
        return f"{DIRECTORY}/{file.name}", source, "DATA"
    return entry


def _packed(library: Path, target: Path) -> Path:
    """Such a file is copied as it is, by the build and at a start (typecode ZIPFILE)."""
    target.write_bytes(zlib.compress(library.read_bytes(), 9))
    return target


def compressed_variants(libraries: list[Path], work: Path) -> list[Entry]:
    """The CPU variants as runner/bundle/cpu_library.py reads them."""
    entries = []
    for path in libraries:
        if path.name.startswith(PREFIX):
            packed = _packed(path, work / (path.name.removesuffix(".so") + SUFFIX))
            entries.append((f"{LIBRARY_DIR}/{packed.name}", str(packed), "ZIPFILE"))
    return entries
