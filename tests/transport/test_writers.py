"""A link that one thread gives up while another one writes through it: the writer never reaches a slot that the shard
has given to somebody else.
"""

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

import kvstore.transport.shm
from kvstore.core.errors import Unavailable
from kvstore.core.keys import chain_keys
from kvstore.core.states import PutStatus
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.transport.buffers import Region
from kvstore.transport.shm import SharedMemoryLink
from kvstore.wire.control import ControlClient
from tests.client.sdk import content, space

NAMESPACE = space(layer_bytes=256 * 1024)
TIMEOUT_S = 30.0
KEYS = chain_keys(NAMESPACE, range(4 * 4))
OTHERS = chain_keys(NAMESPACE, range(1000, 1000 + 4 * 200))


@pytest.fixture
def store() -> Iterator[ServerProcess]:
    with ServerProcess(dram="16MiB", watermark=0) as server:
        yield server


def opened(store: ServerProcess) -> SharedMemoryLink:
    with ControlClient(store.address) as control:
        socket_path = control.hello("test").shards[0].socket_path
    link = SharedMemoryLink(socket_path, timeout_s=TIMEOUT_S)
    link.open(NAMESPACE, TIMEOUT_S)
    return link


def region(blocks: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> Region:
    return Region(blocks.reshape(-1), np.arange(len(blocks), dtype=np.int64) * blocks.shape[1])


def reserved(store: ServerProcess) -> int:
    return store.status()["shards"][0]["gauges"]["reserved_blocks_now"]


def test_a_stream_whose_link_was_given_up_writes_nothing_any_more(store: ServerProcess) -> None:
    writer = opened(store)
    sink = writer.publish(KEYS.array, TIMEOUT_S, TIMEOUT_S)
    assert (sink.statuses == PutStatus.STORED).all()
    writer.close()
    until(lambda: not reserved(store), TIMEOUT_S, "the end of the session")
    with closing(opened(store)) as other:
        blocks = content(OTHERS, NAMESPACE)
        stored = other.store(OTHERS.array, region(blocks), TIMEOUT_S) == PutStatus.STORED
        assert stored.sum() > 20  # the pool is full: the writer's slots are among these
        garbage = np.full((len(KEYS), NAMESPACE.layer_bytes), 0xEE, np.uint8)
        with pytest.raises(Unavailable):
            sink.write(0, region(garbage), TIMEOUT_S)
        found = np.zeros_like(blocks)
        there = other.fetch(OTHERS.array, region(found), (0, NAMESPACE.layers), TIMEOUT_S)
        assert np.array_equal(found[there], blocks[there])


def test_a_slot_stays_the_writers_until_the_copy_that_is_under_way_has_ended(
    store: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy: Callable[..., None] = kvstore.transport.shm.copy_blocks
    during: list[int] = []
    writer = opened(store)

    def copy_while_another_thread_gives_up(*arguments: object) -> None:
        writer.close()
        during.append(reserved(store))  # asked after the close: the shard would have seen the end by then
        copy(*arguments)

    monkeypatch.setattr(kvstore.transport.shm, "copy_blocks", copy_while_another_thread_gives_up)
    with pytest.raises(Unavailable):
        writer.store(KEYS.array, region(content(KEYS, NAMESPACE)), TIMEOUT_S)
    assert during == [len(KEYS)]
    until(lambda: not reserved(store), TIMEOUT_S, "the end of the session")
