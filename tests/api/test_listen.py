"""Sockets: taken before anything costly, on both loopback addresses, and every trouble is one sentence."""

import asyncio
import socket
from typing import Any

import pytest

from runner.api.listen import bind, exposure_warning, urls
from runner.api.server import Server
from runner.config import ServerConfig
from runner.errors import ConfigError
from tests.api.wire import Wire
from tests.fakes import FakeEngineClient


def close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")


@needs_ipv6
def test_default_is_both_loopback_addresses_on_one_port() -> None:
    sockets = bind(ServerConfig(port=0))
    names = [sock.getsockname()[:2] for sock in sockets]
    close(sockets)
    port = names[0][1]
    assert names == [("127.0.0.1", port), ("::1", port)]


@needs_ipv6
async def test_both_addresses_answer(server: Server) -> None:
    assert len(server.urls) == 2
    for url in server.urls:
        wire = Wire(url, None)  # type: ignore[arg-type]
        assert (await wire.raw(f"GET /health HTTP/1.1\r\nHost: {url.removeprefix('http://')}\r\n\r\n".encode())).status == 200


def test_machine_without_ipv6_serves_on_127_0_0_1(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without_ipv6(family: int = socket.AF_INET, *args: Any, **kwargs: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, *args, **kwargs)

    monkeypatch.setattr("runner.api.listen.socket.socket", without_ipv6)
    sockets = bind(ServerConfig(port=0))
    names = urls(sockets)
    close(sockets)
    assert len(names) == 1
    assert names[0].startswith("http://127.0.0.1:")


def test_port_in_use_is_a_config_error_that_names_it() -> None:
    first = bind(ServerConfig(port=0))
    port = first[0].getsockname()[1]
    with pytest.raises(ConfigError, match=f"Port {port} of 127.0.0.1 is in use") as caught:
        bind(ServerConfig(port=port))
    assert caught.value.hint == "--port 0 takes a free one"
    close(first)


@needs_ipv6
def test_port_in_use_on_one_of_the_addresses_is_one_too() -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="of ::1 is in use"):
            bind(ServerConfig(port=taken.getsockname()[1]))


async def test_port_in_time_wait_can_be_taken_at_once() -> None:
    sockets = bind(ServerConfig(port=0))
    port = sockets[0].getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as client:
        sockets[0].setblocking(True)
        accepted, _ = sockets[0].accept()
        accepted.close()  # our side closes first and holds TIME_WAIT
        assert client.recv(1) == b""
    close(sockets)
    close(bind(ServerConfig(port=port)))


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no.such.host.invalid", "no name that this machine can resolve"),
        ("", "--host is empty"),
        ("999.1.1.1", "no name that this machine can resolve"),
        ("192.0.2.1", "192.0.2.1 is not an address of this machine"),
        ("a" * 300, "no name that this machine can resolve"),
    ],
)
def test_bad_host_is_a_config_error(host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bind(ServerConfig(host=host, port=0))


def test_port_beyond_the_range_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        bind(ServerConfig(port=70_000))


def test_port_that_needs_rights_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    class Refusing(socket.socket):
        bind = refuse

    monkeypatch.setattr("runner.api.listen.socket.socket", Refusing)
    with pytest.raises(ConfigError, match=r"Port 80 of 127\.0\.0\.1 may not be opened by this user"):
        bind(ServerConfig(port=80))


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [(None, (), False), ("127.0.0.1", (), False), ("localhost", (), False), ("0.0.0.0", (), True), ("0.0.0.0", ("k",), False)],
)
def test_warning_when_a_network_can_connect_without_a_key(host: str | None, keys: tuple[str, ...], warns: bool) -> None:
    config = ServerConfig(host=host, port=0, api_keys=keys)
    sockets = bind(config)
    warning = exposure_warning(config, sockets)
    close(sockets)
    assert (warning is not None) == warns


def test_all_interfaces_are_shown_as_something_to_type() -> None:
    sockets = bind(ServerConfig(host="0.0.0.0", port=0))
    port = sockets[0].getsockname()[1]
    close_later = urls(sockets)
    close(sockets)
    assert close_later == [f"http://127.0.0.1:{port}", f"http://{socket.gethostname()}:{port}"]


async def test_ports_are_free_after_close(engine: FakeEngineClient) -> None:
    config = ServerConfig(port=0)
    sockets = bind(config)
    port = sockets[0].getsockname()[1]
    server = Server(config, engine, sockets, version="0")
    await server.start()
    await server.close()
    await asyncio.sleep(0)
    close(bind(ServerConfig(port=port)))
