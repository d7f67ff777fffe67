"""Bytes that change in memory after they were stored: a miss that is counted, never wrong bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

import kvstore
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.transport.trailer import trailer_offset
from tests.chaos.blocks import LARGE, SMALL, TINY, content, has_all, keys_of, put_all, wrong
from tests.chaos.roles import local_session
from tests.chaos.sight import hello

HEADED = kvstore.Namespace(
    model="damage",
    revision="1",
    dtype="uint8",
    block_tokens=16,
    layout=kvstore.CanonicalLayout(layers=3, kv_heads=2, head_dim=64),
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="32MiB") as server:
        yield server


def connect(
    server: ServerProcess, transport: str, space: kvstore.Namespace, *, checksums: bool = False
) -> kvstore.Client:
    return kvstore.connect(server.address, namespace=space, transport=transport, checksums=checksums)


def flip(server: ServerProcess, key: kvstore.BlockKeys, place: int) -> None:
    """Change one bit of a block, as faulty memory or a runaway process would."""
    session = local_session(hello(server).shards[0].socket_path)
    with closing(session.channel):
        found = session.shared.index.probe(key.array)
        assert found.states.tolist() == [kvstore.BlockState.COMMITTED]
        session.shared.pool[int(found.offsets[0]) + place] ^= 1


def failures(client: kvstore.Client) -> int:
    return sum(link["checksum_failures"] for link in client.stats()["links"])


@pytest.mark.parametrize(
    ("sums_by", "space"),
    [
        ("a get over tcp", LARGE),  # of small blocks it keeps no sums: it doesn't hold them while it sends
        ("a put over tcp", TINY),
        ("a put over tcp", LARGE),
        ("a put over shm with checksums", TINY),
        ("a put over shm with checksums", SMALL),
        ("a put over shm with checksums", LARGE),
    ],
)
def test_a_flipped_bit_makes_the_block_a_counted_miss(
    server: ServerProcess, sums_by: str, space: kvstore.Namespace
) -> None:
    with (
        connect(server, "shm", space, checksums=True) as checking,
        connect(server, "tcp", space) as remote,
        connect(server, "shm", space) as plain,
    ):
        keys = keys_of(plain, 1, 4)
        writer = {"a get over tcp": plain, "a put over tcp": remote}.get(sums_by, checking)
        # Sums that a get computed are the data port's own; those of a put lie beside the block for every reader.
        for client in (remote,) if writer is plain else (remote, checking):
            plain.delete(keys)
            put_all(writer, keys)
            assert has_all(remote, keys)
            assert has_all(checking, keys)
            # First and last byte, and one in a layer in the middle; block 1 stays whole.
            for row, place in ((0, 0), (2, space.block_bytes // 2 + 3), (3, space.block_bytes - 1)):
                flip(server, keys[row : row + 1], place)
            # Layers that are whole can still be read.
            into = np.zeros((1, space.layer_bytes), dtype=np.uint8)
            assert client.get_into(keys[:1], into, layers=(1, 2)).ok.all()
            assert np.array_equal(into[0], content(keys[:1], space)[0, space.layer_bytes : 2 * space.layer_bytes])
            with remote.view(keys[2:3]) as view:
                assert not view.ok.any()
            seen = failures(client)
            got = client.get(keys)
            assert got.ok.tolist() == [False, True, False, False]
            assert wrong(keys, got, space) == 0
            assert failures(client) == seen + 2  # the view has met the third
            assert plain.lookup(keys).hit.tolist() == [False, True, False, False]  # damaged blocks are gone


def test_a_flipped_bit_in_the_sums_is_a_miss_as_well(server: ServerProcess) -> None:
    with connect(server, "tcp", SMALL) as remote, connect(server, "shm", SMALL, checksums=True) as checking:
        keys = keys_of(remote, 2, 2)
        put_all(remote, keys)
        flip(server, keys[:1], trailer_offset(SMALL.block_bytes) + 8 + 5)
        for client in (remote, checking):
            assert client.get(keys).ok.tolist() == [False, True]


def test_damage_is_counted_in_the_servers_metrics_too(server: ServerProcess) -> None:
    def counted() -> int:
        return server.status()["shards"][0]["counters"]["client_checksum_failures"]

    with connect(server, "tcp", SMALL) as remote:
        keys = keys_of(remote, 3, 1)
        put_all(remote, keys)
        flip(server, keys, 77)
        before = counted()
        assert not remote.get(keys).ok.any()
        until(lambda: counted() > before, what="a report of the client")


def test_a_damaged_block_can_be_stored_anew_once_a_reader_has_met_it(server: ServerProcess) -> None:
    with connect(server, "tcp", SMALL) as remote:
        keys = keys_of(remote, 4, 2)
        put_all(remote, keys)
        flip(server, keys[:1], 5)
        assert not has_all(remote, keys)
        assert remote.put(keys, content(keys, SMALL)).stored == 1
        assert has_all(remote, keys)


@pytest.mark.parametrize("heads", [None, (1, 2)])
def test_a_stream_over_shared_memory_leaves_out_the_layers_from_the_damaged_one_on(
    server: ServerProcess, heads: tuple[int, int] | None
) -> None:
    with connect(server, "shm", HEADED, checksums=True) as checking, connect(server, "shm", HEADED) as plain:
        keys = keys_of(checking, 5 + bool(heads), 4)
        payload = np.arange(4 * HEADED.block_bytes, dtype=np.uint32).astype(np.uint8)
        assert checking.put(keys, payload).stored == 4
        flip(server, keys[1:2], HEADED.block_bytes - 1)  # the last layer
        flip(server, keys[3:4], 0)
        width = HEADED.block_bytes // (2 if heads else 1)
        into = np.zeros((4, width), dtype=np.uint8)
        seen = failures(checking)
        with checking.layer_stream(keys, into, heads=heads) as stream:
            last = stream.wait(HEADED.layers - 1)
            assert last.tolist() == [True, False, True, False]
            assert not stream.ok[:, 3].any()
        whole = payload.reshape(4, HEADED.layers, 2, -1)[:, :, slice(*heads) if heads else slice(None)]
        assert np.array_equal(into[[0, 2]], whole.reshape(4, -1)[[0, 2]])
        assert failures(checking) == seen + 2
        until(lambda: plain.lookup(keys).hit.tolist() == [True, False, True, False], what="damaged blocks are gone")
