"""Listening sockets, taken before the model loads so that a port in use costs nothing."""

import errno
import ipaddress
import os
import socket
import sys
from typing import Final

from runner.config import ServerConfig
from runner.errors import ConfigError

_BACKLOG: Final = 1024
_PORT_TRIES: Final = 20
_MAX_PORT: Final = 65535
_LOOPBACK: Final = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
_NO_SUCH_FAMILY: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})

Address = tuple[socket.AddressFamily, str]


def bind(config: ServerConfig) -> list[socket.socket]:
    """Listen where the configuration says: on 127.0.0.1 and ::1 with the same port, or on every address of `config.host`.

    A family that this machine does not have is left out. Port 0 takes one free port for all addresses. No port is shared
    with another program. Raises ConfigError.
    """
    if not 0 <= config.port <= _MAX_PORT:
        raise ConfigError(f"--port is {config.port}; it takes 0 to {_MAX_PORT}")
    addresses = _addresses(config.host)
    if config.port != 0:
        return _listen_on(addresses, config.port)
    for _ in range(_PORT_TRIES):
        try:
            return _listen_on(addresses, 0)
        except ConfigError as error:  # the port that was free on the first address may be taken on the second
            last = error
    raise last


def urls(sockets: list[socket.socket]) -> list[str]:
    """The addresses to type into a browser, the loopback or first one first."""
    found = []
    for sock in sockets:
        host, port = sock.getsockname()[:2]
        if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
            found += [f"http://127.0.0.1:{port}", f"http://{socket.gethostname()}:{port}"]
        else:
            found.append(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    return list(dict.fromkeys(found))


def is_loopback(sockets: list[socket.socket]) -> bool:
    """Whether only programs on this machine can connect."""
    return all(ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback for sock in sockets)


def exposure_warning(config: ServerConfig, sockets: list[socket.socket]) -> str | None:
    """A sentence for the person who opens the server to the network without a key, else None."""
    if config.keys or is_loopback(sockets):
        return None
    where = ", ".join(sorted({str(sock.getsockname()[0]) for sock in sockets}))
    return f"Everyone who can reach {where} can use this server: no API key is set (--api-key)"


def _addresses(host: str | None) -> list[Address]:
    if host is None or host.lower() in ("localhost", "localhost."):
        return list(_LOOPBACK)
    if not host:
        raise ConfigError("--host is empty; it takes an address or a name of this machine")
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host!r} is no address and no name that this machine can resolve") from error
    return list(dict.fromkeys((family, _with_scope(address)) for family, _, _, _, address in found))


def _with_scope(address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> str:
    host = str(address[0])
    scope = address[3] if len(address) == 4 else 0
    return f"{host}%{scope}" if scope and "%" not in host else host


def _listen_on(addresses: list[Address], port: int) -> list[socket.socket]:
    """Listen on every address; with port 0 the first one's port serves all."""
    sockets: list[socket.socket] = []
    try:
        for family, host in addresses:
            sock = _listen(family, host, port, may_be_missing=len(addresses) > 1)
            if sock is not None:
                sockets.append(sock)
                port = sock.getsockname()[1]
        if not sockets:
            raise ConfigError(f"This machine has none of the addresses {', '.join(host for _, host in addresses)}")
    except ConfigError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _listen(family: socket.AddressFamily, host: str, port: int, *, may_be_missing: bool) -> socket.socket | None:
    sock: socket.socket | None = None
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
        _set_options(sock, host)
        sock.bind(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4])
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        if sock is not None:
            sock.close()
        if may_be_missing and error.errno in _NO_SUCH_FAMILY:
            return None
        raise _explained(error, host, port) from error
    return sock


def _set_options(sock: socket.socket, host: str) -> None:
    """Reuse a port in TIME_WAIT, but never one that somebody listens on: Windows and POSIX have opposite names for that."""
    if sys.platform == "win32":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)


def _explained(error: OSError, host: str, port: int) -> ConfigError:
    code = error.errno
    if code == errno.EADDRINUSE:
        return ConfigError(f"Port {port} of {host} is in use by another program", hint="--port 0 takes a free one")
    if code in (errno.EACCES, errno.EPERM):
        return ConfigError(f"Port {port} of {host} may not be opened by this user", hint="--port 8080")
    if code in _NO_SUCH_FAMILY:
        return ConfigError(f"{host} is not an address of this machine")
    reason = os.strerror(code) if code is not None and code > 0 else str(error)
    return ConfigError(f"Port {port} of {host} cannot be opened: {reason}")
