"""What keeps one client's cells from another: the trust domain and the session of a request, as the engine gets them.

Cells are shared inside a domain only. The one of a personal machine is empty, and so is its digest; else a domain is made of who asks
(`--isolate-clients`), the request's `cache_salt`, and a number that no other request has (`--stateless`). A session is a name of its
client's own, inside one domain: whoever uses it under another key or salt means another session. The engine sees digests, never names.
"""

import hashlib
import secrets
from typing import Final

import msgspec

from runner.api.identity import Client, checked_name
from runner.config import ServerConfig
from runner.errors import InvalidRequest

SESSION_HEADER: Final = "X-Session-Id"
MAX_SALT_CHARS: Final = 256

_DIGEST_BYTES: Final = 16
_LENGTH_BYTES: Final = 8
_DOMAIN, _SESSION = b"slotfile.domain", b"slotfile.session"  # blake2b's `person`: 16 bytes at most


class Trust(msgspec.Struct, frozen=True):
    """A request's part in the prefix cache; see `Submit`."""

    domain: str = ""
    session: str = ""
    is_stateless: bool = False


class Domains:
    """Says of each request of one server whom it shares with."""

    def __init__(self, config: ServerConfig) -> None:
        self._isolates, self._is_stateless = config.isolate_clients, config.is_stateless
        self._has_keys = bool(config.keys)

    def trust(self, client: Client, *, salt: str, session: str) -> Trust:
        """Where a request of this client belongs; called once for all its answers, which share whatever else holds."""
        number = secrets.token_hex(_DIGEST_BYTES) if self._is_stateless else ""
        domain = domain_of(client.name if self._isolates else "", salt, number)
        return Trust(domain, self.session(client, domain, session), self._is_stateless)

    def session(self, client: Client, domain: str, name: str) -> str:
        """The session that a client calls so. Names are a key's own; without keys and isolation all ask for one person."""
        return session_of(client.name if self._has_keys or self._isolates else "", domain, name)


def domain_of(client: str, salt: str, number: str) -> str:
    """A digest that no other three texts have; empty where they all are."""
    return _digest(_DOMAIN, client, salt, number) if client or salt or number else ""


def session_of(client: str, domain: str, name: str) -> str:
    """A digest that no other three texts have; empty without a name."""
    return _digest(_SESSION, client, domain, name) if name else ""


def checked_salt(salt: str) -> str:
    """Raises InvalidRequest for one that is too long."""
    if len(salt) > MAX_SALT_CHARS:
        raise InvalidRequest(f"'cache_salt' has {len(salt):,} characters; the limit is {MAX_SALT_CHARS}", param="cache_salt")
    return salt


def session_name(header: str | None, field: str) -> str:
    """What a request calls its session: the header counts where both are given. Raises InvalidRequest for a name that cannot be one."""
    if header:
        return checked_name(header, f"The header {SESSION_HEADER}", SESSION_HEADER)
    return checked_name(field, "'prompt_cache_key'", "prompt_cache_key")


def _digest(person: bytes, *parts: str) -> str:
    """Of the parts with their lengths before them: "a", "bc" is not "ab", "c"."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=person)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    return digest.hexdigest()
