"""Views: blocks where they lie, read-only, under a lease that is renewed; and reads that have to ask for a lease."""

import time

import numpy as np
import pytest

import kvstore
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.transport import shm
from kvstore.transport.channel import Deadline
from kvstore.wire.control import ControlClient
from tests.client.conftest import TIMEOUT_S, Connect
from tests.client.sdk import fresh_keys, one_line, space, stored


def test_a_view_shows_what_is_there_and_none_for_what_is_not(client: kvstore.Client) -> None:
    keys, data = stored(client, 4)
    mixed = kvstore.BlockKeys.concat(keys[:3], fresh_keys(client, 2), keys[3:])
    with client.view(mixed) as view:
        assert (len(view), view.hit_blocks) == (6, 3)
        assert view.ok.tolist() == [True, True, True, False, False, True]
        assert view[3] is view[4] is view.array(3) is None
        for row, block in zip((0, 1, 2, 5), data, strict=True):
            np.testing.assert_array_equal(view[row], block)
        view.check()


def test_a_view_can_not_be_written_through(client: kvstore.Client) -> None:
    keys, data = stored(client, 2)
    with client.view(keys) as view:
        for block in (view[0], view.array(0), view.array(0, np.uint16, (2, -1))):
            assert block is not None
            assert not block.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                block[...] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                block.flags.writeable = True
        np.testing.assert_array_equal(view[0], data[0])
    np.testing.assert_array_equal(client.get(keys).blocks[0], data[0])


def test_a_block_is_shown_in_the_dtype_and_shape_wanted(connect: Connect) -> None:
    client = connect(space(4096, 3, dtype="float32", model="shapes"))
    keys = fresh_keys(client, 2)
    numbers = np.random.default_rng(1).standard_normal((2, 3, 1024), dtype=np.float32)
    client.put(keys, numbers)
    with client.view(keys) as view:
        block = view.array(1)
        assert block is not None
        assert (block.dtype, block.shape) == (np.dtype(np.float32), (3 * 1024,))
        np.testing.assert_array_equal(view.array(1, shape=(3, 1024)), numbers[1])
        np.testing.assert_array_equal(
            view.array(0, np.uint16, (3, 2, -1)), numbers[0].view(np.uint16).reshape(3, 2, -1)
        )
        with pytest.raises(ValueError, match="reshape"):
            view.array(0, shape=(5, 5))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_block_of_a_dtype_that_numpy_lacks_is_shown_in_a_carrier_or_refused(dtype: str, connect: Connect) -> None:
    client = connect(space(64, 1, dtype=dtype, model=f"lacking {dtype}"))
    keys, data = stored(client, 1)
    with client.view(keys) as view:
        np.testing.assert_array_equal(view.array(0, np.uint8, (8, 8)), data[0].reshape(8, 8))
        with one_line(kvstore.UsageError, "dtype", dtype, "numpy", "uint"):
            view.array(0)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # torch has no read-only tensors
def test_torch_sees_the_same_memory(client: kvstore.Client) -> None:
    torch = pytest.importorskip("torch", reason="tensors need torch")
    keys, data = stored(client, 1)
    with client.view(keys) as view:
        seen = torch.from_numpy(view[0])
        assert torch.equal(seen, torch.from_numpy(data[0]))


def test_over_shared_memory_a_view_copies_nothing(store: ServerProcess) -> None:
    with kvstore.connect(store.address, namespace=space(), transport="shm") as client:
        keys, _ = stored(client, 1)
        with client.view(keys) as one, client.view(keys) as other:
            first, second = one[0], other[0]
            assert first is not None
            assert second is not None
            assert np.shares_memory(first, second)


def test_a_closed_view_shows_nothing_more(client: kvstore.Client) -> None:
    keys, _ = stored(client, 2)
    view = client.view(keys)
    with view:
        assert view.hit_blocks == 2
    view.close()  # again: nothing
    for look in (lambda: view[0], lambda: view.array(1)):
        with one_line(kvstore.UsageError, "the view is closed"):
            look()


