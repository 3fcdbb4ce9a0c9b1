"""The faster SHA-256 of an executable: in a directory as the build makes it, in a process that has no OpenSSL yet."""

import _hashlib
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from build.contents import set_openssl_apart
from runner.bundle.digest import DIRECTORY, load_openssl, sha256

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the build leaves OpenSSL where it is")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
sys.modules["_hashlib"] = None  # as in an executable: hashlib finds none
import hashlib
del sys.modules["_hashlib"]
sys._MEIPASS = sys.argv[1]
from runner.bundle.digest import sha256
digest = sha256()
digest.update(b"abc")
used = {line.split()[-1] for line in open("/proc/self/maps") if "libcrypto" in line}
print(type(digest).__module__, digest.hexdigest(), *used)
"""
OF_ABC = hashlib.sha256(b"abc").hexdigest()


def libcrypto() -> Path:
    """The one that this Python uses."""
    hashlib.sha256()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    found = next((line.split()[-1] for line in lines if "libcrypto" in line), None)
    if found is None:
        pytest.skip("this Python has OpenSSL built in, or none")
    return Path(found)


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """What the bootloader unpacks, as far as it concerns this."""
    module = Path(_hashlib.__file__)
    found = [
        (libcrypto().name, str(libcrypto()), "BINARY"),
        (f"lib-dynload/{module.name}", str(module), "EXTENSION"),
        ("x", __file__, "DATA"),
    ]
    *apart, other = set_openssl_apart(found, tmp_path)
    assert other == found[-1]
    (tmp_path / "root" / DIRECTORY).mkdir(parents=True)
    for name, source, _ in apart:
        (tmp_path / "root" / name).write_bytes(Path(source).read_bytes())
    return tmp_path / "root"


def run(unpacked: Path) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, str(unpacked)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(unpacked)}  # as the bootloader sets it
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT, env=environment)
    return done.stdout.split()


def test_openssl_is_unpacked_when_it_is_first_asked_for(unpacked: Path) -> None:
    unpacked_library = unpacked / libcrypto().name
    assert run(unpacked) == ["_hashlib", OF_ABC, str(unpacked_library)]
    assert sorted(path.name for path in unpacked.iterdir()) == sorted([unpacked_library.name, DIRECTORY])
    assert unpacked_library.read_bytes() == libcrypto().read_bytes()
    assert run(unpacked) == ["_hashlib", OF_ABC, str(unpacked_library)]  # and what is there is used again


def test_without_it_pythons_own_is_used(tmp_path: Path) -> None:
    assert run(tmp_path) == ["_sha256", OF_ABC]


def test_a_python_that_has_openssl_keeps_its_own(tmp_path: Path) -> None:
    assert load_openssl(tmp_path) is sys.modules["_hashlib"]
    digest = sha256()
    digest.update(b"abc")
    assert digest.hexdigest() == OF_ABC
