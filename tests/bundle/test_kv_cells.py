"""What a cell takes by types and layers, and which types are refused. Real models: tests/llama/test_context.py."""

from pathlib import Path

import pytest

from runner.bundle.gguf import read_header
from runner.bundle.header import Header
from runner.bundle.kv_cells import GGML_TYPES, CellBytes, cell_bytes, check_cache_types, kv_layers, sliding_layers
from runner.config import CACHE_TYPES, CacheType, EngineConfig, FlashAttn, ModelFile
from runner.errors import ConfigError
from runner.llama.library import Library
from tests.bundle.ggufs import Gguf

FULL, SLIDES = False, True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def header_of(path: Path, architecture: str = "llama", n_layers: int = 2, /, **stated: object) -> Header:
    """A model with 2 key/value heads of 64 numbers; `stated` are further metadata of the architecture, `__` for a dot."""
    base: dict[str, object] = {
        "block_count": n_layers,
        "context_length": 128,
        "embedding_length": 256,
        "attention__head_count": 4,
        "attention__head_count_kv": 2,
    }
    metadata: dict[str, object] = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{name.replace('__', '.')}": entry for name, entry in (base | stated).items()}
    path.write_bytes(Gguf(metadata).add("token_embd.weight", 64, 3).encode())
    return read_header(path)


def config(type_k: CacheType = "f16", type_v: CacheType = "f16", *, flash_attn: FlashAttn = "auto", swa_full: bool = False) -> EngineConfig:
    file = ModelFile("model.gguf", 0, 1)
    return EngineConfig(model=file, model_name="m", cache_type_k=type_k, cache_type_v=type_v, flash_attn=flash_attn, swa_full=swa_full)


BYTES_OF_64: dict[CacheType, int] = {
    "f32": 256,
    "f16": 128,
    "bf16": 128,
    "q8_0": 68,
    "q4_0": 36,
    "q4_1": 40,
    "iq4_nl": 36,
    "q5_0": 44,
    "q5_1": 48,
}


def test_every_type_is_known() -> None:
    assert set(BYTES_OF_64) == set(CACHE_TYPES)


def test_numbers_of_types_are_the_bindings() -> None:
    api = Library(lambda level, text: None).api
    numbers = {name: getattr(api, f"GGML_TYPE_{name.upper()}", None) for name in CACHE_TYPES}
    assert [name for name, number in numbers.items() if number is None] == ["bf16"], "the binding has what it lacked: take it from there"
    assert {name: GGML_TYPES[name] for name in CACHE_TYPES if name != "bf16"} == {n: i for n, i in numbers.items() if i is not None}


@pytest.mark.parametrize("type_k", CACHE_TYPES)
@pytest.mark.parametrize("type_v", CACHE_TYPES)
def test_a_cell_holds_keys_and_values_of_each_head_and_layer(path: Path, type_k: CacheType, type_v: CacheType) -> None:
    found = cell_bytes(header_of(path), config(type_k, type_v))
    assert found == CellBytes(2 * 2 * (BYTES_OF_64[type_k] + BYTES_OF_64[type_v]), 0, 0)


def test_layers_may_have_different_heads_and_stated_lengths(path: Path) -> None:
    header = header_of(path, attention__head_count_kv=[2, 1], attention__key_length=20, attention__value_length=12)
    assert cell_bytes(header, config()).total == (2 + 1) * (20 + 12) * 2


