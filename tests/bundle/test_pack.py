"""Packing, finding and extracting: the file format, byte for byte, with a fake runtime around small models."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from runner.bundle.copying import new_file
from runner.bundle.gguf import read_header
from runner.bundle.locate import COOKIE_MAGIC, FOOTER, FOOTER_MAGIC, Bundle, current_bundle, find_bundle
from runner.bundle.manifest import Manifest
from runner.bundle.pack import MAX_PE_BYTES, Label, Platform, check_platform, extract, pack, platform_of, verify
from runner.bundle.source import open_source
from runner.config import ModelFile
from runner.errors import ConfigError, ModelDamaged
from tests.bundle.ggufs import Gguf, fake_pkg, fake_runtime, small_gguf

LABEL = Label("small", "Apache-2.0", "the licence", "{{ template }}", {"ctx": 64, "temperature": 0.2})


def silent(_: int) -> None:
    """Progress that nobody watches."""


def packed(directory: Path, gguf: bytes, name: str = "out") -> Bundle:
    model = directory / "model.gguf"
    model.write_bytes(gguf)
    return pack(fake_runtime(directory / "runtime"), open_source(model), LABEL, directory / name, silent)


def model_bytes(bundle: Bundle) -> bytes:
    assert bundle.model is not None
    return bundle.path.read_bytes()[bundle.model.offset : bundle.model.offset + bundle.model.length]


def test_packed_file_holds_bootloader_model_and_pkg_unchanged(tmp_path: Path) -> None:
    gguf = small_gguf().encode()
    bundle = packed(tmp_path, gguf)
    data = (tmp_path / "out").read_bytes()
    bootloader = (tmp_path / "runtime").read_bytes()[: -len(fake_pkg())]
    assert data.startswith(bootloader + bytes(65536 - len(bootloader)) + gguf)
    assert data.endswith(FOOTER_MAGIC + fake_pkg())
    assert os.access(bundle.path, os.X_OK)
    assert bundle.model == ModelFile(str(tmp_path / "out"), 65536, len(gguf))
    assert bundle.manifest == Manifest(
        name="small",
        sha256=hashlib.sha256(gguf).hexdigest(),
        size=len(gguf),
        license="Apache-2.0",
        license_text="the licence",
        chat_template="{{ template }}",
        arguments={"ctx": 64, "temperature": 0.2},
    )


def test_packed_file_packs_another_with_the_same_runtime(tmp_path: Path) -> None:
    first = packed(tmp_path, small_gguf().encode())
    second = pack(first, open_source(tmp_path / "model.gguf"), LABEL, tmp_path / "second", silent)
    assert second.path.read_bytes() == first.path.read_bytes()
    assert second.runtime_bytes == first.runtime_bytes


def test_extract_gives_the_model_back(tmp_path: Path) -> None:
    gguf = small_gguf().encode()
    extract(packed(tmp_path, gguf), tmp_path / "back.gguf", silent)
    assert (tmp_path / "back.gguf").read_bytes() == gguf


def test_progress_hears_of_the_model_written_and_read_again(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(small_gguf().encode())
    source = open_source(tmp_path / "model.gguf")
    heard: list[int] = []
    pack(fake_runtime(tmp_path / "runtime"), source, LABEL, tmp_path / "out", heard.append)
    assert sum(heard) == 2 * source.length


def test_altered_model_is_found_by_verify_and_not_extracted(tmp_path: Path) -> None:
    bundle = packed(tmp_path, small_gguf().encode())
    verify(bundle, silent)
    assert bundle.model is not None
    data = bytearray(bundle.path.read_bytes())
    data[bundle.model.offset + bundle.model.length - 40] ^= 1
    bundle.path.write_bytes(data)
    with pytest.raises(ModelDamaged, match="SHA-256"):
        verify(bundle, silent)
    with pytest.raises(ModelDamaged, match="SHA-256"):
        extract(bundle, tmp_path / "back.gguf", silent)
    assert not (tmp_path / "back.gguf").exists()


def test_runtime_without_model_is_legal_and_says_so(tmp_path: Path) -> None:
    runtime = fake_runtime(tmp_path / "runtime")
    assert (runtime.model, runtime.manifest, runtime.runtime_bytes) == (None, None, runtime.size)
    with pytest.raises(ConfigError, match="holds no model"):
        verify(runtime, silent)


def test_bundle_is_found_behind_a_code_signature(tmp_path: Path) -> None:
    bundle = packed(tmp_path, small_gguf().encode())
    signed = tmp_path / "signed"
    signed.write_bytes(bundle.path.read_bytes() + b"signature" * 1000)
    found = find_bundle(signed)
    assert found is not None
    assert found.manifest == bundle.manifest


def test_magic_bytes_planted_in_metadata_confuse_nobody(tmp_path: Path) -> None:
    gguf = small_gguf().add("a", 2000)
    gguf.metadata["general.description"] = "COOKIE-8 FOOTER---12"
    gguf.tensors["a"] = ((2000,), (fake_pkg(5000) + FOOTER_MAGIC + COOKIE_MAGIC).ljust(8000, b"\0"))
    data = gguf.encode().replace(b"COOKIE-8 FOOTER---12", COOKIE_MAGIC + FOOTER_MAGIC)
    bundle = packed(tmp_path, data)
    assert model_bytes(bundle) == data


def test_source_checkout_holds_no_model() -> None:
    assert current_bundle() is None


def test_files_of_others_are_no_bundles(tmp_path: Path) -> None:
    for content in (b"", b"short", b"\x7fELF" * 50_000, small_gguf().encode(), COOKIE_MAGIC * 30):
        (tmp_path / "file").write_bytes(content)
        assert find_bundle(tmp_path / "file") is None


@pytest.mark.parametrize("back", range(1, FOOTER.size + 1))
def test_every_altered_byte_of_the_footer_is_noticed(tmp_path: Path, back: int) -> None:
    bundle = packed(tmp_path, small_gguf().encode())
    data = bytearray(bundle.path.read_bytes())
    data[bundle.pkg_offset - back] ^= 0xFF
    bundle.path.write_bytes(data)
    try:
        found = find_bundle(bundle.path)
    except ModelDamaged as error:
        assert "damaged" in error.message
    else:
        # An altered magic, or bootloader length within reach, is no damage that the footer alone can show.
        assert found is not None
        assert found.model is None or back > FOOTER.size - 8


def test_altered_manifest_is_noticed(tmp_path: Path) -> None:
    bundle = packed(tmp_path, small_gguf().encode())
    data = bundle.path.read_bytes()
    bundle.path.write_bytes(data.replace(b'"Apache-2.0"', b'"Apache-9.9"'))
    with pytest.raises(ModelDamaged, match="manifest was altered"):
        find_bundle(bundle.path)


def splits(directory: Path, alignment: int = 32) -> tuple[Gguf, list[Path]]:
    """A whole model and the same in three parts, named the way llama-gguf-split names them."""
    whole = Gguf(alignment=alignment).add("a", 5).add("b", 64, 2).add("c", 3).add("d", 70)
    paths = []
    for no, names in enumerate((["a"], ["b", "c"], ["d"])):
        part = Gguf(metadata=dict(whole.metadata) if no == 0 else {}, alignment=alignment)
        part.metadata |= {"split.no": no, "split.count": 3, "split.tensors.count": 4}
        part.tensors = {name: whole.tensors[name] for name in names}
        paths.append(directory / f"m-{no + 1:05}-of-00003.gguf")
        paths[-1].write_bytes(part.encode())
    return whole, paths


@pytest.mark.parametrize("alignment", [32, 64])
def test_parts_are_joined_into_the_whole_model(tmp_path: Path, alignment: int) -> None:
    whole, paths = splits(tmp_path, alignment)
    bundle = pack(fake_runtime(tmp_path / "runtime"), open_source(paths[1]), LABEL, tmp_path / "out", silent)
    assert model_bytes(bundle) == whole.encode()


def test_missing_swapped_or_incomplete_parts_are_named(tmp_path: Path) -> None:
    _, paths = splits(tmp_path)
    paths[2].rename(tmp_path / "kept")
    with pytest.raises(ModelDamaged, match=r"m-00003-of-00003\.gguf is missing"):
        open_source(paths[0])
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(ModelDamaged, match="part 2 of 3, not 3 of 3"):
        open_source(paths[0])
    (tmp_path / "kept").rename(paths[2])
    lone = paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelDamaged, match="must end in"):
        open_source(lone)


def test_parts_of_something_that_is_no_language_model_are_refused(tmp_path: Path) -> None:
    _, paths = splits(tmp_path)
    paths[0].write_bytes(paths[0].read_bytes().replace(b"general.architecture", b"general.architectura"))
    with pytest.raises(ModelDamaged, match="no architecture"):
        open_source(paths[0])


@pytest.mark.parametrize("alignment", [1, 4, 16])
def test_badly_aligned_data_is_aligned_for_the_map(tmp_path: Path, alignment: int) -> None:
    bundle = packed(tmp_path, small_gguf(alignment).encode())
    assert model_bytes(bundle) == small_gguf().encode()


@pytest.mark.parametrize("alignment", [64, 4096, 1 << 17])
def test_model_lies_at_a_multiple_of_its_own_alignment_and_of_64_kib(tmp_path: Path, alignment: int) -> None:
    bundle = packed(tmp_path, small_gguf(alignment).encode())
    assert bundle.model is not None
    assert bundle.model.offset % max(alignment, 65536) == 0
    header = read_header(bundle.model)
    assert (bundle.model.offset + header.data_offset) % alignment == 0


def test_output_is_never_the_input_a_directory_or_in_a_missing_one(tmp_path: Path) -> None:
    bundle = packed(tmp_path, small_gguf().encode())
    source = open_source(tmp_path / "model.gguf")
    for out, expected in (
        (bundle.path, "being read"),
        (tmp_path / "model.gguf", "being read"),
        (tmp_path, "is a directory"),
        (tmp_path / "absent" / "out", "no directory"),
    ):
        with pytest.raises(ConfigError, match=expected):
            pack(bundle, source, LABEL, out, silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out", "runtime"]


def test_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ConfigError, match="1000 are free"):
        packed(tmp_path, small_gguf().encode())
    assert not (tmp_path / "out").exists()


def test_interrupted_pack_leaves_neither_file_nor_remainder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(small_gguf().encode())

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(fake_runtime(tmp_path / "runtime"), open_source(tmp_path / "model.gguf"), LABEL, tmp_path / "out", interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "runtime"]


def test_source_that_shrinks_while_it_is_read_is_told(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(small_gguf().encode())
    source = open_source(model)
    model.write_bytes(model.read_bytes()[:-100])
    with pytest.raises(ModelDamaged, match="ends 100 bytes early"):
        pack(fake_runtime(tmp_path / "runtime"), source, LABEL, tmp_path / "out", silent)


def test_windows_ends_at_4_gib_and_macos_is_refused() -> None:
    check_platform(Platform.WINDOWS, MAX_PE_BYTES)
    check_platform(Platform.LINUX, 1 << 40)
    with pytest.raises(ConfigError, match="Windows runs up to 4294967295"):
        check_platform(Platform.WINDOWS, MAX_PE_BYTES + 1)
    with pytest.raises(ConfigError, match="signature"):
        check_platform(Platform.MACOS, 1)


@pytest.mark.parametrize(
    ("first_bytes", "platform"),
    [
        (b"\x7fELF\x02", Platform.LINUX),
        (b"MZ\x90", Platform.WINDOWS),
        (b"\xcf\xfa\xed\xfe", Platform.MACOS),
        (b"#!/bin/sh", Platform.UNKNOWN),
    ],
)
def test_platform_is_told_by_the_first_bytes(first_bytes: bytes, platform: Platform) -> None:
    assert platform_of(first_bytes) is platform


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    if kind == "fifo":
        os.mkfifo(target)
    else:
        target.symlink_to(os.devnull)
    with pytest.raises(ConfigError, match="is a device, a pipe or a socket; name a file"), new_file(target):
        raise AssertionError("the block must not run")
    assert not target.is_file()


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no file"):
        find_bundle(tmp_path / "pipe")
