"""What a cell of the KV cache takes: keys and values of one token, by their types, and which layers keep a sliding window of them only.

Which layers slide stands in llama.cpp's code for each architecture (src/models/*.cpp, load_arch_hparams), and only in part in a file. An
architecture that is not in the table has no sliding layers in llama.cpp, whatever its metadata say.
"""

from dataclasses import dataclass
from typing import Final

from runner.bundle.header import TENSOR_TYPES, Header
from runner.config import CacheType, EngineConfig
from runner.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pattern:
    """Of `period` layers all but the last slide, or all but the first where `is_first_full`; 0: all of them, 1: none.

    A file may state another period, or each layer. `n_swa` is the window where it states none; 0: then no layer slides.
    """

    period: int
    is_first_full: bool = False
    n_swa: int = 0


SLIDING: Final = {
    "afmoe": Pattern(4),
    "cohere2": Pattern(4),
    "cohere2moe": Pattern(4, is_first_full=True),
    "dots3note": Pattern(1),
    "exaone-moe": Pattern(4),
    "exaone4": Pattern(4),
    "gemma2": Pattern(2, n_swa=4096),
    "gemma3": Pattern(6),
    "gemma3n": Pattern(5),
    "gemma4": Pattern(1),
    "gpt-oss": Pattern(2),
    "granite_swa": Pattern(1),
    "laguna": Pattern(4, is_first_full=True),
    "lfm2": Pattern(0),
    "llama4": Pattern(4, n_swa=8192),
    "maple": Pattern(1),
    "mellum": Pattern(4),
    "mimo2": Pattern(1),
    "muse-glimmer": Pattern(4),
    "olmo2": Pattern(4),
    "plamo3": Pattern(8),
    "smallthinker": Pattern(4, is_first_full=True),
    "spark2_5": Pattern(1),
    "step35": Pattern(1),
}
# Layers with cells of their own, where the file does not say how many share those of others.
OWN_LAYERS: Final = {"gemma3n": 20}
# llama.cpp turns flash attention off for these.
NO_FLASH_ATTENTION: Final = ("grok",)
# type name -> ggml's number of it (the binding lacks bf16), and (numbers in a block, bytes of a block)
GGML_TYPES: Final = {name.lower(): type_id for type_id, (name, _, _) in TENSOR_TYPES.items()}
_BLOCKS: Final = {name.lower(): (n, n_bytes) for name, n, n_bytes in TENSOR_TYPES.values()}


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer's cells: key/value heads, length of a head's key and value (0: no values are kept), and whether it slides."""

    n_heads: int
    key_length: int
    value_length: int
    slides: bool


@dataclass(frozen=True, slots=True)
class CellBytes:
    """K and V of one token: over the layers that keep all of a slot, and over those that keep a sliding window of `n_swa` tokens."""

    full: int
    window: int
    n_swa: int

    @property
    def total(self) -> int:
        """Over all layers."""
        return self.full + self.window


def is_quantised(cache_type: CacheType) -> bool:
    """Whether numbers are packed in blocks with a common scale."""
    return _BLOCKS[cache_type][0] > 1


def kv_layers(header: Header) -> tuple[KvLayer, ...]:
    """The layers that have cells of their own. Raises ModelDamaged."""
    n_layers = header.block_count - header.number("nextn_predict_layers")
    n_own = OWN_LAYERS.get(header.architecture, n_layers - header.number("attention.shared_kv_layers"))
    key, value = (header.head_length(which) for which in ("key", "value"))
    window_key, window_value = (header.number(f"attention.{which}_length_swa") for which in ("key", "value"))
    if _is_latent(header):
        value = window_value = 0
    layers = list(zip(header.kv_head_counts, sliding_layers(header), strict=True))[:n_own]
    return tuple(KvLayer(n_heads, (slides and window_key) or key, (slides and window_value) or value, slides) for n_heads, slides in layers)


def sliding_layers(header: Header) -> tuple[bool, ...]:
    """Of each layer whether llama.cpp gives it a sliding window."""
    n_layers = header.block_count
    if _window(header) == 0:
        return (False,) * n_layers
    pattern = SLIDING[header.architecture]
    stated = header.of_architecture("attention.sliding_window_pattern")
    if isinstance(stated, tuple) and len(stated) >= n_layers:
        return tuple(bool(slides) for slides in stated[:n_layers])
    period = stated if isinstance(stated, int) and not isinstance(stated, bool) else pattern.period
    full = 0 if pattern.is_first_full else period - 1
    return tuple(period == 0 or layer % period != full for layer in range(n_layers))


def cell_bytes(header: Header, config: EngineConfig) -> CellBytes:
    """By the types that `config` names; with `swa_full` every layer keeps all. Raises ModelDamaged."""
    full = window = 0
    for layer in kv_layers(header):
        n_bytes = layer.n_heads * (_row_bytes(config.cache_type_k, layer.key_length) + _row_bytes(config.cache_type_v, layer.value_length))
        if layer.slides and not config.swa_full:
            window += n_bytes
        else:
            full += n_bytes
    return CellBytes(full, window, _window(header) if window else 0)


def check_cache_types(header: Header, config: EngineConfig) -> None:
    """Whether llama.cpp takes these types for this model. Raises ConfigError, where it would fail or end the process."""
    type_k, type_v = config.cache_type_k, config.cache_type_v
    if is_quantised(type_v) and config.flash_attn == "off":
        raise ConfigError(
            f"--cache-type-v is {type_v} and --flash-attn is off: quantised values need flash attention",
            hint="--flash-attn auto, or --cache-type-v f16",
        )
    if is_quantised(type_v) and header.architecture in NO_FLASH_ATTENTION:
        raise ConfigError(
            f"--cache-type-v is {type_v}: quantised values need flash attention, which llama.cpp does not use for {header.architecture}",
            hint="--cache-type-v f16",
        )
    if type_k != type_v and _is_latent(header):
        raise ConfigError(
            f"--cache-type-k is {type_k} and --cache-type-v is {type_v}: this model keeps keys and values as one, so both must be the same",
            hint=f"--cache-type-k {type_k} --cache-type-v {type_k}",
        )
    for layer in kv_layers(header):
        _check_blocks("k", type_k, "keys", layer.key_length)
        _check_blocks("v", type_v, "values", layer.value_length)


def _check_blocks(letter: str, cache_type: CacheType, what: str, length: int) -> None:
    block, _ = _BLOCKS[cache_type]
    if length % block:
        raise ConfigError(
            f"--cache-type-{letter} is {cache_type}, which packs {block} numbers in a block; a head's {what} have {length} in this model, "
            f"and that is no multiple of {block}",
            hint=f"--cache-type-{letter} f16",
        )


def _row_bytes(cache_type: CacheType, length: int) -> int:
    block, n_bytes = _BLOCKS[cache_type]
    return -(-length // block) * n_bytes


def _window(header: Header) -> int:
    pattern = SLIDING.get(header.architecture)
    if pattern is None:
        return 0
    return pattern.n_swa if header.of_architecture("attention.sliding_window") is None else header.n_swa


def _is_latent(header: Header) -> bool:
    """Multi-head latent attention: values are computed from what is kept as keys."""
    return header.architecture == "deepseek4" or header.number("attention.key_length_mla") > 0
