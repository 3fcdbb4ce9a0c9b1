"""Tokens to bytes, text to tokens."""

import ctypes
import functools
import re
from collections.abc import Sequence

from runner.llama.library import Library

# enum llama_token_attr (llama.h): what a tokeniser with parse_special=false leaves as plain text.
_ATTR_UNKNOWN = 1 << 0
_ATTR_CONTROL = 1 << 3
_NO_TOKEN = -1
_FIRST_PIECE_BYTES = 64


class Vocabulary:
    """One model's vocabulary. Thread-safe: llama.cpp's tokeniser is, and the caches only ever gain equal values."""

    def __init__(self, library: Library, model: int) -> None:
        api = library.api
        self._api = api
        self._vocab = api.llama_model_get_vocab(model)
        self.n_tokens: int = api.llama_vocab_n_tokens(self._vocab)
        vocab_p, token, char_p = ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p
        self._to_piece = library.hold(
            "llama_token_to_piece", ctypes.c_int32, vocab_p, token, char_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_bool
        )
        self._is_eog = library.hold("llama_vocab_is_eog", ctypes.c_bool, vocab_p, token)
        self._attr = library.hold("llama_vocab_get_attr", ctypes.c_int, vocab_p, token)
        self._text = library.hold("llama_vocab_get_text", ctypes.c_char_p, vocab_p, token)
        self._buffer = ctypes.create_string_buffer(_FIRST_PIECE_BYTES)
        self._pieces: dict[int, bytes] = {}
        self.bos = self._optional(api.llama_vocab_bos(self._vocab))
        self.eos = self._optional(api.llama_vocab_eos(self._vocab))
        self.adds_bos = bool(api.llama_vocab_get_add_bos(self._vocab))

    def piece(self, token: int) -> bytes:
        """The bytes `token` stands for in an answer; empty for control tokens. Only the decode thread calls this."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._render(token, special=False)
        return piece

    def special_text(self, token: int | None) -> str:
        """A special token as templates write it ("<bos>"); empty for None."""
        return "" if token is None else self._render_fresh(token, special=True).decode("utf-8", errors="replace")

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of a token list, special tokens included (any thread)."""
        return b"".join(self._render_fresh(token, special=True) for token in tokens).decode("utf-8", errors="replace")

    @functools.cached_property
    def eog_tokens(self) -> frozenset[int]:
        """All tokens that end a generation."""
        return frozenset(token for token in range(self.n_tokens) if self._is_eog(self._vocab, token))

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends a generation."""
        return bool(self._is_eog(self._vocab, token))

    @functools.cached_property
    def control_pattern(self) -> re.Pattern[str] | None:
        """Matches the text of any token that means control when it stands in a prompt ("<|im_start|>")."""
        hidden = _ATTR_CONTROL | _ATTR_UNKNOWN
        texts = (self._text(self._vocab, t) for t in range(self.n_tokens) if self._attr(self._vocab, t) & hidden)
        known = sorted({text.decode("utf-8", errors="replace") for text in texts if text}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, known))) if known else None

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Text to tokens, without BOS or EOS added. `text` may hold NULs but no lone surrogates (UnicodeEncodeError)."""
        data = text.encode("utf-8")
        if not data:
            return []
        room = len(data) + 8
        tokens = (ctypes.c_int32 * room)()
        n = self._api.llama_tokenize(self._vocab, data, len(data), tokens, room, False, parse_special)
        if n < 0:
            tokens = (ctypes.c_int32 * -n)()
            n = self._api.llama_tokenize(self._vocab, data, len(data), tokens, -n, False, parse_special)
        assert n >= 0, "llama_tokenize asked for more room twice"
        return list(tokens[:n])

    def with_bos(self, tokens: list[int]) -> list[int]:
        """Exactly one BOS in front where the model wants one, whether or not the text brought it."""
        if not self.adds_bos or self.bos is None or tokens[:1] == [self.bos]:
            return tokens
        return [self.bos, *tokens]

    def _render(self, token: int, *, special: bool) -> bytes:
        n = self._to_piece(self._vocab, token, self._buffer, len(self._buffer), 0, special)
        if n < 0:
            self._buffer = ctypes.create_string_buffer(-n)
            n = self._to_piece(self._vocab, token, self._buffer, -n, 0, special)
        return self._buffer.raw[:n]

    def _render_fresh(self, token: int, *, special: bool) -> bytes:
        """Like `_render` with a buffer of its own: for threads other than the decode thread."""
        buffer = ctypes.create_string_buffer(_FIRST_PIECE_BYTES)
        n = self._to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = self._to_piece(self._vocab, token, buffer, -n, 0, special)
        return buffer.raw[:n]

    @staticmethod
    def _optional(token: int) -> int | None:
        return None if token == _NO_TOKEN else int(token)
