"""Blocks of every size, and namespaces that share one server without seeing one another."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import kvstore
from kvstore import NamespaceMismatch
from kvstore.testing.cluster import ServerProcess
from kvstore.transport.trailer import slot_payload_bytes
from tests.client.conftest import Connect
from tests.client.sdk import content, fresh_keys, fresh_tokens, is_absent, one_line, space, stored

CHUNK = 8 << 20  # of 64 MiB: the largest slot


@pytest.fixture(scope="module")
def store() -> Iterator[ServerProcess]:
    """A small server, whose limits are soon reached."""
    with ServerProcess(dram="64MiB", watermark=0) as server:
        yield server


def round_trip(client: kvstore.Client, blocks: int) -> None:
    """Put, get, get_into, view and a range of layers, compared byte for byte."""
    keys, data = stored(client, blocks)
    np.testing.assert_array_equal(np.array(client.get(keys).blocks), data)
    into = np.zeros_like(data)
    assert client.get_into(keys, into).hit_blocks == blocks
    np.testing.assert_array_equal(into, data)
    with client.view(keys) as view:
        np.testing.assert_array_equal(np.array([view[row] for row in range(blocks)]), data)
    last = client.namespace.layers - 1
    layer = np.zeros((blocks, client.namespace.layer_bytes), dtype=np.uint8)
    assert client.get_into(keys, layer, layers=(last, last + 1)).hit_blocks == blocks
    np.testing.assert_array_equal(layer, data[:, last * client.namespace.layer_bytes :])
    assert client.delete(keys) == blocks


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("layer_bytes", [1, 2, 7, 63, 4095, 4097, 100_001, 64 << 10, (1 << 20) + 1])
def test_blocks_of_this_size_make_the_round_trip(layer_bytes: int, layers: int, connect: Connect) -> None:
    client = connect(space(layer_bytes, layers, model="sizes"))
    round_trip(client, 1)
    round_trip(client, 7 if layer_bytes < 1 << 20 else 3)


def test_the_largest_block_fits_the_largest_slot_with_its_checksums(connect: Connect) -> None:
    layers = 4
    layer_bytes = CHUNK // layers
    while slot_payload_bytes(layer_bytes * layers, layers) > CHUNK:
        layer_bytes -= 1
    client = connect(space(layer_bytes, layers, model="largest"))
    round_trip(client, 2)
    with one_line(kvstore.BlockTooLarge, str((layer_bytes + 1) * layers), str(CHUNK), "--chunk"):
        connect(space(layer_bytes + 1, layers, model="larger"))


def test_a_block_of_many_times_the_pool_is_refused_at_connect(connect: Connect) -> None:
    with one_line(kvstore.BlockTooLarge, str(1 << 40), str(CHUNK)):
        connect(space(1 << 30, 1 << 10, model="huge"))


def test_thousands_of_layers_make_the_round_trip(connect: Connect) -> None:
    round_trip(connect(space(3, 3000, model="deep")), 40)


def test_a_batch_larger_than_the_pool_stores_what_there_is_room_for(connect: Connect) -> None:
    client = connect(space(1 << 20, 4, model="flood"))
    keys = fresh_keys(client, 20)  # 80 MiB into 64 MiB
    block = content(keys[:1], client.namespace)[0]
    put = client.put(keys, [block] * 20)
    assert 0 < put.stored < 20
    assert put.statuses[put.stored :].tolist() == [kvstore.PutStatus.NO_ROOM] * (20 - put.stored)
    got = client.get(keys)
    assert got.hit_blocks == int(got.ok.sum()) == put.stored
    assert all(np.array_equal(got_block, block) for got_block in got.blocks[: put.stored] if got_block is not None)
    client.delete(keys)


# --- namespaces


def test_the_same_tokens_in_two_namespaces_are_two_prompts(connect: Connect) -> None:
    ours, theirs = connect(space(model="ours")), connect(space(model="theirs"))
    tokens = fresh_tokens(5)
    keys, other_keys = ours.keys(tokens), theirs.keys(tokens)
    data, other = content(keys, ours.namespace), content(other_keys, theirs.namespace)
    assert ours.put(keys, data).stored == 5
    assert is_absent(theirs, other_keys)
    assert theirs.get(other_keys).hit_blocks == 0
    assert theirs.put(other_keys, other).stored == 5
    np.testing.assert_array_equal(np.array(ours.get(keys).blocks), data)
    np.testing.assert_array_equal(np.array(theirs.get(other_keys).blocks), other)
    assert ours.delete(keys) == 5
    np.testing.assert_array_equal(np.array(theirs.get(other_keys).blocks), other)


def test_namespaces_of_different_block_sizes_share_the_pool(connect: Connect) -> None:
    clients = [connect(space(size, 2, model=f"mixed {size}")) for size in (1, 5000, 70_000, 1 << 20)]
    prompts = [stored(client, 4) for client in clients]
    for client, (keys, data) in zip(clients, prompts, strict=True):
        np.testing.assert_array_equal(np.array(client.get(keys).blocks), data)


@pytest.mark.parametrize("same_size", [True, False], ids=["of-the-same-size", "of-another-size"])
def test_keys_of_another_namespace_read_as_misses(same_size: bool, connect: Connect) -> None:
    owner, stranger = connect(space(model="owner")), connect(space(4096 if same_size else 100, model="stranger"))
    keys, data = stored(owner, 4)
    size = stranger.namespace.block_bytes
    assert is_absent(stranger, keys)
    assert stranger.get(keys).blocks == [None] * 4
    assert stranger.get(keys[:1]).blocks == [None]
    assert not stranger.get_into(keys, np.empty((4, size), dtype=np.uint8)).ok.any()
    with stranger.view(keys) as view:
        assert not view.ok.any()
    np.testing.assert_array_equal(np.array(owner.get(keys).blocks), data)


def test_a_put_under_keys_of_another_namespace_is_refused_whole_and_names_it(connect: Connect) -> None:
    owner, stranger = connect(space(model="acme/owner")), connect(space(model="stranger"))
    keys, data = stored(owner, 2)
    fresh = fresh_keys(stranger, 3)
    mixed = kvstore.BlockKeys.concat(fresh, keys)
    with one_line(NamespaceMismatch, owner.namespace.digest.hex(), "acme/owner@1", "key 3"):
        stranger.put(mixed, content(mixed, stranger.namespace))
    assert is_absent(stranger, fresh)
    np.testing.assert_array_equal(np.array(owner.get(keys).blocks), data)
    assert stranger.put(fresh, content(fresh, stranger.namespace)).stored == 3  # the client goes on


@pytest.mark.parametrize("layer_bytes", [4095, 8192])
def test_a_namespace_that_is_announced_with_another_geometry_is_refused(
    layer_bytes: int, store: ServerProcess, connect: Connect
) -> None:
    namespace = space(model="geometry")
    keys, data = stored(connect(namespace), 2)
    liar = replace(namespace, layout=replace(namespace.layout, layer_bytes_per_block=layer_bytes))
    object.__setattr__(liar, "digest", namespace.digest)  # a client with a bug in its digest
    with one_line(NamespaceMismatch, namespace.digest.hex(), "2 layers x 4096 bytes", f"2 x {layer_bytes}"):
        connect(liar)
    np.testing.assert_array_equal(np.array(connect(namespace).get(keys).blocks), data)
