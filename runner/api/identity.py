"""Who asks: the client of a request, whose share is charged and whose bounds count.

A client is an API key's name where keys are set, else the address that the request came from. A proxy's X-Forwarded-For is
believed only where the proxy is one of `--trusted-proxy`; what a client wrote into it stands further left and is not reached.
"""

import ipaddress
from collections.abc import Iterable
from typing import Final

import msgspec
from aiohttp import web

from runner.api.errors import shown
from runner.config import ApiKey, ServerConfig
from runner.engine.order import Owner, Tier
from runner.errors import ConfigError, InvalidRequest

PART_HEADER: Final = "X-Client-Id"
FORWARDED_HEADER: Final = "X-Forwarded-For"
MAX_NAME_CHARS: Final = 128

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Client(msgspec.Struct, frozen=True):
    """Who asks. `best_tier` is the best one it is given; the lower number is the better tier."""

    name: str
    weight: float = 1.0
    best_tier: Tier = Tier.HIGH
    is_admin: bool = False

    def owner(self, header: str | None, user: str) -> Owner:
        """Whose share a request is charged to: the header or the field `user` names a part of it. Raises InvalidRequest."""
        part = checked_name(header, f"The header {PART_HEADER}", PART_HEADER) if header else checked_name(user, "'user'", "user")
        return Owner(self.name, part, self.weight)

    def tier(self, asked: Tier) -> Tier:
        """The one asked for, or the best this client is given."""
        return max(asked, self.best_tier)


CLIENT: Final = web.RequestKey("client", Client)


class Identities:
    """Tells the clients of one server apart."""

    def __init__(self, trusted_proxies: Iterable[str]) -> None:
        """Raises ConfigError for what is neither an address nor a network."""
        self._proxies = [_network(text) for text in trusted_proxies]

    @classmethod
    def of(cls, config: ServerConfig) -> "Identities":
        """Those of a server. Raises ConfigError."""
        return cls(config.trusted_proxies)

    def client(self, key: ApiKey | None, request: web.Request) -> Client:
        """Who sent a request, with that key if any. Without keys, everybody may ask for every tier."""
        if key is not None:
            return Client(key.name, key.weight, Tier[key.best_tier.upper()], key.is_admin)
        return Client(self.address_of(request))

    def address_of(self, request: web.BaseRequest) -> str:
        """Where a request comes from."""
        return self.address(request.remote or "", request.headers.getall(FORWARDED_HEADER, []))

    def address(self, peer: str, forwarded: list[str]) -> str:
        """The peer's own address, or the one that trusted proxies name: the right-most which is not one of them."""
        here = _address(peer)
        if here is None:
            return peer or "unknown"
        return str(self._first_untrusted(here, forwarded) if self._is_trusted(here) else here)

    def _first_untrusted(self, proxy: Address, forwarded: list[str]) -> Address:
        """Go from the last proxy towards the client. A list that is broken on the way says nothing: the proxy itself is the client."""
        found = proxy
        for text in reversed(",".join(forwarded).split(",")):
            address = _address(text)
            if address is None:
                return proxy
            found = address
            if not self._is_trusted(address):
                break
        return found

    def _is_trusted(self, address: Address) -> bool:
        return any(address in network for network in self._proxies if network.version == address.version)


def checked_name(text: str, what: str, param: str) -> str:
    """A name that a client gives something of its own. Raises InvalidRequest; `what` and `param` say where it stood."""
    if len(text) > MAX_NAME_CHARS:
        raise InvalidRequest(f"{what} has {len(text):,} characters; the limit is {MAX_NAME_CHARS}", param=param)
    if not text.isprintable():
        raise InvalidRequest(f"{what} is {shown(ascii(text))}; it takes printable characters", param=param)
    return text


def _address(text: str) -> Address | None:
    """An address as peers and proxies write it: with a port, in brackets, with a zone. IPv4 inside IPv6 counts as IPv4."""
    text = text.strip()
    if text.startswith("[") and "]" in text:
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        raise ConfigError(f"--trusted-proxy {text!r} is no address; it takes one such as 10.0.0.1 or 10.0.0.0/8") from None
