"""Collects the licence text of everything that goes into an executable."""

import importlib.metadata
import json
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from runner.bundle.licenses import Notice
from runner.errors import ConfigError

TEXTS: Final = Path(__file__).parent / "license_texts"
LICENSE_FILE: Final = re.compile(r"(^|/)(LICEN[CS]E|COPYING|NOTICE)[^/]*$", re.IGNORECASE)
# Parts of the operating system and of the compiler that are copied in, by the start of the library's file name.
SYSTEM_LIBRARIES: Final = {
    "libgomp": "gcc-runtime",
    "libstdc++": "gcc-runtime",
    "libgcc_s": "gcc-runtime",
    "libquadmath": "gcc-runtime",
    "libssl": "openssl",
    "libcrypto": "openssl",
    "libz": "zlib",
    "libbz2": "bzip2",
    "libffi": "libffi",
    "libexpat": "expat",
}


def collect(sources: Iterable[str]) -> list[Notice]:
    """The notices for the files at `sources`. Raises ConfigError where a part has no text."""
    owners = _owners()
    distributions, systems = set(), set()
    for source in sources:
        path = Path(source)
        owner = owners.get(str(path)) or owners.get(str(path.resolve()))
        if owner is not None:
            distributions.add(owner)
        elif ".so" in path.name and not _is_python(path):
            systems.add(_system_library(path))
    distributions.discard("slotfile")
    found = [_of_project(), *(_of_distribution(name) for name in sorted(distributions, key=str.lower))]
    found += [_of_file("llama.cpp and ggml", "MIT", "llama.cpp"), _of_python(), _of_bootloader()]
    return found + [_of_file(*system) for system in sorted(systems)]


def write_licenses(sources: Iterable[str], target: Path) -> None:
    """Write what `runner/bundle/licenses.py` reads."""
    notices = [{"name": notice.name, "license": notice.license, "text": notice.text} for notice in collect(sources)]
    target.write_text(json.dumps(notices), encoding="utf-8")


def _owners() -> dict[str, str]:
    """File -> distribution, for all that is installed."""
    owners = {}
    for distribution in importlib.metadata.distributions():
        for file in distribution.files or ():
            owners[str(distribution.locate_file(file))] = distribution.name
    return owners


def _is_python(path: Path) -> bool:
    return path.name.startswith("libpython") or path.is_relative_to(sysconfig.get_path("stdlib"))


def _system_library(path: Path) -> tuple[str, str, str]:
    for start, text in SYSTEM_LIBRARIES.items():
        if path.name.startswith(start + ".") or path.name.startswith(start + "-"):
            return path.name.split(".so")[0], "see text", text
    raise ConfigError(f"build/licenses.py knows no licence for {path.name}, which goes into the executable")


def _of_project() -> Notice:
    text = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
    return Notice("slotfile", "Apache-2.0", text)


def _of_distribution(name: str) -> Notice:
    distribution = importlib.metadata.distribution(name)
    files = [file for file in distribution.files or () if ".dist-info/" in str(file) and LICENSE_FILE.search(str(file))]
    texts = [Path(str(distribution.locate_file(file))).read_text(encoding="utf-8", errors="replace") for file in sorted(files)]
    if not texts:
        kept = TEXTS / f"{name.lower().replace('_', '-')}.txt"
        if not kept.is_file():
            raise ConfigError(f"The distribution {name} brings no licence text, and build/license_texts/ has none for it")
        texts = [kept.read_text(encoding="utf-8")]
    return Notice(f"{name} {distribution.version}", _stated(distribution), "\n\n".join(texts))


def _stated(distribution: importlib.metadata.Distribution) -> str:
    """The licence's name as the distribution gives it, in the newest of the three ways that there are."""
    metadata = distribution.metadata
    for field in ("License-Expression", "License"):
        lines = (metadata[field] or "").strip().splitlines() if field in metadata else []
        if lines and len(lines[0]) < 60:
            return lines[0]
    classifiers = [text.rsplit(" :: ", 1)[-1] for text in metadata.get_all("Classifier") or [] if text.startswith("License ::")]
    return ", ".join(classifiers) or "see text"


def _of_file(name: str, license_name: str, stem: str) -> Notice:
    path = TEXTS / f"{stem}.txt"
    if not path.is_file():
        raise ConfigError(f"{name} goes into the executable and build/license_texts/{stem}.txt is missing")
    return Notice(name, license_name, path.read_text(encoding="utf-8"))


def _of_python() -> Notice:
    name = f"Python {sys.version.split()[0]}"
    text = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    return Notice(name, "PSF-2.0", text.read_text(encoding="utf-8")) if text.is_file() else _of_file(name, "PSF-2.0", "python")


def _of_bootloader() -> Notice:
    """The only part of PyInstaller that an executable holds; its exception leaves the program's own licence alone."""
    notice = _of_distribution("pyinstaller")
    return Notice(f"PyInstaller's bootloader ({notice.name})", "GPL-2.0-or-later WITH Bootloader-exception", notice.text)
