"""A file of parked cells is valid for one model under one set of parameters."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from runner.bundle.gguf import read_header
from runner.config import ModelFile
from runner.errors import ModelError
from runner.serving.kv_key import StateKey, model_id
from tests.bundle.ggufs import Gguf
from tests.serving.kv_states import KEY

OTHERS: dict[str, object] = {
    "model_id": "another",
    "llama_cpp_version": "b2",
    "cache_type_k": "q8_0",
    "cache_type_v": "f16",
    "flash_attn": False,
    "n_streams": 3,
    "n_ctx_slot": 2048,
    "kv_unified": True,
    "swa_full": True,
    "rope_freq_base": 10000.0,
    "rope_freq_scale": 0.5,
    "rope_scaling_type": 2,
    "adapters": ("x",),
    "format": 2,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A GGUF of 1.6 MB."""
    path = tmp_path / "model.gguf"
    path.write_bytes(Gguf().add("token_embd.weight", 64, 6400).encode())
    return path


def identity(path: Path, sha256: str | None = None) -> str:
    """Of a plain GGUF."""
    return model_id(ModelFile(str(path), 0, path.stat().st_size), read_header(path), sha256)


def test_every_field_changes_the_digest() -> None:
    assert set(OTHERS) == set(StateKey.__struct_fields__)
    digests = {msgspec.structs.replace(KEY, **{name: value}).digest for name, value in OTHERS.items()}
    assert len(digests | {KEY.digest}) == len(OTHERS) + 1


def test_digest_is_the_same_in_every_process_and_build() -> None:
    assert KEY.digest == "1e83d5aa50333cff"


def test_identity_of_an_untouched_file_stays(path: Path) -> None:
    assert identity(path) == identity(path)


def test_one_byte_written_anywhere_makes_another_identity_even_where_the_mtime_was_put_back(path: Path) -> None:
    before, times = identity(path), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    with path.open("r+b") as file:
        file.seek(123_457)
        file.write(b"!")
    os.utime(path, ns=times)
    assert path.stat().st_mtime_ns == times[1]
    assert identity(path) != before


def test_another_file_in_its_place_makes_another_identity_even_with_the_same_bytes_and_mtime(path: Path, tmp_path: Path) -> None:
    before = identity(path)
    shutil.copy2(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)
    assert identity(path) != before


def test_manifests_hash_holds_wherever_the_file_is_copied_to(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    packed.write_bytes(bytes(4096) + path.read_bytes())
    inside = model_id(ModelFile(str(packed), 4096, path.stat().st_size), read_header(path), "ab" * 32)
    assert inside == identity(path, "ab" * 32) != identity(path, "cd" * 32)


def test_manifests_hash_is_not_believed_of_other_weights(path: Path) -> None:
    before = identity(path, "ab" * 32)
    data = path.read_bytes()
    path.write_bytes(data[: -64 * 6400] + bytes(64 * 6400))
    assert identity(path, "ab" * 32) != before


def test_model_that_vanished_is_one_sentence(path: Path) -> None:
    model, header = ModelFile(str(path), 0, path.stat().st_size), read_header(path)
    path.unlink()
    with pytest.raises(ModelError, match=r"model\.gguf cannot be read: No such file"):
        model_id(model, header, None)
