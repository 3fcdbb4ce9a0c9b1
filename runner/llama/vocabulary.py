"""Tokens to bytes, text to tokens."""

import ctypes
import itertools
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from runner.llama.library import Library
from runner.llama.names import names_pattern

# enum llama_token_attr (llama.h).
_ATTR_UNKNOWN = 1 << 0
_ATTR_CONTROL = 1 << 3
_ATTR_USER_DEFINED = 1 << 4
_ATTR_LSTRIP = 1 << 7
_ATTR_RSTRIP = 1 << 8
# What a tokeniser with parse_special=false leaves as plain text.
_HIDDEN = _ATTR_CONTROL | _ATTR_UNKNOWN
# enum llama_vocab_type (llama.h).
_SPM, _BPE = 1, 2
_NO_TOKEN = -1
_LONGEST_BPE_BYTE = 2
_FIRST_PIECE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Special:
    """A control token. `strips_left`, `strips_right`: the tokeniser drops the white space beside it."""

    token: int
    strips_left: bool
    strips_right: bool


@dataclass(frozen=True, slots=True)
class VocabularyFacts:
    """What takes a look at every token.

    `longest_piece_bytes`: how many bytes of a text one token may stand for, so that a text of more than n times as many bytes
    has more than n tokens; `word_starts_per_token`: the same for places where something follows a space (a token that ends with a
    space counts for what follows it); `unknown_bytes`, of which the tokeniser makes nothing, do not count. 0 where nothing is certain.
    """

    eog_tokens: frozenset[int]
    specials: dict[str, Special]
    longest_piece_bytes: int
    word_starts_per_token: int
    unknown_bytes: bytes


