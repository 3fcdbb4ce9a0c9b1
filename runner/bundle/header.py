"""What a GGUF says of itself: metadata by name, the tensor table, and the numbers that follow from them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from runner.errors import ModelDamaged

DEFAULT_ALIGNMENT: Final = 32
MAX_LAYERS: Final = 512  # LLAMA_MAX_LAYERS: more of them end the process

# ggml type number -> (name, elements in a block, bytes of a block), from ggml_type_name, ggml_blck_size and ggml_type_size.
TENSOR_TYPES: Final = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}

# `general.file_type` -> name, from enum llama_ftype of llama.h.
FILE_TYPES: Final = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
    41: "Q2_0",
}

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class LongArray:
    """An array that is only measured, not kept: vocabularies and merges have hundreds of thousands of entries."""

    length: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """One row of the tensor table. `offset` counts from the start of the data section."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    n_elements: int
    n_bytes: int


@dataclass(frozen=True)
class Header:
    """What a GGUF says of itself. All offsets are in bytes from the start of the GGUF."""

    version: int
    metadata: dict[str, Value | LongArray]
    spans: dict[str, tuple[int, int]]
    tensors: tuple[Tensor, ...]
    alignment: int
    data_offset: int
    size: int

    @property
    def architecture(self) -> str:
        """`llama`, `gemma3`, ... Raises ModelDamaged where the file names none."""
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str) or not found:
            raise ModelDamaged("The GGUF names no architecture (general.architecture): it is not a language model")
        return found

    @property
    def name(self) -> str | None:
        """The model's own name for itself."""
        return self.text("general.name")

    @property
    def kind(self) -> str:
        """`model` unless the file says otherwise (`adapter`, `imatrix`, `mmproj`)."""
        return self.text("general.type") or "model"

    @property
    def block_count(self) -> int:
        """Layers."""
        n_layers = self.positive("block_count")
        if n_layers > MAX_LAYERS:
            raise ModelDamaged(f"The GGUF has {n_layers} layers; the limit is {MAX_LAYERS}")
        return n_layers

    @property
    def n_ctx_train(self) -> int:
        """Tokens of context the model was trained for."""
        return self.positive("context_length")

    @property
    def n_embd(self) -> int:
        """Width of the residual stream."""
        return self.positive("embedding_length")

    @property
    def n_vocab(self) -> int:
        """Entries of the vocabulary, 0 where the file brings none."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return tokens.length if isinstance(tokens, LongArray) else len(tokens) if isinstance(tokens, tuple) else 0

    @property
    def n_swa(self) -> int:
        """Tokens in a sliding attention window, 0 for full attention everywhere."""
        found = self.of_architecture("attention.sliding_window")
        return found if isinstance(found, int) else 0

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that the model brings."""
        return self.text("tokenizer.chat_template")

    @property
    def file_type(self) -> str:
        """What people call the quantisation: the file's own word for it, else the tensor type that holds most of the bytes."""
        stated = self.metadata.get("general.file_type")
        if type(stated) is int and stated in FILE_TYPES:
            return FILE_TYPES[stated]
        n_bytes: dict[int, int] = {}
        for tensor in self.tensors:
            n_bytes[tensor.type_id] = n_bytes.get(tensor.type_id, 0) + tensor.n_bytes
        return TENSOR_TYPES[max(n_bytes, key=lambda type_id: n_bytes[type_id])][0] if n_bytes else "none"

    @cached_property
    def n_params(self) -> int:
        """Weights in all tensors."""
        return sum(tensor.n_elements for tensor in self.tensors)

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def split_count(self) -> int:
        """Files that the model is split into; 1 for a whole one."""
        found = self.metadata.get("split.count")
        return found if isinstance(found, int) and found > 1 else 1

    @property
    def split_no(self) -> int:
        """Which of the splits this file is, from 0."""
        found = self.metadata.get("split.no")
        return found if isinstance(found, int) else 0

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Attention heads of each layer."""
        return self._per_layer("attention.head_count", (0,) * self.block_count)

    @property
    def kv_head_counts(self) -> tuple[int, ...]:
        """Key/value heads of each layer: fewer than heads under grouped-query attention."""
        return self._per_layer("attention.head_count_kv", self.head_counts)

    def head_length(self, which: str) -> int:
        """Numbers in a head's `key` or `value`. Raises ModelDamaged."""
        if self.of_architecture(f"attention.{which}_length") is not None:
            return self.positive(f"attention.{which}_length")
        n_heads = max(self.head_counts)
        return self.n_embd // n_heads if n_heads else 0

    def text(self, key: str) -> str | None:
        """A string of the metadata, or None."""
        found = self.metadata.get(key)
        return found if isinstance(found, str) else None

    def of_architecture(self, name: str) -> Value | LongArray | None:
        """The value of `{architecture}.{name}`."""
        return self.metadata.get(f"{self.architecture}.{name}")

    def positive(self, name: str) -> int:
        """`{architecture}.{name}` as a whole number from 1 to 2^31 - 1. Raises ModelDamaged."""
        found = self.of_architecture(name)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 1 << 31:
            raise ModelDamaged(f"The GGUF's {self.architecture}.{name} is {shown(found)}; it must be a whole number above 0")
        return found

    def number(self, name: str) -> int:
        """The same where the file states it, else 0. Raises ModelDamaged."""
        return self.positive(name) if self.of_architecture(name) not in (None, 0) else 0

    def check_usable(self) -> None:
        """Whether a language model can be loaded from this file alone. Raises ModelDamaged."""
        if self.kind != "model":
            raise ModelDamaged(f"The GGUF holds {self.kind!r}, not a language model")
        if self.split_count > 1:
            raise ModelDamaged(
                f"The GGUF is part {self.split_no + 1} of {self.split_count}, not a whole model",
                hint="slotfile pack --model FIRST-PART.gguf -o OUT joins the parts",
            )
        if self.alignment % DEFAULT_ALIGNMENT:
            raise ModelDamaged(
                f"The GGUF aligns its tensors to {self.alignment} bytes; mapping them takes a multiple of {DEFAULT_ALIGNMENT}",
                hint="slotfile pack --model FILE.gguf -o OUT aligns them",
            )
        if not self.tensors:
            raise ModelDamaged("The GGUF holds no tensors: it is a vocabulary, not a language model")
        for name in ("block_count", "context_length", "embedding_length"):
            self.positive(name)
        # These raise where the head counts make no sense.
        _ = self.kv_head_counts, self.head_length("key"), self.head_length("value")

    def _per_layer(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        found = self.of_architecture(name)
        if found is None:
            return default
        counts = found if isinstance(found, tuple) else (found,) * self.block_count
        if len(counts) < self.block_count or not all(type(count) is int and 0 <= count < 1 << 16 for count in counts):
            raise ModelDamaged(
                f"The GGUF's {self.architecture}.{name} is {shown(found)}; it must be a number, or {self.block_count} numbers"
            )
        return tuple(count for count in counts[: self.block_count] if isinstance(count, int))


def shown(value: object) -> str:
    """A value as an error message shows it: short."""
    if isinstance(value, LongArray):
        return f"an array of {value.length}"
    text = repr(value) if value is not None else "missing"
    return text if len(text) <= 40 else text[:40] + "…"
