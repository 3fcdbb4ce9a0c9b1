"""Which CPU back end is unpacked, and that nothing but whole files appears."""

import zlib
from pathlib import Path

import pytest

from runner.bundle import cpu_library
from runner.bundle.cpu_library import FEATURES, HASWELL, VARIANTS, best_variant, unpack_cpu_library

ALL = set(VARIANTS)


def flags_of(*features: str) -> set[str]:
    return set().union(*(FEATURES[feature][1] for feature in features))


@pytest.mark.parametrize("name", VARIANTS)
def test_processor_gets_the_variant_that_is_made_for_it(name: str) -> None:
    assert best_variant(flags_of(*VARIANTS[name]) | {"fpu"}, ALL) == name


def test_features_that_no_variant_has_alone_fall_back_to_what_runs() -> None:
    assert best_variant(flags_of("sse42", "avx2"), ALL) == "sse42"
    assert best_variant(flags_of(*HASWELL, "avx_vnni", "avx512"), ALL) == "skylakex"
    assert best_variant(flags_of(*HASWELL) | {"avx512f"}, ALL) == "haswell"
    assert best_variant(flags_of(*HASWELL, "avx512"), ALL - {"skylakex"}) == "haswell"


def test_unknown_processor_or_variant_leaves_the_choice_to_llama_cpp() -> None:
    assert best_variant(set(), ALL) is None
    assert best_variant(flags_of("sse42"), {"armv8.0_1", "x64"}) is None


def packed(directory: Path, *names: str) -> None:
    for name in names:
        (directory / f"libggml-cpu-{name}.so.z").write_bytes(zlib.compress(name.encode()))


def unpacked(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix != ".z"}


def test_only_the_best_library_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(tmp_path, "x64", "haswell", "zen4")
    monkeypatch.setattr(cpu_library, "cpu_flags", lambda: flags_of(*HASWELL))
    unpack_cpu_library(tmp_path)
    assert unpacked(tmp_path) == {"libggml-cpu-haswell.so": b"haswell"}


def test_all_are_unpacked_where_the_processor_is_unknown_and_none_where_none_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_library, "cpu_flags", set)
    unpack_cpu_library(tmp_path)
    assert unpacked(tmp_path) == {}
    packed(tmp_path, "x64", "zen4")
    unpack_cpu_library(tmp_path)
    assert unpacked(tmp_path) == {"libggml-cpu-x64.so": b"x64", "libggml-cpu-zen4.so": b"zen4"}


def test_second_engine_start_leaves_a_library_in_use_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(tmp_path, "x64")
    monkeypatch.setattr(cpu_library, "cpu_flags", set)
    unpack_cpu_library(tmp_path)
    before = (tmp_path / "libggml-cpu-x64.so").stat().st_ino
    unpack_cpu_library(tmp_path)
    assert (tmp_path / "libggml-cpu-x64.so").stat().st_ino == before
