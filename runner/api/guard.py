"""Who is answered at all: Host, Origin, API key and content type, decided before any handler runs.

A page in a browser on this machine can reach a loopback port, so "only local clients connect" protects nothing by itself.
The Host check stops names that were made to point here (DNS rebinding), the Origin check stops foreign pages from
starting work, and the content type check stops forms, which can send only types that need no preflight.
"""

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from runner.api.access import REQUEST_ID_HEADER
from runner.api.errors import RETRY_HEADER, shown
from runner.config import ApiKey, ServerConfig
from runner.errors import BodyTooLarge, ConfigError, Forbidden, Unauthorized, UnsupportedMediaType

PREFLIGHT_MAX_AGE_S: Final = 600
# What a page of an allowed origin may read beyond what every page may (Content-Type and a few more, CORS-safelisted).
EXPOSED_HEADERS: Final = (
    REQUEST_ID_HEADER,
    hdrs.RETRY_AFTER,
    RETRY_HEADER,
    *(f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
    hdrs.ALLOW,
    hdrs.SERVER,
    hdrs.WWW_AUTHENTICATE,
)
_HOST: Final = re.compile(r"(\[[0-9A-Za-z:.%]+\]|[^:\[\]@/\s]+)(?::([0-9]{1,5}))?")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*]+")
_HEADER_NAMES: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{0,1000}")
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Authority:
    """A host and an optional port, as in a Host header: lower case, without brackets, zone and final dot."""

    name: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> "Authority | None":
        """None where `text` is no authority."""
        match = _HOST.fullmatch(text.strip())
        if match is None or (match[2] and int(match[2]) > 65535):
            return None
        name = match[1].strip("[]").partition("%")[0].lower()
        return cls(name.removesuffix("."), int(match[2]) if match[2] else None)

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The name as an address, None where it is a real name. IPv4 inside IPv6 counts as IPv4."""
        try:
            address = ipaddress.ip_address(self.name)
        except ValueError:
            return None
        return getattr(address, "ipv4_mapped", None) or address


class Guard:
    """The checks of one server. `is_loopback`: only this machine can connect to it."""

    def __init__(self, config: ServerConfig, *, is_loopback: bool) -> None:
        """Raises ConfigError for an origin or host name that could never match."""
        self._keys = [(hashlib.sha256(key.secret.encode()).digest(), key) for key in config.keys]
        self._max_body_bytes = config.max_body_bytes
        self._is_loopback = is_loopback
        self._allowed_hosts = [_configured_host(text) for text in config.allowed_hosts]
        self._allowed_origins = frozenset(_configured_origin(text) for text in config.cors_origins)
        self._own_names = {"localhost"} if is_loopback else {"localhost", *_machine_names()}

    def check_host(self, request: web.Request) -> None:
        """Refuse a request that was sent to a name which is not ours. Raises Forbidden."""
        hosts = request.headers.getall(hdrs.HOST, [])
        if len(hosts) != 1:
            raise Forbidden("A request needs exactly one Host header")
        sent_to = [hosts[0]]
        if "://" in request.raw_path.partition("?")[0]:  # absolute form: its host counts too (RFC 9112, 3.2.2)
            sent_to.append(urlsplit(request.raw_path).netloc)
        for text in sent_to:
            if not self._is_ours(text, request):
                raise Forbidden(f"This server does not answer to the host {shown(text)!r}; --allowed-host adds a name")

    def check_origin(self, request: web.Request) -> None:
        """Refuse work and preflights asked for by a web page of another origin. Raises Forbidden."""
        origin = request.headers.get(hdrs.ORIGIN)
        is_preflight = request.method == "OPTIONS" and origin is not None
        if request.method in _SAFE_METHODS and not is_preflight:
            return
        if origin is not None and not self.allows_origin(request):
            raise Forbidden(f"Web pages of {shown(origin)!r} may not use this server; --cors-origin allows an origin")
        if origin is None and request.headers.get("Sec-Fetch-Site", "none").lower() in ("cross-site", "same-site"):
            raise Forbidden("Web pages of other origins may not use this server; --cors-origin allows an origin")

    def check_key(self, request: web.Request) -> ApiKey | None:
        """Ask for one of the keys where there are any; every key is compared, in constant time. Raises Unauthorized."""
        if not self._keys:
            return None
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [key for known, key in self._keys if hmac.compare_digest(digest, known)]
        if scheme.lower() != "bearer" or not matches:
            raise Unauthorized("Send an API key of this server in the header 'Authorization: Bearer KEY'")
        return matches[0]

    def check_body(self, request: web.Request) -> None:
        """Take only bodies that say they are JSON and are not over the limit. Raises UnsupportedMediaType, BodyTooLarge."""
        if request.method in _SAFE_METHODS or request.method == "DELETE":  # which has none, and which no form can send
            return
        kind = request.headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise UnsupportedMediaType(f"The content type is {shown(kind) or 'missing'}; send the header 'Content-Type: application/json'")
        if request.content_length is not None and request.content_length > self._max_body_bytes:
            raise BodyTooLarge(f"The request body has {request.content_length} bytes; the limit is {self._max_body_bytes}")

    def allows_origin(self, request: web.Request) -> bool:
        """Whether the request's Origin is our own or one of the list."""
        origin = request.headers.get(hdrs.ORIGIN, "")
        return origin in self._allowed_origins or origin.partition("://")[2].lower() == request.headers.get(hdrs.HOST, "").lower() != ""

    def response_headers(self, request: web.Request) -> Mapping[str, str]:
        """The CORS headers of any response, errors included, or browsers hide what went wrong."""
        origin = request.headers.get(hdrs.ORIGIN)
        vary: dict[str, str] = {hdrs.VARY: hdrs.ORIGIN} if origin is not None or self._allowed_origins else {}
        if origin is None or not self.allows_origin(request):
            return vary
        return vary | {hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: origin, hdrs.ACCESS_CONTROL_EXPOSE_HEADERS: ", ".join(EXPOSED_HEADERS)}

    def preflight_headers(self, request: web.Request, methods: frozenset[str]) -> Mapping[str, str]:
        """What a preflight of an allowed origin is told; the names it asks for are granted, since keys are not cookies."""
        allowed = ", ".join(sorted(methods | {"OPTIONS"}))
        headers: dict[str, str] = {hdrs.ALLOW: allowed}
        if hdrs.ORIGIN not in request.headers:
            return headers
        headers[hdrs.ACCESS_CONTROL_ALLOW_METHODS] = allowed
        headers[hdrs.ACCESS_CONTROL_MAX_AGE] = str(PREFLIGHT_MAX_AGE_S)
        names = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        if names and _HEADER_NAMES.fullmatch(names):
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = names
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return headers

    def _is_ours(self, text: str, request: web.Request) -> bool:
        host = Authority.parse(text)
        if host is None:
            return False
        if any(host.name == allowed.name and allowed.port in (None, host.port) for allowed in self._allowed_hosts):
            return True
        local = request.transport.get_extra_info("sockname") if request.transport is not None else None
        if local is None or host.port not in (None, local[1]):
            return False
        return host.name in self._own_names or self._is_our_address(host, str(local[0]))

    def _is_our_address(self, host: Authority, local: str) -> bool:
        """A loopback address, or on a network the very address that this connection came in on."""
        address = host.address
        if address is None:
            return False
        if address.is_loopback:
            return True
        here = Authority(local.partition("%")[0].lower(), None).address
        return not self._is_loopback and address == here


def _machine_names() -> set[str]:
    name = socket.gethostname().lower().removesuffix(".")
    return {name, f"{name.partition('.')[0]}.local"}


def _configured_host(text: str) -> Authority:
    host = Authority.parse(text)
    if host is None:
        raise ConfigError(f"--allowed-host {text!r} is no host name; it takes NAME or NAME:PORT")
    return host


def _configured_origin(text: str) -> str:
    origin = text.lower().removesuffix("/")
    if not _ORIGIN.fullmatch(origin):
        raise ConfigError(f"--cors-origin {text!r} is no web origin; it takes one such as https://chat.example or http://localhost:3000")
    return origin
