"""Several shards and several servers behind one client: who holds what, and what is left when one is gone."""

import socket
from collections.abc import Iterator

import numpy as np
import pytest

import kvstore
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.wire.control import ControlClient
from tests.client.conftest import TIMEOUT_S, Connect
from tests.client.sdk import content, fresh_keys, is_absent, one_line, space, stored

SEED = 1234


@pytest.fixture(scope="module")
def stores() -> Iterator[list[ServerProcess]]:
    """Two servers, one with two shards, that make the same keys."""
    with (
        ServerProcess(dram="64MiB", key_seed=SEED) as first,
        ServerProcess(dram="64MiB", shards=2, key_seed=SEED) as second,
    ):
        yield [first, second]


@pytest.fixture(scope="module")
def store(stores: list[ServerProcess]) -> ServerProcess:
    return stores[0]


@pytest.fixture
def both(stores: list[ServerProcess], connect: Connect) -> kvstore.Client:
    """A client of both servers."""
    return connect(space(), address=[store.address for store in stores])


def held_by(store: ServerProcess, keys: kvstore.BlockKeys) -> list[int]:
    """Rows of the keys that this server has, whoever asks."""
    with ControlClient(store.address, timeout_s=TIMEOUT_S) as control:
        return [row for row, block in enumerate(control.query(keys)) if block.state]


def test_blocks_are_spread_over_all_shards_and_come_back_in_order(both: kvstore.Client) -> None:
    keys, data = stored(both, 200)
    np.testing.assert_array_equal(np.array(both.get(keys).blocks), data)
    into = np.zeros_like(data)
    assert both.get_into(keys, into).hit_blocks == both.lookup(keys).hit_blocks == 200
    np.testing.assert_array_equal(into, data)
    with both.view(keys) as view:
        assert view.hit_blocks == 200
        np.testing.assert_array_equal(np.array([view[row] for row in range(200)]), data)
    written = [link["written_blocks"] for link in both.stats()["links"]]
    assert sum(written) == 200
    assert 70 < written[0] < 130  # half of them; its fellow's two shards share the rest
    assert min(written[1:]) > 20
    assert both.pin(keys) == both.unpin(keys) == both.prefetch(keys) == both.delete(keys) == 200
    assert is_absent(both, keys)


def test_all_clients_place_blocks_alike_in_whatever_order_they_name_the_servers(
    stores: list[ServerProcess], both: kvstore.Client, connect: Connect
) -> None:
    keys, data = stored(both, 100)
    addresses = [store.address for store in stores]
    for address in (addresses[::-1], ",".join(addresses), " , ".join(addresses[::-1]), [f"{a}=1" for a in addresses]):
        other = connect(space(), address=address)
        assert other.put(keys, np.zeros_like(data)).present == 100
        np.testing.assert_array_equal(np.array(other.get(keys).blocks), data)
        other.close()


def test_each_block_is_on_exactly_one_server(stores: list[ServerProcess], both: kvstore.Client) -> None:
    keys, data = stored(both, 100)
    both.put(keys, data)
    assert sorted(held_by(stores[0], keys) + held_by(stores[1], keys)) == list(range(100))


@pytest.mark.parametrize("weight", [3.0, 0.25])
def test_a_server_gets_its_share_of_the_weights(weight: float, stores: list[ServerProcess], connect: Connect) -> None:
    client = connect(
        space(64, 1, model=f"weight {weight}"), address=[f"{stores[0].address}={weight}", stores[1].address]
    )
    keys, _ = stored(client, 2000)
    on_first = client.stats()["links"][0]["written_blocks"]
    assert on_first / 2000 == pytest.approx(weight / (1 + weight), abs=0.05)
    client.delete(keys)


def test_servers_that_make_different_keys_are_not_used_together(stores: list[ServerProcess]) -> None:
    with (
        ServerProcess(dram="64MiB", key_seed=SEED + 1) as stranger,
        one_line(kvstore.ProtocolError, stores[0].address, stranger.address, "--key-seed"),
    ):
        kvstore.connect([stores[0].address, stranger.address], namespace=space())


def test_a_server_that_is_not_there_only_shortens_the_hit(stores: list[ServerProcess], transport: str) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        addresses = [stores[0].address, f"127.0.0.1:{unheard.getsockname()[1]}"]
        with kvstore.connect(addresses, namespace=space(), transport=transport, timeout_s=TIMEOUT_S) as client:
            keys = fresh_keys(client, 60)
            data = content(keys, client.namespace)
            put = client.put(keys, data)
            here = put.statuses == kvstore.PutStatus.STORED
            assert put.statuses[~here].tolist() == [kvstore.PutStatus.FAILED] * int((~here).sum())
            assert 10 < put.stored < 50
            got = client.get(keys)
            assert got.ok.tolist() == here.tolist()
            assert got.hit_blocks == client.lookup(keys).hit_blocks == int(np.argmin(here))
            assert {(link["node"], link["up"]) for link in client.stats()["links"]} == {(addresses[0], True)}


def test_a_shard_that_dies_only_shortens_the_hit_and_is_used_again_when_it_is_back() -> None:
    with (
        ServerProcess(dram="64MiB", shards=2) as store,
        kvstore.connect(store.address, namespace=space(), transport="tcp") as client,
    ):
        keys, data = stored(client, 60)
        on_first = client.stats()["links"][0]["written_blocks"]
        store.kill_shard(0)
        until(lambda: not client.lookup(keys).hit.all(), what="the loss being noticed")
        got = client.get(keys)
        assert int(got.ok.sum()) == 60 - on_first
        for row in np.flatnonzero(got.ok).tolist():
            np.testing.assert_array_equal(got.blocks[row], data[row])
        until(lambda: client.put(keys, data).present == 60, what="the shard's successor")
        np.testing.assert_array_equal(np.array(client.get(keys).blocks), data)
        assert [link["up"] for link in client.stats()["links"]] == [True, True]