def test_a_row_beyond_the_view_is_an_index_error(client: kvstore.Client) -> None:
    keys, _ = stored(client, 2)
    with client.view(keys) as view, pytest.raises(IndexError):
        view[2]


def test_blocks_under_a_view_stay_although_they_are_deleted_and_the_pool_is_flooded(connect: Connect) -> None:
    client = connect(space(model="stay"))
    keys, data = stored(client, 4)
    flood = connect(space(1 << 20, 2, model="stay flood"))
    with client.view(keys) as view:
        assert client.delete(keys) == 4
        assert client.get(keys).hit_blocks == 0
        for _ in range(20):  # 160 MiB through 128 MiB
            stored(flood, 4)
        np.testing.assert_array_equal(np.array([view[row] for row in range(4)]), data)


def test_a_view_outlives_its_first_lease(client: kvstore.Client) -> None:
    keys, data = stored(client, 3)
    with client.view(keys, ttl_s=0.5) as view:
        opened_s = time.monotonic()
        until(lambda: time.monotonic() > opened_s + 1.2, what="the lease's time twice over")
        view.check()
        client.delete(keys)
        stored(client, 3)
        np.testing.assert_array_equal(np.array([view[row] for row in range(3)]), data)


def test_a_view_whose_lease_could_not_be_renewed_says_so(store: ServerProcess) -> None:
    with kvstore.connect(store.address, namespace=space(), transport="shm", timeout_s=0.2) as client:
        keys, _ = stored(client, 1)
        view = client.view(keys, ttl_s=0.3)
        store.freeze()
        try:
            frozen_s = time.monotonic()
            until(lambda: time.monotonic() > frozen_s + 0.4, what="the lease's time")
            with one_line(kvstore.LeaseExpired, "0.3 s", "ran out"):
                view.check()
            with one_line(kvstore.LeaseExpired, "0.3 s"), view:
                pass
            with client.view(keys[:0]) as empty:
                empty.check()
        finally:
            store.thaw()
        until(lambda: client.lookup(keys).hit_blocks == 1, what="the client's new link")


def test_the_error_of_a_with_block_is_not_replaced_by_that_of_its_view(store: ServerProcess) -> None:
    with kvstore.connect(store.address, namespace=space(), transport="shm") as client:
        keys, _ = stored(client, 1)
        view = client.view(keys, ttl_s=0.5)
        client.close()
        with pytest.raises(KeyError, match="mine"), view:
            raise KeyError("mine")
        assert not view.ok[1:].any()


def test_a_view_of_a_closed_client_has_no_lease_any_more(connect: Connect, transport: str) -> None:
    client = connect(space(model="closed"))
    keys, data = stored(client, 1)
    view = client.view(keys)
    client.close()
    if transport == "tcp":  # its bytes were copied
        with view:
            np.testing.assert_array_equal(view[0], data[0])
    else:
        with one_line(kvstore.LeaseExpired, "ran out"), view:
            pass


def test_hundreds_of_views_leave_no_lease_behind(store: ServerProcess) -> None:
    with kvstore.connect(store.address, namespace=space(), transport="shm") as client:
        keys, _ = stored(client, 2)
        for _ in range(600):
            with client.view(keys) as view:
                assert view.hit_blocks == 2
        until(lambda: total(store, "gauges", "leases_now") == 0, what="leases given back")


# --- where loads are not ordered, reads go under a lease


