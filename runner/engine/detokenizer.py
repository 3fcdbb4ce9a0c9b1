"""Bytes of token pieces to text, a complete code point at a time."""

import codecs


class Utf8Assembler:
    """Holds back the bytes of an unfinished code point. Bytes that can never become one turn into U+FFFD at once."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: bytes) -> str:
        """Return the text that became complete with `piece`."""
        return self._decoder.decode(piece)

    # There is no `finish`: what dangles when a generation is cut inside a character was never text, and is dropped.
