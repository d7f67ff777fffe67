"""Namespaces with odd labels, and very many of them: the node can still be asked."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest

from kvstore.core.errors import NamespaceMismatch
from kvstore.testing.cluster import ServerProcess
from kvstore.transport.channel import Deadline
from kvstore.transport.shm import ShardCalls, connect_local
from kvstore.wire.control import ControlClient
from kvstore.wire.frames import Op
from kvstore.wire.messages import KeyRequest
from tests.server.shards import keys

TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="16MiB") as server:
        yield server


@pytest.fixture
def shard(server: ServerProcess) -> Iterator[ShardCalls]:
    with ControlClient(server.address) as control:
        path = control.hello("tests").shards[0].socket_path
    calls = ShardCalls(connect_local(path, Deadline(TIMEOUT_S)))
    yield calls
    calls.channel.close()


def store(shard: ShardCalls, space: int, key: int) -> None:
    rows = shard.reserve(KeyRequest(space, keys(key), ttl_ms=10_000, size_bytes=8), Deadline(TIMEOUT_S))
    shard.settle(Op.COMMIT, rows, Deadline(TIMEOUT_S))


def opened(shard: ShardCalls, number: int, label: str) -> int:
    described = {"digest": number.to_bytes(16, "big").hex(), "layers": 1, "layer_bytes": 8, "label": label}
    return shard.open(described, Deadline(TIMEOUT_S))


LABELS = ["\ud800 half a character", "line\nbreak", "\x00", "<script>", "長い名前" * 100]


@pytest.mark.parametrize(("number", "label"), [*enumerate(LABELS)], ids=ascii)
def test_a_label_of_any_characters_can_be_opened_refused_by_name_and_shown(
    server: ServerProcess, shard: ShardCalls, number: int, label: str
) -> None:
    mine, other = opened(shard, 10_000 + number, label), opened(shard, 20_000 + number, "other")
    store(shard, mine, number)
    with pytest.raises(NamespaceMismatch, match="keys of another namespace") as refused:
        store(shard, other, number)
    assert "\n" not in str(refused.value)
    with urllib.request.urlopen(server.http_address + "/", timeout=TIMEOUT_S) as page:
        assert b"<script>" not in page.read()
    assert server.status()["healthy"]


def test_thousands_of_namespaces_with_long_labels_leave_the_node_healthy_and_its_status_short(
    server: ServerProcess, shard: ShardCalls
) -> None:
    for number in range(1000):
        store(shard, opened(shard, number, "模" * 200), 100_000 + number)
    status = server.status()
    assert status["healthy"]
    assert status["shards"][0]["gauges"]["resident_blocks"] >= 1000
    assert len(json.dumps(status)) < 1 << 20
    for path in ("/", "/metrics"):
        assert server.http(path)
