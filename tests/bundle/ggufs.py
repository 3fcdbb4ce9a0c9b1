"""Builds small GGUF files and a fake runtime, byte by byte and without the code under test."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

from runner.bundle.locate import COOKIE, COOKIE_MAGIC, Bundle, find_bundle

U32, F32, STRING, ARRAY, U64 = 4, 6, 8, 9, 10

BASE_METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": [2, 1],
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["<s>", "a", "ü"],
    "tokenizer.chat_template": "{{ messages }}",
}


@dataclass
class Gguf:
    """`tensors` maps names to (shape, data of F32)."""

    metadata: dict[str, object] = field(default_factory=lambda: dict(BASE_METADATA))
    tensors: dict[str, tuple[tuple[int, ...], bytes]] = field(default_factory=dict)
    alignment: int = 32
    version: int = 3

    def add(self, name: str, *shape: int) -> "Gguf":
        """A tensor whose bytes tell which one it is."""
        n_elements = 1
        for n in shape:
            n_elements *= n
        self.tensors[name] = (shape, (name.encode() * n_elements * 4)[: n_elements * 4])
        return self

    def encode(self) -> bytes:
        metadata = dict(self.metadata)
        if self.alignment != 32:
            metadata["general.alignment"] = self.alignment
        out = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(metadata))
        out += b"".join(string(key) + value(entry) for key, entry in metadata.items())
        data = b""
        for name, (shape, content) in self.tensors.items():
            out += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", 0, len(data))
            data += content + bytes(-len(content) % self.alignment)
        return out + bytes(-len(out) % self.alignment) + data


def string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(entry: object) -> bytes:
    if isinstance(entry, str):
        return struct.pack("<I", STRING) + string(entry)
    if isinstance(entry, float):
        return struct.pack("<If", F32, entry)
    if isinstance(entry, int):
        return struct.pack("<II", U32, entry)
    assert isinstance(entry, list)
    if isinstance(entry[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(entry)) + b"".join(string(text) for text in entry)
    return struct.pack(f"<IIQ{len(entry)}I", ARRAY, U32, len(entry), *entry)


def small_gguf(alignment: int = 32) -> Gguf:
    """Two tensors, one of them with padding behind it."""
    return Gguf(alignment=alignment).add("token_embd.weight", 64, 3).add("output_norm.weight", 5)


def fake_pkg(n_bytes: int = 1000) -> bytes:
    """Bytes that end in a PyInstaller cookie."""
    body = bytes(range(256)) * (n_bytes // 256 + 1)
    return body[:n_bytes] + COOKIE.pack(COOKIE_MAGIC, n_bytes + COOKIE.size, 10, 20, 311, b"libpython3.11.so.1.0")


def fake_runtime(path: Path, bootloader: bytes = b"\x7fELF" + b"boot" * 500) -> Bundle:
    """A runtime without a model."""
    path.write_bytes(bootloader + fake_pkg())
    bundle = find_bundle(path)
    assert bundle is not None
    return bundle