# Between texts: no text in UTF-8 holds this byte.
_NO_UTF8 = b"\xff"
_BPE_SPACE, _SPM_SPACE = "\u0120".encode(), "\u2581".encode()


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
        self._kind: int = api.llama_vocab_type(self._vocab)
        self._pieces: dict[int, bytes] = {}
        self.bos = self._optional(api.llama_vocab_bos(self._vocab))
        self.eos = self._optional(api.llama_vocab_eos(self._vocab))
        self.adds_bos = bool(api.llama_vocab_get_add_bos(self._vocab))
        self._facts: VocabularyFacts | None = None
        self._control_pattern: re.Pattern[str] | None = None
        self._has_facts, self._has_pattern = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._has_begun = False

    def begin_scan(self) -> None:
        """Look at every token in a thread of its own, while the rest of the load is in native code (110 ms for 262,144 tokens)."""
        with self._lock:
            if not self._has_begun:
                self._has_begun = True
                threading.Thread(target=self._look_at_all, name="vocabulary", daemon=True).start()

    @property
    def facts(self) -> VocabularyFacts:
        """Waits for the scan. The load does so before the engine is ready: the decode thread never waits."""
        self.begin_scan()
        self._has_facts.wait()
        assert self._facts is not None, "the vocabulary could not be read: see the traceback of its thread"
        return self._facts

    @property
    def control_pattern(self) -> re.Pattern[str] | None:
        """Matches the text of any token that means control when it stands in a prompt ("<|im_start|>"). Waits for the scan."""
        self.begin_scan()
        self._has_pattern.wait()
        assert self._facts is not None, "the vocabulary could not be read: see the traceback of its thread"
        return self._control_pattern

    @property
    def eog_tokens(self) -> frozenset[int]:
        """All tokens that end a generation."""
        return self.facts.eog_tokens

    @property
    def specials(self) -> dict[str, Special]:
        """The control tokens by their text."""
        return self.facts.specials

    def piece(self, token: int) -> bytes:
        """The bytes `token` stands for in an answer; empty for control tokens. Only the decode thread calls this."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._render(token, special=False)
        return piece

    def special_text(self, token: int | None) -> str:
        """A special token as templates write it ("<bos>"); empty for None."""
        return "" if token is None else self.text_of([token])

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of a token list, special tokens included (any thread)."""
        return b"".join(self._render(token, special=True) for token in tokens).decode("utf-8", errors="replace")

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends a generation."""
        facts = self._facts  # a set, once it is there: no native call a token
        return token in facts.eog_tokens if facts is not None else bool(self._is_eog(self._vocab, token))

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Text to tokens, without BOS or EOS added. `text` may hold NULs but no lone surrogates (UnicodeEncodeError).

        The GIL is free meanwhile.
        """
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
        return tokens[:n]

    def with_bos(self, tokens: list[int]) -> list[int]:
        """Exactly one BOS in front where the model wants one, whether or not the text brought it."""
        if not self.adds_bos or self.bos is None or tokens[:1] == [self.bos]:
            return tokens
        return [self.bos, *tokens]

    # -- the scan ------------------------------------------------------------------------------------------------------

    def _look_at_all(self) -> None:
        try:
            self._facts = self._find_facts()
            self._has_facts.set()
            self._control_pattern = names_pattern(self._facts.specials)
        finally:
            self._has_facts.set()
            self._has_pattern.set()

    def _find_facts(self) -> VocabularyFacts:
        """One call a token and question, and no Python between them: 0.2 us each."""
        every = range(self.n_tokens)
        attrs = list(map(self._attr, itertools.repeat(self._vocab), every))
        texts: list[bytes] = list(map(self._text, itertools.repeat(self._vocab), every))
        marked = [token for token, attr in enumerate(attrs) if attr & (_HIDDEN | _ATTR_USER_DEFINED)]
        specials = {
            texts[token].decode("utf-8", errors="replace"): Special(
                token, bool(attrs[token] & _ATTR_LSTRIP), bool(attrs[token] & _ATTR_RSTRIP)
            )
            for token in marked
            if attrs[token] & _HIDDEN and texts[token]
        }
        longest, unknown = self._longest_piece(attrs, texts), self._unknown_bytes(texts)
        starts = word_starts(texts) if longest and b" " not in unknown else 0
        return VocabularyFacts(self._find_eog(marked), specials, longest, starts, unknown)

    def _find_eog(self, marked: list[int]) -> frozenset[int]:
        """llama.cpp takes as EOG what the file names so, and makes control tokens of what it knows by its text."""
        api = self._api
        named = (api.llama_vocab_eos, api.llama_vocab_eot, api.llama_vocab_fim_pad, api.llama_vocab_fim_rep, api.llama_vocab_fim_sep)
        return frozenset(filter(self.is_eog, {*marked, *(get(self._vocab) for get in named)} - {_NO_TOKEN}))

    def _longest_piece(self, attrs: list[int], texts: list[bytes]) -> int:
        drops_space = any(attr & (_ATTR_LSTRIP | _ATTR_RSTRIP) for attr in set(attrs))
        if drops_space or self._kind not in (_SPM, _BPE):
            return 0
        longest = 0
        # A text is never shorter than its piece: it writes a space, or any byte, in up to three.
        for token in sorted(range(self.n_tokens), key=list(map(len, texts)).__getitem__, reverse=True):
            if len(texts[token]) <= longest:
                break
            longest = max(longest, len(self._render(token, special=True)))
        return longest

    def _unknown_bytes(self, texts: list[bytes]) -> bytes:
        """A BPE tokeniser drops a byte for which its vocabulary has no token (SmolLM2 lacks eight)."""
        if self._kind != _BPE:
            return b""
        short = {text for text in texts if len(text) <= _LONGEST_BPE_BYTE}
        return bytes(byte for byte, text in enumerate(_bpe_bytes()) if text not in short)

    def _render(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(_FIRST_PIECE_BYTES)
        n = self._to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = self._to_piece(self._vocab, token, buffer, -n, 0, special)
        return buffer.raw[:n]

    @staticmethod
    def _optional(token: int) -> int | None:
        return None if token == _NO_TOKEN else int(token)


def _bpe_bytes() -> list[bytes]:
    """How a BPE vocabulary writes each byte (GPT-2's `bytes_to_unicode`): as one printable character."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    code = {byte: byte for byte in printable} | {byte: 0x100 + index for index, byte in enumerate(others)}
    return [chr(code[byte]).encode() for byte in range(0x100)]


def word_starts(texts: list[bytes]) -> int:
    """The most word starts that one token can account for: those inside it, and the one after a space at its end.

    In a vocabulary's own texts a space is written "\u0120" (BPE), "\u2581" (SPM), or as it is (added tokens).
    """
    return max(map(_word_starts_of, _with_inner_space(texts)), default=1)


def _word_starts_of(text: bytes) -> int:
    words = text.replace(_BPE_SPACE, b" ").replace(_SPM_SPACE, b" ").split(b" ")
    return max(1, sum(map(bool, words[1:])) + (words[-1] == b""))


def _with_inner_space(texts: list[bytes]) -> list[bytes]:
    """The texts with a space elsewhere than at their start: a few, found by searching all of them at once (50,000 in 3 ms)."""
    joined = _NO_UTF8 + _NO_UTF8.join(texts)
    if joined.count(_NO_UTF8) != len(texts):
        return texts  # no UTF-8: as good as any, only slower
    rest = joined.replace(_NO_UTF8 + _BPE_SPACE, _NO_UTF8).replace(_NO_UTF8 + _SPM_SPACE, _NO_UTF8)
    found = []
    for space in (_BPE_SPACE, _SPM_SPACE, b" "):
        index, counted, at = -1, 0, rest.find(space)
        while at >= 0:
            index += rest.count(_NO_UTF8, counted, at)
            counted = at
            found.append(texts[index])
            end = rest.find(_NO_UTF8, at)
            at = rest.find(space, end) if end >= 0 else -1
    return found