@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
def test_a_processor_without_ordered_loads_reads_the_same(
    checksums: bool, store: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvstore.connect(store.address, namespace=space(), transport="shm", checksums=checksums) as client:
        keys, data = stored(client, 6)
        mixed = kvstore.BlockKeys.concat(fresh_keys(client, 1), keys, fresh_keys(client, 1))
        before = total(store, "counters", "leases")
        monkeypatch.setattr(shm, "ORDERED_LOADS", False)
        got = client.get(mixed)
        assert got.ok.tolist() == [False, *[True] * 6, False]
        np.testing.assert_array_equal(np.array(got.blocks[1:-1]), data)
        np.testing.assert_array_equal(client.get(keys[2:3]).blocks[0], data[2])
        assert client.get(mixed[:1]).blocks == [None]
        half = np.zeros((6, 4096), dtype=np.uint8)
        assert client.get_into(keys, half, layers=(1, 2)).hit_blocks == 6
        np.testing.assert_array_equal(half, data[:, 4096:])
        assert total(store, "counters", "leases") == before + 3  # a read without a hit needs none
        until(lambda: total(store, "gauges", "leases_now") == 0, what="leases given back")


# --- checksums over shared memory


def test_with_checksums_a_damaged_block_is_a_miss_over_either_transport(store: ServerProcess, transport: str) -> None:
    with kvstore.connect(store.address, namespace=space(), transport="shm", checksums=True) as writer:
        keys, data = stored(writer, 3)
        assert writer.get(keys).hit_blocks == 3
        damage(store, keys[1:2])
        with kvstore.connect(store.address, namespace=space(), transport=transport, checksums=True) as reader:
            layers = np.zeros((3, 4096), dtype=np.uint8)
            assert reader.get_into(keys, layers, layers=(1, 2)).hit_blocks == 3  # that layer is whole
            got = reader.get(keys)
            assert got.ok.tolist() == [True, False, True]
            np.testing.assert_array_equal(got.blocks[2], data[2])
            assert sum(link["checksum_failures"] for link in reader.stats()["links"]) == 1
            assert [reader.get(keys[row : row + 1]).hit_blocks for row in range(3)] == [1, 0, 1]
            assert writer.put(keys, data).stored == 1  # the damaged block is gone, and can be written again
            assert reader.get(keys).hit_blocks == 3


def test_without_checksums_a_put_leaves_them_out_and_a_verifying_reader_takes_the_block(store: ServerProcess) -> None:
    with (
        kvstore.connect(store.address, namespace=space(), transport="shm") as writer,
        kvstore.connect(store.address, namespace=space(), transport="shm", checksums=True) as reader,
    ):
        keys, data = stored(writer, 3)
        np.testing.assert_array_equal(np.array(reader.get(keys).blocks), data)
        assert sum(link["checksum_failures"] for link in reader.stats()["links"]) == 0


def test_what_was_put_over_tcp_is_verified_over_shared_memory(store: ServerProcess) -> None:
    with (
        kvstore.connect(store.address, namespace=space(), transport="tcp") as writer,
        kvstore.connect(store.address, namespace=space(), transport="shm", checksums=True) as verifying,
        kvstore.connect(store.address, namespace=space(), transport="shm") as careless,
    ):
        keys, _ = stored(writer, 3)
        assert verifying.get(keys).hit_blocks == 3
        damage(store, keys[1:2])
        assert careless.get(keys).hit_blocks == 3
        assert verifying.get(keys).ok.tolist() == [True, False, True]


def total(store: ServerProcess, kind: str, name: str) -> int:
    """A counter or gauge, over all shards."""
    return sum(shard[kind][name] for shard in store.status()["shards"])


def damage(store: ServerProcess, key: kvstore.BlockKeys) -> None:
    """Flip a bit in the first layer of that block in the shard's own memory, as a bad memory module would."""
    deadline = Deadline(TIMEOUT_S)
    with ControlClient(store.address) as control:
        channel = shm.connect_local(control.hello("damage").shards[0].socket_path, deadline)
    shared = shm.SharedShard(channel, deadline)
    entry = shared.index.find(*key.array.item(0))
    assert entry is not None
    shared.pool[entry.offset + 10] ^= 1
    channel.close()
