"""`python -m build.executable [MODEL] --backends cpu`: the runtime (PyInstaller), the model (build/fetch.py), and both in dist/MODEL."""

import argparse
import hashlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from build.fetch import Cache, fetch_license, fetch_model
from build.progress import progress_bar
from runner.bundle.catalogue import CatalogueEntry, find_entry, read_catalogue
from runner.bundle.copying import new_file, write_all
from runner.bundle.locate import Bundle, find_bundle
from runner.bundle.manifest import Argument
from runner.bundle.pack import EXECUTABLE_MODE, Label, pack
from runner.bundle.source import open_source
from runner.errors import RunnerError

ROOT: Final = Path(__file__).parent.parent
CACHE: Final = ROOT / ".cache"


def main(arguments: list[str]) -> int:
    """Build one executable and say where it lies. The exit code."""
    parser = argparse.ArgumentParser(prog="python -m build.executable")
    parser.add_argument("model", nargs="?", help="entry of models.toml (default: the one marked default)")
    parser.add_argument("--backends", default="cpu", help="llama.cpp back ends to collect, comma-separated")
    parser.add_argument("--fetch-only", action="store_true", help="get the model and stop")
    options = parser.parse_args(arguments)
    try:
        name, entry = find_entry(read_catalogue(ROOT / "models.toml"), options.model or None)
        if options.fetch_only:
            print(fetch_model(name, entry, Cache(CACHE, ROOT)))
        else:
            print(_describe(build(name, entry, options.backends)))
    except RunnerError as error:
        print(f"Error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def build(name: str, entry: CatalogueEntry, backends: str) -> Bundle:
    """Write dist/NAME unless it is there and newer than its parts."""
    cache = Cache(CACHE, ROOT)
    license_text = fetch_license(name, entry, cache)
    model = fetch_model(name, entry, cache)
    runtime = build_runtime(backends)
    arguments: dict[str, Argument] = {"ctx": entry.context, **entry.arguments}
    label = Label(name, entry.license, license_text, entry.chat_template, arguments)
    source = open_source(model)
    target = ROOT / "dist" / name
    existing = _current(target, (runtime.path, model, ROOT / "models.toml"))
    if existing is not None:
        return existing
    target.parent.mkdir(exist_ok=True)
    with progress_bar(f"packing {name}", 2 * source.length) as progress:
        return pack(runtime, source, label, target, progress)


def _current(target: Path, parts: tuple[Path, ...]) -> Bundle | None:
    """What lies at `target` where it is younger than all that it is made of."""
    if target.is_file() and target.stat().st_mtime_ns > max(path.stat().st_mtime_ns for path in parts):
        return find_bundle(target)
    return None


def build_runtime(backends: str) -> Bundle:
    """The executable without a model, built again only when something that goes into it has changed."""
    directory = CACHE / "runtime"
    runtime = directory / f"slotfile-{_fingerprint(backends)}"
    if not runtime.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob("slotfile-*"):
            old.unlink()
        _join_runtime(_run_pyinstaller(backends, directory), runtime)
    bundle = find_bundle(runtime)
    assert bundle is not None
    return bundle


def _fingerprint(backends: str) -> str:
    digest = hashlib.sha256(f"{backends} {sys.version}".encode())
    for path in sorted([*_files(ROOT / "runner"), *_files(ROOT / "build"), ROOT / "LICENSE"]):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    for distribution in sorted(importlib.metadata.distributions(), key=lambda found: found.name):
        digest.update(f"{distribution.name}=={distribution.version}".encode())
    return digest.hexdigest()[:16]


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _run_pyinstaller(backends: str, directory: Path) -> Path:
    work = directory / "work"
    work.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level", "WARN"]
    command += ["--workpath", str(work), "--distpath", str(directory), str(ROOT / "build" / "slotfile.spec")]
    command += ["--", "--backends", backends, "--licenses", str(work / "licenses.json")]
    print("building the runtime", file=sys.stderr, flush=True)
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise RunnerError("PyInstaller failed; its last lines are above")
    return directory / ("runtime.exe" if sys.platform == "win32" else "runtime")


def _join_runtime(built: Path, runtime: Path) -> None:
    """On Linux PyInstaller puts its archive into an ELF section; ours goes to the file's end, so that it is found without scanning."""
    if sys.platform != "linux":
        built.replace(runtime)
        return
    from PyInstaller import HOMEPATH, PLATFORM
    from PyInstaller.archive.readers import CArchiveReader

    pkg = CArchiveReader(str(built)).raw_pkg_data()
    bootloader = (Path(HOMEPATH) / "PyInstaller" / "bootloader" / PLATFORM / "run").read_bytes()
    with new_file(runtime, EXECUTABLE_MODE) as file:
        write_all(file, bootloader + pkg)
    built.unlink()


def _describe(bundle: Bundle) -> str:
    assert bundle.model is not None
    whole, model, program = (n_bytes / 1e6 for n_bytes in (bundle.size, bundle.model.length, bundle.runtime_bytes))
    return f"{bundle.path.relative_to(ROOT)}: {whole:.1f} MB, of which {model:.1f} MB model and {program:.1f} MB program"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
