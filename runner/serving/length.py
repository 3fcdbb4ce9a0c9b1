"""How many tokens a text has at least, from nothing but its length: what certainly does not fit is refused before any work."""

from runner.errors import ContextLengthExceeded


def text_bytes(text: str, unknown_bytes: bytes = b"") -> int:
    """The length in UTF-8, without the bytes of which the tokeniser makes nothing."""
    if not unknown_bytes and text.isascii():
        return len(text)
    data = text.encode("utf-8", "surrogatepass")
    return len(data.translate(None, unknown_bytes) if unknown_bytes else data)


def fewest_tokens(n_bytes: int, longest_piece_bytes: int) -> int:
    """Tokens that `n_bytes` take at least, when a token stands for `longest_piece_bytes` at most (0: that is not known)."""
    return -(-n_bytes // longest_piece_bytes) if longest_piece_bytes else 0


def certainly_too_long(n_tokens: int, n_ctx_slot: int, param: str) -> ContextLengthExceeded:
    """The refusal of a prompt whose tokens were not counted."""
    text = f"The prompt has at least {n_tokens:,} tokens; a slot holds {n_ctx_slot:,}, and one at least must be left for the answer"
    return ContextLengthExceeded(text, param=param)
