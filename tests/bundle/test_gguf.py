"""The GGUF reader: what it tells of good files, and that bad ones give one sentence."""

import struct
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.bundle.gguf import read_header
from runner.bundle.header import Header, LongArray
from runner.config import ModelFile
from runner.errors import ModelDamaged
from tests.bundle.ggufs import BASE_METADATA, Gguf, small_gguf, string


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "model.gguf"


def read(path: Path, data: bytes) -> Header:
    path.write_bytes(data)
    return read_header(path)


def message_of(path: Path, data: bytes) -> str:
    with pytest.raises(ModelDamaged) as caught:
        read(path, data).check_usable()
    assert "\n" not in caught.value.message
    return caught.value.message


def test_header_tells_what_the_engine_needs(scratch: Path) -> None:
    header = read(scratch, small_gguf().encode())
    header.check_usable()
    assert (header.architecture, header.block_count, header.n_ctx_train, header.n_embd) == ("llama", 2, 128, 64)
    assert (header.head_counts, header.kv_head_counts) == ((4, 4), (2, 1))
    assert header.chat_template == "{{ messages }}"
    assert header.n_vocab == 3
    assert header.n_params == 64 * 3 + 5
    assert header.file_type == "F32"
    assert (header.split_count, header.split_no, header.alignment) == (1, 0, 32)
    assert header.data_offset % 32 == 0
    assert [(tensor.name, tensor.shape, tensor.offset) for tensor in header.tensors] == [
        ("token_embd.weight", (64, 3), 0),
        ("output_norm.weight", (5,), 768),
    ]


def test_heads_are_as_long_as_the_file_says_else_as_fits_the_width(scratch: Path) -> None:
    gguf = small_gguf()
    derived = read(scratch, gguf.encode())
    gguf.metadata |= {"llama.attention.key_length": 20, "llama.attention.value_length": 12}
    stated = read(scratch, gguf.encode())
    assert [(header.head_length("key"), header.head_length("value")) for header in (derived, stated)] == [(16, 16), (20, 12)]


def test_model_inside_another_file_reads_as_the_file_itself(scratch: Path) -> None:
    data = small_gguf().encode()
    scratch.write_bytes(b"x" * 4096 + data + b"GGUF" * 50)
    assert read_header(ModelFile(str(scratch), 4096, len(data))) == read(scratch, data)


def test_model_ends_where_its_place_ends_and_not_where_the_file_does(scratch: Path) -> None:
    data = small_gguf().encode()
    scratch.write_bytes(data + bytes(4096))
    with pytest.raises(ModelDamaged, match="not complete"):
        read_header(ModelFile(str(scratch), 0, len(data) - 40))


def test_last_tensor_may_lack_its_padding(scratch: Path) -> None:
    data = small_gguf().encode()
    read(scratch, data[:-12]).check_usable()
    assert "not complete" in message_of(scratch, data[:-13])


@pytest.mark.parametrize("content", [b"", b"GGUF", b"<!DOCTYPE html>" + bytes(100)], ids=["empty", "magic", "html"])
def test_foreign_file_is_named_as_no_model(scratch: Path, content: bytes) -> None:
    assert "is no GGUF model" in message_of(scratch, content)


def test_missing_file_and_directory_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelDamaged, match=r"no file"):
            read_header(path)


def patched(field: bytes, replacement: bytes) -> bytes:
    data = small_gguf().encode()
    assert data.count(field) == 1
    return data.replace(field, replacement)


