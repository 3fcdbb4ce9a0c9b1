"""Small GGUF models with random weights and each kind of memory, for what no published model of this size shows.

Their answers are noise, the same noise in each run: what is tested is which state a slot continues from, not what the text says.
Weights of 32 bits keep rounding a thousand times below the effect of one missing cell, which quantised models hide.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, ReaderField
from numpy.typing import NDArray

N_EMBD = 64
N_FF = 128
N_HEAD = 4
N_HEAD_KV = 2
N_CTX_TRAIN = 8192
# The expansion factor of 2 is the only one that llama.cpp's Mamba has.
D_INNER = 2 * N_EMBD
D_CONV = 4
D_STATE = 16
DT_RANK = 8
SEED = 20_405


def write_recurrent_gguf(path: Path, tokenizer_from: Path, n_layers: int = 3) -> None:
    """A Mamba (llama.cpp: src/models/mamba.cpp): one state a sequence and no attention."""
    model = _Model("mamba", n_layers, tokenizer_from)
    for layer in range(n_layers):
        model.add_mamba(layer)
    model.write(path)


def write_hybrid_gguf(path: Path, tokenizer_from: Path, attention: tuple[bool, ...] = (False, True, False, True)) -> None:
    """A Jamba without experts (src/models/jamba.cpp): layers with a state, and layers with K and V where `attention` says so."""
    model = _Model("jamba", len(attention), tokenizer_from)
    model.head_counts_kv = [N_HEAD_KV if attends else 0 for attends in attention]
    for layer, attends in enumerate(attention):
        if attends:
            model.add_attention(layer)
        else:
            model.add_mamba(layer)
            for name, width in (("ssm_dt_norm", DT_RANK), ("ssm_b_norm", D_STATE), ("ssm_c_norm", D_STATE)):
                model.add_ones(f"blk.{layer}.{name}.weight", width)
        model.add_feed_forward(layer)
    model.write(path)


def write_window_gguf(path: Path, tokenizer_from: Path, window: int = 32, n_layers: int = 4) -> None:
    """A Gemma 3 (src/models/gemma3.cpp): layers that attend to `window` tokens, the last of them to all."""
    model = _Model("gemma3", n_layers, tokenizer_from, window=window)
    model.head_counts_kv = [N_HEAD_KV] * n_layers
    for layer in range(n_layers):
        model.add_attention(layer)
        for name in ("attn_q_norm", "attn_k_norm"):
            model.add_ones(f"blk.{layer}.{name}.weight", N_EMBD // N_HEAD)
        model.add_feed_forward(layer)
        for name in ("post_attention_norm", "post_ffw_norm"):
            model.add_ones(f"blk.{layer}.{name}.weight", N_EMBD)
    model.write(path)


@dataclass
class _Model:
    """Tensors by GGUF name. Shapes are numpy's: rows first, so the reverse of llama.cpp's `ne`."""

    architecture: str
    n_layers: int
    tokenizer_from: Path
    window: int = 0
    head_counts_kv: list[int] = field(default_factory=list)
    tensors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(SEED))

    def add(self, name: str, n_rows: int, n_columns: int) -> None:
        """A matrix whose product with a vector of unit variance has unit variance: the state neither dies nor explodes."""
        self.tensors[name] = self.random.standard_normal((n_rows, n_columns), dtype=np.float32) / np.float32(np.sqrt(n_columns))

    def add_ones(self, name: str, width: int) -> None:
        self.tensors[name] = np.ones(width, dtype=np.float32)

    def add_mamba(self, layer: int) -> None:
        block = f"blk.{layer}"
        self.add_ones(f"{block}.attn_norm.weight", N_EMBD)
        self.add(f"{block}.ssm_in.weight", 2 * D_INNER, N_EMBD)
        self.add(f"{block}.ssm_conv1d.weight", D_INNER, D_CONV)
        self.tensors[f"{block}.ssm_conv1d.bias"] = np.zeros(D_INNER, dtype=np.float32)
        self.add(f"{block}.ssm_x.weight", DT_RANK + 2 * D_STATE, D_INNER)
        self.add(f"{block}.ssm_dt.weight", D_INNER, DT_RANK)
        # Softplus of this is about 0.0025: the state remembers some hundred tokens.
        self.tensors[f"{block}.ssm_dt.bias"] = np.full(D_INNER, -6.0, dtype=np.float32)
        self.tensors[f"{block}.ssm_a"] = -np.tile(np.arange(1, D_STATE + 1, dtype=np.float32), (D_INNER, 1))
        self.add_ones(f"{block}.ssm_d", D_INNER)
        self.add(f"{block}.ssm_out.weight", N_EMBD, D_INNER)

    def add_attention(self, layer: int) -> None:
        block, n_kv = f"blk.{layer}", N_EMBD // N_HEAD * N_HEAD_KV
        self.add_ones(f"{block}.attn_norm.weight", N_EMBD)
        for name, n_rows in (("attn_q", N_EMBD), ("attn_k", n_kv), ("attn_v", n_kv), ("attn_output", N_EMBD)):
            self.add(f"{block}.{name}.weight", n_rows, N_EMBD)

    def add_feed_forward(self, layer: int) -> None:
        block = f"blk.{layer}"
        self.add_ones(f"{block}.ffn_norm.weight", N_EMBD)
        self.add(f"{block}.ffn_gate.weight", N_FF, N_EMBD)
        self.add(f"{block}.ffn_up.weight", N_FF, N_EMBD)
        self.add(f"{block}.ffn_down.weight", N_EMBD, N_FF)

    def write(self, path: Path) -> None:
        writer = GGUFWriter(path, self.architecture)
        writer.add_name(f"random {self.architecture}")
        writer.add_block_count(self.n_layers)
        writer.add_context_length(N_CTX_TRAIN)
        writer.add_embedding_length(N_EMBD)
        writer.add_feed_forward_length(N_FF)
        # As converted Mambas have it: no heads at all.
        writer.add_head_count(N_HEAD if self.head_counts_kv else 0)
        writer.add_head_count_kv(self.head_counts_kv or 0)
        writer.add_layer_norm_rms_eps(1e-5)
        if self.window:
            writer.add_sliding_window(self.window)
            writer.add_sliding_window_pattern([layer < self.n_layers - 1 for layer in range(self.n_layers)])
        writer.add_ssm_conv_kernel(D_CONV)
        writer.add_ssm_inner_size(D_INNER)
        writer.add_ssm_state_size(D_STATE)
        writer.add_ssm_time_step_rank(DT_RANK)
        n_vocab = _copy_tokenizer(GGUFReader(self.tokenizer_from), writer)
        self.add("token_embd.weight", n_vocab, N_EMBD)
        self.add_ones("output_norm.weight", N_EMBD)
        for name, values in self.tensors.items():
            writer.add_tensor(name, values, raw_dtype=GGMLQuantizationType.F32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _copy_tokenizer(reader: GGUFReader, writer: GGUFWriter) -> int:
    """All of `tokenizer.*`, the chat template among it; returns the number of tokens."""
    for name, entry in reader.fields.items():
        if name.startswith("tokenizer."):
            is_array = entry.types[0] == GGUFValueType.ARRAY
            writer.add_key_value(name, entry.contents(), entry.types[0], entry.types[1] if is_array else None)
    return len(_tokens(reader).data)


def _tokens(reader: GGUFReader) -> ReaderField:
    found = reader.get_field("tokenizer.ggml.tokens")
    assert found is not None
    return found
