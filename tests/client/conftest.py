"""A real server for each file of SDK tests, and clients of it over either transport."""

from collections.abc import Callable, Iterator

import pytest

import kvstore
from kvstore.testing.cluster import ServerProcess
from tests.client.sdk import space

TIMEOUT_S = 10.0  # generous: the tests share their machine

Connect = Callable[..., kvstore.Client]


@pytest.fixture(scope="module")
def store() -> Iterator[ServerProcess]:
    """A server with one shard."""
    with ServerProcess(dram="128MiB") as server:
        yield server


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each test that asks for it runs over both."""
    return request.param


@pytest.fixture
def connect(store: ServerProcess, transport: str) -> Iterator[Connect]:
    """Connects to the server over the transport, and closes in the end."""
    clients: list[kvstore.Client] = []

    def new(namespace: kvstore.Namespace, *, address: str | list[str] | None = None, **options: object):
        settings: dict[str, object] = {"timeout_s": TIMEOUT_S, "transport": transport, **options}
        client = kvstore.connect(address or store.address, namespace=namespace, **settings)  # pyright: ignore[reportArgumentType]
        clients.append(client)
        return client

    yield new
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Connect) -> kvstore.Client:
    """A client of a small namespace: two layers of 4 KiB."""
    return connect(space())
