"""How many tokens a text has at least, from its length and its words: what certainly does not fit is refused before any work."""

from runner.errors import ContextLengthExceeded


def text_bytes(text: str, unknown_bytes: bytes = b"") -> int:
    """The length in UTF-8, without the bytes of which the tokeniser makes nothing."""
    if not unknown_bytes and text.isascii():
        return len(text)
    data = text.encode("utf-8", "surrogatepass")
    return len(data.translate(None, unknown_bytes) if unknown_bytes else data)


def n_word_starts(text: str) -> int:
    """Places where something follows a space."""
    return sum(map(bool, text.split(" ")[1:]))


def fewest_tokens(n_bytes: int, longest_piece_bytes: int, n_starts: int = 0, starts_per_token: int = 0) -> int:
    """Tokens that a text takes at least.

    A token stands for `longest_piece_bytes` at most, and for `starts_per_token` of the text's `n_starts` word starts (0: that is
    not known). A word start whose space ends one token and whose word begins the next counts for the first of them.
    """
    by_length = -(-n_bytes // longest_piece_bytes) if longest_piece_bytes else 0
    by_words = -(-n_starts // starts_per_token) if starts_per_token else 0
    return max(by_length, by_words)


def certainly_too_long(n_tokens: int, n_ctx_slot: int, param: str) -> ContextLengthExceeded:
    """The refusal of a prompt whose tokens were not counted."""
    text = f"The prompt has at least {n_tokens:,} tokens; a slot holds {n_ctx_slot:,}, and one at least must be left for the answer"
    return ContextLengthExceeded(text, param=param)
