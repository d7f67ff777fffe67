"""Every way to a shard passes the same suite, against a real server."""

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from kvstore.testing.cluster import ServerProcess
from kvstore.testing.conformance import TIMEOUT_S, LayerConformance, LinkConformance, NewLink
from kvstore.transport.base import ShardLink
from kvstore.transport.mooncake import MooncakeLink
from kvstore.transport.shm import SharedMemoryLink
from kvstore.transport.tcp import TcpLink
from kvstore.wire.control import ControlClient, NodeInfo
from tests.transport.fabrics import needs_mooncake


@pytest.fixture(scope="module")
def node() -> Iterator[NodeInfo]:
    """A server with one shard, as it describes itself."""
    with ServerProcess(dram="8MiB") as server, ControlClient(server.address, timeout_s=TIMEOUT_S) as control:
        yield control.hello("tests")


@pytest.fixture(scope="module")
def fabric_node() -> Iterator[NodeInfo]:
    """The same with Mooncake's engine."""
    with (
        ServerProcess(dram="8MiB", fabric="tcp") as server,
        ControlClient(server.address, timeout_s=TIMEOUT_S) as control,
    ):
        yield control.hello("tests")


@pytest.fixture
def links() -> Iterator[ExitStack]:
    """What is entered here is closed in the end."""
    with ExitStack() as stack:
        yield stack


class TestSharedMemory(LinkConformance, LayerConformance):
    @pytest.fixture(params=[False, True], ids=["plain", "checksums"])
    def new_link(self, request: pytest.FixtureRequest, node: NodeInfo, links: ExitStack) -> NewLink:
        def new() -> ShardLink:
            path = node.shards[0].socket_path
            return links.enter_context(closing(SharedMemoryLink(path, timeout_s=TIMEOUT_S, checksums=request.param)))

        return new


class TestTcp(LinkConformance, LayerConformance):
    @pytest.fixture
    def new_link(self, node: NodeInfo, links: ExitStack) -> NewLink:
        def new() -> ShardLink:
            link = TcpLink(node.data_host, node.data_port, token=node.token, shard=0, timeout_s=TIMEOUT_S)
            return links.enter_context(closing(link))

        return new


@needs_mooncake
class TestMooncake(LinkConformance, LayerConformance):
    @pytest.fixture
    def new_link(self, fabric_node: NodeInfo, links: ExitStack) -> NewLink:
        def new() -> ShardLink:
            node = fabric_node
            link = MooncakeLink(
                node.data_host,
                node.data_port,
                token=node.token,
                shard=0,
                pool_bytes=node.shards[0].pool_bytes,
                timeout_s=TIMEOUT_S,
            )
            return links.enter_context(closing(link))

        return new
