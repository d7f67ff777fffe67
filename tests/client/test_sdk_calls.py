"""Every call of the client, over both transports, to one shard and to two."""

from collections.abc import Iterator

import numpy as np
import pytest

import kvstore
from kvstore import BlockState, PutStatus
from kvstore.testing.cluster import ServerProcess
from tests.client.conftest import Connect
from tests.client.sdk import BLOCK_TOKENS, Bytes, content, fresh_keys, fresh_tokens, is_absent, space, stored

SIZE = space().block_bytes


@pytest.fixture(scope="module", params=[1, 2], ids=["one-shard", "two-shards"])
def store(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess(dram="128MiB", shards=request.param) as server:
        yield server


def half_stored(client: kvstore.Client, blocks: int) -> tuple[kvstore.BlockKeys, Bytes]:
    """Keys and content of a prompt whose first half is in the store."""
    keys = fresh_keys(client, blocks)
    data = content(keys, client.namespace)
    assert client.put(keys[: blocks // 2], data[: blocks // 2]).stored == blocks // 2
    return keys, data


# --- put and lookup -------------------------------------------------------------------------------------------------


def test_what_was_put_is_found_and_got_back_byte_for_byte(client: kvstore.Client) -> None:
    keys = fresh_keys(client, 20)
    data = content(keys, client.namespace)
    put = client.put(keys, data)
    assert put.statuses.tolist() == [PutStatus.STORED] * 20
    assert (put.stored, put.present, put.bytes) == (20, 20, 20 * SIZE)
    found = client.lookup(keys)
    assert found.states.tolist() == [BlockState.COMMITTED] * 20
    assert found.layers_ready.tolist() == [2] * 20
    assert (found.hit_blocks, found.hit_tokens) == (20, 20 * BLOCK_TOKENS)
    assert found.hit.all()
    got = client.get(keys)
    assert got.ok.all()
    assert (got.hit_blocks, got.bytes) == (20, 20 * SIZE)
    np.testing.assert_array_equal(np.array(got.blocks), data)


def test_another_client_finds_it_too(client: kvstore.Client, connect: Connect) -> None:
    keys, data = stored(client, 5)
    np.testing.assert_array_equal(np.array(connect(space()).get(keys).blocks), data)


def test_what_one_transport_wrote_the_other_reads(client: kvstore.Client, connect: Connect, transport: str) -> None:
    keys, data = stored(client, 5)
    other = connect(space(), transport="tcp" if transport == "shm" else "shm")
    np.testing.assert_array_equal(np.array(other.get(keys).blocks), data)


def test_lookup_tells_the_longest_prefix_and_each_block(client: kvstore.Client) -> None:
    keys, data = half_stored(client, 10)
    assert client.put(keys[7:8], data[7:8]).stored == 1
    found = client.lookup(keys)
    assert np.flatnonzero(found.hit).tolist() == [0, 1, 2, 3, 4, 7]
    assert found.states[5] == BlockState.ABSENT
    assert (found.hit_blocks, found.hit_tokens) == (5, 5 * BLOCK_TOKENS)


def test_a_second_put_writes_only_what_is_not_there_and_never_over_it(client: kvstore.Client) -> None:
    keys, data = half_stored(client, 8)
    put = client.put(keys, np.where(np.arange(8)[:, None] < 4, 0, data).astype(np.uint8))
    assert put.statuses.tolist() == [PutStatus.EXISTS] * 4 + [PutStatus.STORED] * 4
    assert (put.stored, put.present, put.bytes) == (4, 8, 4 * SIZE)
    np.testing.assert_array_equal(np.array(client.get(keys).blocks), data)


def test_of_a_key_that_is_named_twice_in_one_put_the_first_is_written(client: kvstore.Client) -> None:
    keys = fresh_keys(client, 3)
    data = content(keys, client.namespace)
    doubled = kvstore.BlockKeys.concat(keys, keys, keys[:1])
    put = client.put(doubled, np.concatenate([data, np.zeros_like(data), np.zeros_like(data[:1])]))
    assert put.statuses.tolist() == [PutStatus.STORED] * 3 + [PutStatus.PENDING] * 4
    np.testing.assert_array_equal(np.array(client.get(keys).blocks), data)


def test_a_key_that_is_named_twice_in_one_get_is_got_twice(client: kvstore.Client) -> None:
    keys, data = stored(client, 3)
    doubled = kvstore.BlockKeys.concat(keys, keys[1:2], keys)
    expected = np.concatenate([data, data[1:2], data])
    np.testing.assert_array_equal(np.array(client.get(doubled).blocks), expected)
    into = np.zeros((7, SIZE), dtype=np.uint8)
    assert client.get_into(doubled, into).ok.all()
    np.testing.assert_array_equal(into, expected)
    with client.view(doubled) as view:
        np.testing.assert_array_equal(np.array([view[row] for row in range(7)]), expected)
    assert client.lookup(doubled).hit_blocks == 7


def test_an_empty_batch_is_answered_with_nothing(client: kvstore.Client) -> None:
    none = client.keys([1, 2, 3])  # less than a block
    assert len(none) == 0
    empty = np.empty((0, SIZE), dtype=np.uint8)
    assert (client.lookup(none).hit_blocks, client.lookup(none).hit_tokens) == (0, 0)
    assert (client.put(none, empty).stored, client.put(none, []).bytes) == (0, 0)
    assert (client.get(none).blocks, client.get(none).hit_blocks) == ([], 0)
    assert client.get_into(none, empty).bytes == client.get_into(none, []).hit_blocks == 0
    registered = client.register(bytearray(8))
    assert client.get_into(none, registered, offsets=[]).bytes == client.put(none, registered, offsets=[]).bytes == 0
    assert (client.delete(none), client.pin(none), client.unpin(none), client.prefetch(none)) == (0, 0, 0, 0)
    with client.view(none) as view:
        assert (len(view), view.hit_blocks) == (0, 0)
        view.check()


def test_more_keys_than_one_message_takes_go_in_several(connect: Connect) -> None:
    client = connect(space(16, 1, model="many"))
    keys, data = stored(client, 9000)
    got = client.get(keys)
    assert got.hit_blocks == client.lookup(keys).hit_blocks == 9000
    np.testing.assert_array_equal(np.array(got.blocks), data)
    assert client.put(keys, data).statuses.tolist() == [PutStatus.EXISTS] * 9000
    with client.view(keys) as view:
        assert view.hit_blocks == 9000
        np.testing.assert_array_equal(np.array([view[row] for row in range(9000)]), data)
    assert client.pin(keys) == client.unpin(keys) == client.prefetch(keys) == client.delete(keys) == 9000
    assert is_absent(client, keys)


# --- misses ---------------------------------------------------------------------------------------------------------


def test_a_miss_is_an_answer(client: kvstore.Client) -> None:
    keys = fresh_keys(client, 4)
    got = client.get(keys)
    assert (got.blocks, got.ok.tolist(), got.hit_blocks, got.bytes) == ([None] * 4, [False] * 4, 0, 0)
    assert not client.get_into(keys, np.empty((4, SIZE), dtype=np.uint8)).ok.any()
    with client.view(keys) as view:
        assert [view[row] for row in range(4)] == [None] * 4
    assert client.lookup(keys).hit_blocks == client.prefetch(keys) == client.delete(keys) == 0
    assert client.pin(keys) == client.unpin(keys) == 0


def test_hits_and_misses_in_one_batch_keep_their_places(client: kvstore.Client) -> None:
    keys, data = stored(client, 6)
    absent = fresh_keys(client, 6)
    order = np.array([6, 0, 7, 5, 1, 8, 9, 2, 4, 10, 3, 11])
    mixed = kvstore.BlockKeys(kvstore.BlockKeys.concat(keys, absent).array[order])
    hit = order < 6
    got = client.get(mixed)
    assert got.ok.tolist() == hit.tolist()
    assert got.hit_blocks == 0
    for row, block in enumerate(got.blocks):
        if hit[row]:
            np.testing.assert_array_equal(block, data[order[row]])
        else:
            assert block is None
    into = np.zeros((12, SIZE), dtype=np.uint8)
    fetched = client.get_into(mixed, into)
    assert fetched.ok.tolist() == hit.tolist()
    assert fetched.bytes == 6 * SIZE
    np.testing.assert_array_equal(into[hit], data[order[hit]])


def test_a_get_without_a_hit_at_the_start_tells_no_prefix(client: kvstore.Client) -> None:
    keys, _ = half_stored(client, 4)
    backwards = kvstore.BlockKeys(keys.array[::-1])
    assert client.get(backwards).ok.tolist() == [False, False, True, True]
    assert client.get(backwards).hit_blocks == client.lookup(backwards).hit_blocks == 0
    assert client.get(keys).hit_blocks == 2


# --- the caller's memory --------------------------------------------------------------------------------------------


def test_a_list_of_buffers_of_any_kind_can_be_put(client: kvstore.Client) -> None:
    keys = fresh_keys(client, 5)
    data = content(keys, client.namespace)
    shapes = [data[3].reshape(2, -1), data[4].reshape(-1, 16).view(np.int8)]
    put = client.put(keys, [data[0].tobytes(), bytearray(data[1]), memoryview(data[2]), *shapes])
    assert put.stored == 5
    np.testing.assert_array_equal(np.array(client.get(keys).blocks), data)


def test_a_list_of_writable_buffers_of_any_kind_is_filled(client: kvstore.Client) -> None:
    keys, data = stored(client, 4)
    array, raw, seen = np.zeros((2, SIZE // 2), dtype=np.uint8), bytearray(SIZE), bytearray(SIZE + 64)
    into = [array, raw, memoryview(seen)[64:], np.zeros(SIZE, dtype=np.int8)]
    fetched = client.get_into(keys, into)
    assert fetched.ok.all()
    for target, expected in zip(into, data, strict=True):
        assert bytes(target) == expected.tobytes()
    assert seen[:64] == bytes(64)


def test_one_array_of_any_shape_is_filled(client: kvstore.Client) -> None:
    keys, data = stored(client, 4)
    for shape in ((4, SIZE), (4 * SIZE,), (2, 2, SIZE), (4, 2, SIZE // 2)):
        into = np.zeros(shape, dtype=np.uint8)
        assert client.get_into(keys, into).hit_blocks == 4
        np.testing.assert_array_equal(into.reshape(4, SIZE), data)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_arrays_of_the_namespaces_own_dtype_go_in_and_come_out(dtype: str, connect: Connect) -> None:
    client = connect(space(4096, 3, dtype=dtype, model=f"typed {dtype}"))
    keys = fresh_keys(client, 4)
    item = np.dtype(dtype).itemsize
    numbers = np.arange(4 * client.namespace.block_bytes // item).reshape(4, 3, -1).astype(dtype)
    assert client.put(keys, numbers).stored == 4
    into = np.zeros_like(numbers)
    assert client.get_into(keys, into).hit_blocks == 4
    np.testing.assert_array_equal(into, numbers)
    with client.view(keys) as view:
        np.testing.assert_array_equal(view.array(2, shape=numbers.shape[1:]), numbers[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors_go_in_and_come_out(dtype: str, connect: Connect) -> None:
    torch = pytest.importorskip("torch", reason="tensors need torch")
    client = connect(space(4096, 3, dtype=dtype, model=f"tensors {dtype}"))
    keys = fresh_keys(client, 6)
    elements = client.namespace.layer_bytes // client.namespace.itemsize
    tensor = torch.randn(6, 3, elements, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    assert client.put(keys[:3], tensor[:3]).stored == 3
    assert client.put(keys[3:], list(tensor[3:])).stored == 3
    into = torch.zeros_like(tensor)
    assert client.get_into(keys, into).hit_blocks == 6
    assert torch.equal(into, tensor)
    pieces = [torch.zeros_like(tensor[0]) for _ in range(6)]
    assert client.get_into(keys, pieces).hit_blocks == 6
    assert torch.equal(torch.stack(pieces), tensor)
    middle = torch.zeros_like(tensor[:, 1])
    assert client.get_into(keys, middle, layers=(1, 2)).hit_blocks == 6
    assert torch.equal(middle, tensor[:, 1])


def test_a_bfloat16_namespace_takes_its_bytes_as_uint16(connect: Connect) -> None:
    client = connect(space(64, 1, dtype="bfloat16", model="carried"))
    keys = fresh_keys(client, 2)
    numbers = np.arange(64, dtype=np.uint16).reshape(2, 32)
    assert client.put(keys, numbers).stored == 2
    into = np.zeros_like(numbers)
    assert client.get_into(keys, into).hit_blocks == 2
    np.testing.assert_array_equal(into, numbers)


def test_a_registered_buffer_is_filled_at_any_offsets_and_nowhere_else(client: kvstore.Client) -> None:
    keys, data = stored(client, 8)
    memory = np.full(20 * SIZE + 100, 7, dtype=np.uint8)
    offsets = np.array([11, 3, 19, 0, 7, 8, 9, 16]) * SIZE + np.array([0, 100, 99, 1, 0, 0, 0, 33])
    registered = client.register(memory)
    assert registered.nbytes == len(memory)
    assert client.get_into(keys, registered, offsets=offsets).hit_blocks == 8
    expected = np.full_like(memory, 7)
    for row, offset in enumerate(offsets.tolist()):
        expected[offset : offset + SIZE] = data[row]
    np.testing.assert_array_equal(memory, expected)


def test_blocks_are_put_from_any_offsets_of_a_registered_buffer(client: kvstore.Client) -> None:
    keys = fresh_keys(client, 6)
    memory = np.random.default_rng(5).integers(0, 256, 10 * SIZE, dtype=np.uint8)
    offsets = [5 * SIZE + 1, 0, SIZE, 9 * SIZE, 0, 17]  # in any order, odd, one of them twice
    assert client.put(keys, client.register(memory), offsets=offsets).stored == 6
    for block, offset in zip(client.get(keys).blocks, offsets, strict=True):
        np.testing.assert_array_equal(block, memory[offset : offset + SIZE])


def test_a_bytearray_can_be_registered(client: kvstore.Client) -> None:
    keys, data = stored(client, 2)
    memory = bytearray(3 * SIZE)
    assert client.get_into(keys, client.register(memory), offsets=np.array([SIZE, 0], np.uint32)).hit_blocks == 2
    assert memory == data[1].tobytes() + data[0].tobytes() + bytes(SIZE)


@pytest.mark.parametrize("layers", [(0, 1), (4, 5), (1, 4), (0, 5)], ids=str)
def test_a_range_of_layers_is_that_part_of_each_block(layers: tuple[int, int], connect: Connect) -> None:
    client = connect(space(1000, 5, model="layers"))
    keys, data = stored(client, 4)
    expected = data.reshape(4, 5, 1000)[:, layers[0] : layers[1]].reshape(4, -1)
    into = np.zeros_like(expected)
    fetched = client.get_into(keys, into, layers=layers)
    assert (fetched.hit_blocks, fetched.bytes) == (4, expected.size)
    np.testing.assert_array_equal(into, expected)
    single = np.zeros_like(expected[2])
    assert client.get_into(keys[2:3], [single], layers=layers).ok.all()
    np.testing.assert_array_equal(single, expected[2])


# --- the other calls ------------------------------------------------------------------------------------------------


def test_deleted_blocks_are_gone_and_can_be_put_again(client: kvstore.Client) -> None:
    keys, data = stored(client, 6)
    assert client.delete(keys[2:4]) == 2
    assert client.lookup(keys).hit.tolist() == [True, True, False, False, True, True]
    assert client.delete(keys) == 4
    assert is_absent(client, keys)
    other = np.zeros_like(data)
    assert client.put(keys, other).stored == 6
    np.testing.assert_array_equal(np.array(client.get(keys).blocks), other)


def test_pinned_blocks_outlive_everything_that_is_put_after_them(client: kvstore.Client, connect: Connect) -> None:
    keys, data = stored(client, 4)
    assert client.pin(keys) == 4
    large = connect(space(1 << 20, 2, model="flood"))
    for _ in range(20):  # 160 MiB through 128 MiB
        stored(large, 4)
    np.testing.assert_array_equal(np.array(client.get(keys).blocks), data)
    assert client.unpin(keys) == 4


def test_pin_unpin_and_prefetch_count_the_blocks_that_are_there(client: kvstore.Client) -> None:
    keys, _ = half_stored(client, 10)
    assert client.pin(keys) == client.unpin(keys) == client.unpin(keys) == client.prefetch(keys) == 5


def test_stats_tell_what_went_over_each_link(store: ServerProcess, connect: Connect, transport: str) -> None:
    client = connect(space(model="stats"))
    keys, _ = half_stored(client, 40)
    client.lookup(keys)
    client.get(keys)
    stats = client.stats()
    assert stats["namespace"] == client.namespace.digest.hex()
    links = stats["links"]
    assert [link["shard"] for link in links] == list(range(len(store.status()["shards"])))
    assert {(link["node"], link["transport"], link["up"]) for link in links} == {(store.address, transport, True)}
    totals = {name: sum(link[name] for link in links) for name in links[0] if name.endswith(("blocks", "bytes"))}
    assert totals == {
        "lookup_blocks": 40,
        "hit_blocks": 20,
        "read_blocks": 20,
        "read_bytes": 20 * SIZE,
        "segment_blocks": 0,
        "written_blocks": 20,
        "written_bytes": 20 * SIZE,
    }


def test_keys_are_those_of_the_servers_own_scheme(client: kvstore.Client) -> None:
    tokens = fresh_tokens(3)
    assert client.keys(tokens) == kvstore.chain_keys(client.namespace, tokens, scheme=client.scheme)
    assert client.keys(tokens, extra=b"salt") != client.keys(tokens)


def test_what_was_got_is_the_callers_to_change_and_outlives_the_client(connect: Connect) -> None:
    client = connect(space(100_000, 2, model="keep"))
    keys, data = stored(client, 3)
    got = client.get(keys)
    first = got.blocks[0]
    assert first is not None
    first[:] = 0
    np.testing.assert_array_equal(client.get(keys).blocks[0], data[0])  # not the store's own copy
    client.close()
    assert not first.any()
    np.testing.assert_array_equal(np.array(got.blocks[1:]), data[1:])


def test_what_was_got_stays_as_it_is_while_the_client_gets_more(connect: Connect) -> None:
    client = connect(space(100_000, 2, model="recycle"))
    keys, data = stored(client, 8)
    kept = [client.get(keys[row : row + 2]).blocks[1] for row in range(7)]
    for _ in range(10):
        client.get(keys)
    np.testing.assert_array_equal(np.array(kept), data[1:])


def test_a_closed_client_refuses_every_call_and_can_be_closed_again(client: kvstore.Client) -> None:
    keys, data = stored(client, 1)
    client.close()
    client.close()
    calls = [
        lambda: client.lookup(keys),
        lambda: client.get(keys),
        lambda: client.get_into(keys, np.empty_like(data)),
        lambda: client.view(keys),
        lambda: client.put(keys, data),
        lambda: client.delete(keys),
        lambda: client.pin(keys),
        lambda: client.unpin(keys),
        lambda: client.prefetch(keys),
    ]
    for call in calls:
        with pytest.raises(kvstore.UsageError, match=r"^the client is closed$"):
            call()
    with pytest.raises(kvstore.UsageError, match=r"^the client is closed$"):
        client.lookup(keys[:0])


def test_leaving_the_with_block_closes_the_client(store: ServerProcess) -> None:
    with kvstore.connect(store.address, namespace=space()) as client:
        keys, _ = stored(client, 1)
    with pytest.raises(kvstore.UsageError, match="closed"):
        client.get(keys)


def test_auto_takes_shared_memory_on_the_same_host(store: ServerProcess) -> None:
    with kvstore.connect(store.address, namespace=space()) as client:
        assert {link["transport"] for link in client.stats()["links"]} == {"shm"}


# --- flush ----------------------------------------------------------------------------------------------------------


def test_a_flush_removes_every_block_of_the_clients_namespace_and_of_no_other(
    client: kvstore.Client, connect: Connect
) -> None:
    client.flush()
    other = connect(space(model="another"))
    keys, _ = stored(client, 5)
    others_keys, others_data = stored(other, 5)
    assert client.flush() == 5
    assert is_absent(client, keys)
    np.testing.assert_array_equal(np.array(other.get(others_keys).blocks), others_data)
    assert client.put(keys, content(keys, client.namespace)).stored == 5