PATTERNS: dict[str, tuple[str, dict[str, object], list[bool]]] = {
    "five of six": ("gemma3", {}, [SLIDES] * 5 + [FULL] + [SLIDES]),
    "the first is full": ("smallthinker", {}, [FULL, SLIDES, SLIDES, SLIDES, FULL, SLIDES, SLIDES]),
    "all": ("lfm2", {}, [SLIDES] * 7),
    "another period": ("gemma3", {"attention__sliding_window_pattern": 2}, [SLIDES, FULL] * 3 + [SLIDES]),
    "each layer stated": (
        "gemma3",
        {"attention__sliding_window_pattern": [1, 0, 0, 1, 0, 0, 1]},
        [SLIDES, FULL, FULL, SLIDES, FULL, FULL, SLIDES],
    ),
    "no window": ("gemma3", {"attention__sliding_window": 0}, [FULL] * 7),
    "llama.cpp does not slide here": ("llama", {}, [FULL] * 7),
    "nor here": ("phi3", {"attention__sliding_window_pattern": 2}, [FULL] * 7),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_which_layers_slide(path: Path, case: str) -> None:
    architecture, stated, expected = PATTERNS[case]
    header = header_of(path, architecture, 7, **{"attention__sliding_window": 512, **stated})
    assert list(sliding_layers(header)) == expected


def test_window_that_no_file_needs_to_state(path: Path) -> None:
    assert cell_bytes(header_of(path, "gemma2"), config()) == CellBytes(512, 512, 4096)
    assert cell_bytes(header_of(path, "gemma3"), config()) == CellBytes(1024, 0, 0)


def test_windows_kept_in_full_count_as_full_layers(path: Path) -> None:
    header = header_of(path, "gemma3", 6, attention__sliding_window=512)
    assert cell_bytes(header, config("q8_0", "q8_0")) == CellBytes(272, 5 * 272, 512)
    assert cell_bytes(header, config("q8_0", "q8_0", swa_full=True)) == CellBytes(6 * 272, 0, 0)


def test_sliding_layers_may_have_other_lengths(path: Path) -> None:
    lengths: dict[str, object] = {"attention__key_length_swa": 32, "attention__value_length_swa": 32}
    header = header_of(path, "gemma4", 2, attention__sliding_window=512, attention__sliding_window_pattern=[1, 0], **lengths)
    assert cell_bytes(header, config()) == CellBytes(512, 256, 512)


@pytest.mark.parametrize(
    ("architecture", "stated", "n_layers"),
    [
        ("gemma4", {"attention__shared_kv_layers": 10}, 20),
        ("gemma3n", {"attention__shared_kv_layers": 10}, 20),
        ("glm4moe", {"nextn_predict_layers": 1}, 29),
    ],
)
def test_layers_without_cells_of_their_own_count_nothing(path: Path, architecture: str, stated: dict[str, object], n_layers: int) -> None:
    assert len(kv_layers(header_of(path, architecture, 30, **stated))) == n_layers


LATENT: dict[str, object] = {
    "attention__head_count_kv": 1,
    "attention__key_length": 576,
    "attention__value_length": 512,
    "attention__key_length_mla": 192,
    "attention__value_length_mla": 128,
}


def test_latent_attention_keeps_no_values(path: Path) -> None:
    assert cell_bytes(header_of(path, "deepseek2", **LATENT), config()).total == 2 * 576 * 2


def refusal(header: Header, chosen: EngineConfig) -> tuple[str, str | None]:
    with pytest.raises(ConfigError) as caught:
        check_cache_types(header, chosen)
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize("type_k", CACHE_TYPES)
@pytest.mark.parametrize("type_v", CACHE_TYPES)
def test_every_pair_is_taken_where_blocks_divide_the_head(path: Path, type_k: CacheType, type_v: CacheType) -> None:
    check_cache_types(header_of(path), config(type_k, type_v))


def test_quantised_values_without_flash_attention_are_refused(path: Path) -> None:
    assert refusal(header_of(path), config("f16", "q8_0", flash_attn="off")) == (
        "--cache-type-v is q8_0 and --flash-attn is off: quantised values need flash attention",
        "--flash-attn auto, or --cache-type-v f16",
    )
    check_cache_types(header_of(path), config("q8_0", "bf16", flash_attn="off"))


def test_quantised_values_are_refused_where_llama_cpp_turns_flash_attention_off(path: Path) -> None:
    message, _ = refusal(header_of(path, "grok"), config("f16", "q4_0"))
    assert message == "--cache-type-v is q4_0: quantised values need flash attention, which llama.cpp does not use for grok"


@pytest.mark.parametrize("flash_attn", ["auto", "on", "off"])
def test_blocks_that_do_not_divide_a_head_are_refused(path: Path, flash_attn: FlashAttn) -> None:
    header = header_of(path, attention__key_length=80, attention__value_length=64)
    assert refusal(header, config("q5_1", "f16", flash_attn=flash_attn)) == (
        "--cache-type-k is q5_1, which packs 32 numbers in a block; a head's keys have 80 in this model, and that is no multiple of 32",
        "--cache-type-k f16",
    )
    check_cache_types(header, config("f16", "f16", flash_attn=flash_attn))


def test_latent_attention_takes_one_type(path: Path) -> None:
    header = header_of(path, "deepseek2", **LATENT)
    message, hint = refusal(header, config("f16", "q8_0"))
    assert message == "--cache-type-k is f16 and --cache-type-v is q8_0: this model keeps keys and values as one, so both must be the same"
    assert hint == "--cache-type-k f16 --cache-type-v f16"
    check_cache_types(header, config("q8_0", "q8_0"))
