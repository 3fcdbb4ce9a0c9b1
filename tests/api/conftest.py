"""A real server on a free port of the loopback interfaces, before a fake engine."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from runner.api.server import Server, bind
from runner.config import ServerConfig
from tests.api.wire import Wire
from tests.fakes import FakeEngineClient


@pytest.fixture
def config() -> ServerConfig:
    """Override by parametrising the fixture's name in a test module."""
    return ServerConfig(port=0)


@pytest.fixture
def engine() -> FakeEngineClient:
    """The engine behind the server; scripts are enqueued on it."""
    return FakeEngineClient()


@pytest.fixture
async def server(config: ServerConfig, engine: FakeEngineClient) -> AsyncIterator[Server]:
    """A started server."""
    server = Server(config, engine, bind(config), version="1.2.3")
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def wire(server: Server) -> AsyncIterator[Wire]:
    """Requests to the server, raw or through an HTTP client."""
    async with aiohttp.ClientSession(base_url=server.urls[0]) as session:
        yield Wire(server.urls[0], session)