COUNTS = struct.pack("<QQ", 2, len(BASE_METADATA))
LAYERS = string("llama.block_count") + struct.pack("<I", 4)
EMBEDDING = string("token_embd.weight") + struct.pack("<IQQIQ", 2, 64, 3, 0, 0)
DAMAGE = {
    "version 4": (b"GGUF\x03", b"GGUF\x04", "version is 4"),
    "big-endian": (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", "little-endian"),
    "tensor count": (COUNTS, struct.pack("<QQ", 1 << 40, 9), "announces 1099511627776 tensors"),
    "metadata count": (COUNTS, struct.pack("<QQ", 2, 1 << 63), "metadata entries"),
    "key length": (string("llama.block_count"), struct.pack("<Q", 1 << 62) + b"llama.block_count", "limit is 65535"),
    "vocabulary size": (struct.pack("<IIQ", 9, 8, 3), struct.pack("<IIQ", 9, 8, 1 << 30), "strings"),
    "array size": (struct.pack("<IIQ", 9, 4, 2), struct.pack("<IIQ", 9, 4, 1 << 31), "limit is"),
    "layers": (LAYERS + struct.pack("<I", 2), LAYERS + struct.pack("<I", 1 << 30), "limit is 512"),
    "no context": (struct.pack("<II", 4, 128), struct.pack("<II", 4, 0), "context_length is 0"),
    "dimensions": (EMBEDDING[-32:], struct.pack("<IQQIQ", 5, 64, 3, 0, 0), "5 dimensions"),
    "overflow": (EMBEDDING[-32:], struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0), "impossible shape"),
    "tensor type": (EMBEDDING[-32:], struct.pack("<IQQIQ", 2, 64, 3, 4, 0), "unknown type 4"),
    "block size": (EMBEDDING[-32:], struct.pack("<IQQIQ", 2, 65, 3, 8, 0), "multiple of 32"),
    "tensor offset": (EMBEDDING[-32:], struct.pack("<IQQIQ", 2, 64, 3, 0, 32), "must lie at 0"),
    "tensor size": (EMBEDDING[-32:], struct.pack("<IQQIQ", 2, 64, 3 << 20, 0, 0), "not complete"),
    "same tensor twice": (
        string("output_norm.weight") + struct.pack("<IQ", 1, 5),
        string("token_embd.weight") + struct.pack("<IQ", 1, 5),
        "stands twice",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_altered_header_is_told_in_one_sentence(scratch: Path, case: str) -> None:
    field, replacement, expected = DAMAGE[case]
    assert expected in message_of(scratch, patched(field, replacement))


def test_metadata_key_that_stands_twice_is_damage(scratch: Path) -> None:
    gguf = small_gguf()
    gguf.metadata["llama.context_lengtX"] = 1
    assert "stands twice" in message_of(scratch, gguf.encode().replace(b"llama.context_lengtX", b"llama.context_length"))


@pytest.mark.parametrize("alignment", [0, 3, 1 << 21])
def test_alignment_must_be_a_sensible_power_of_two(scratch: Path, alignment: int) -> None:
    gguf = small_gguf()
    gguf.metadata["general.alignment"] = alignment
    assert f"alignment is {alignment}" in message_of(scratch, gguf.encode())


def test_parts_adapters_and_vocabularies_are_not_whole_models(scratch: Path) -> None:
    part, adapter = small_gguf(), small_gguf()
    part.metadata |= {"split.count": 3, "split.no": 1}
    adapter.metadata["general.type"] = "adapter"
    assert "part 2 of 3" in message_of(scratch, part.encode())
    assert "'adapter'" in message_of(scratch, adapter.encode())
    assert "no tensors" in message_of(scratch, Gguf().encode())
    assert "multiple of 32" in message_of(scratch, small_gguf(alignment=8).encode())
    assert "no architecture" in message_of(scratch, Gguf(metadata={"x": 1}).add("a", 1).encode())


def check_quick_and_clean(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    started = time.monotonic()
    try:
        read_header(path).check_usable()
    except ModelDamaged as error:
        assert "\n" not in error.message
    assert time.monotonic() - started < 0.5


def test_every_truncation_is_damage_and_nothing_else(scratch: Path) -> None:
    data = small_gguf().encode()
    for length in range(len(data) - 12):
        assert message_of(scratch, data[:length])


def test_every_flipped_byte_reads_or_is_damage_and_nothing_else(scratch: Path) -> None:
    data = small_gguf().encode()
    header_bytes = len(data) - 768 - 32
    for at in range(header_bytes):
        for changed in (data[at] ^ 0xFF, data[at] ^ 0x80, data[at] ^ 1):
            check_quick_and_clean(scratch, data[:at] + bytes([changed]) + data[at + 1 :])


@settings(max_examples=300, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 500), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4), cut=st.integers(0, 900))
def test_any_mix_of_edits_and_a_cut_reads_or_is_damage(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, bytes]], cut: int
) -> None:
    data = bytearray(small_gguf().encode())
    for at, replacement in edits:
        data[at : at + len(replacement)] = replacement
    check_quick_and_clean(tmp_path_factory.getbasetemp() / "edited.gguf", bytes(data[: len(data) - cut]))


def test_vocabulary_of_half_a_million_is_stepped_over_quickly(scratch: Path) -> None:
    gguf = small_gguf()
    gguf.metadata["tokenizer.ggml.merges"] = ["some word"] * 500_000
    data = gguf.encode()
    scratch.write_bytes(data)
    started = time.process_time()
    header = read_header(scratch)
    assert time.process_time() - started < 1.0
    assert header.metadata["tokenizer.ggml.merges"] == LongArray(500_000)


@pytest.mark.parametrize("first", [b"\x7fELF", b"MZ\x90\0", b"\xcf\xfa\xed\xfe"])
def test_a_program_that_was_cut_off_is_named_as_such(tmp_path: Path, first: bytes) -> None:
    path = tmp_path / "cut"
    path.write_bytes(first + bytes(200))
    with pytest.raises(ModelDamaged, match="cut is a program without a model: it was cut off, or is none of slotfile's executables"):
        read_header(path)
