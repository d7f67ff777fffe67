"""Plans over a real server: by the tier of its blocks, and over a link whose bandwidth is limited."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvstore
from kvstore import Action
from kvstore.core.states import Tier
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.relay import Relay
from kvstore.testing.waiting import until
from tests.client.sdk import BLOCK_TOKENS, content, fresh_keys, space, stored

NAMESPACE = space(layer_bytes=64 * 1024, layers=4)
MIB = 2**20
BLOCKS = 16  # 4 MiB
TIMEOUT_S = 10.0


@pytest.fixture
def relay(store: ServerProcess) -> Iterator[Relay]:
    with Relay(store.address, bytes_per_s=1000 * MIB) as running:
        yield running


@pytest.fixture
def client(relay: Relay) -> Iterator[kvstore.Client]:
    with kvstore.connect(relay.address, namespace=NAMESPACE, transport="tcp", timeout_s=TIMEOUT_S) as connected:
        yield connected


def planned(client: kvstore.Client, keys: kvstore.BlockKeys, *, overlap: bool = False) -> kvstore.FetchPlan:
    plan = client.lookup(keys, plan=True, prompt_tokens=len(keys) * BLOCK_TOKENS * 2, overlap=overlap).plan
    assert plan is not None
    return plan


def fetch(client: kvstore.Client, keys: kvstore.BlockKeys) -> None:
    into = np.empty((len(keys), NAMESPACE.block_bytes), dtype=np.uint8)
    assert client.get_into(keys, into).ok.all()
    assert np.array_equal(into, content(keys, NAMESPACE))


def stream(client: kvstore.Client, keys: kvstore.BlockKeys) -> None:
    into = np.empty((len(keys), NAMESPACE.block_bytes), dtype=np.uint8)
    with client.layer_stream(keys, into) as layers:
        assert layers.wait(NAMESPACE.layers - 1).all()
    assert np.array_equal(into, content(keys, NAMESPACE))


@pytest.mark.parametrize("fetch", [fetch, stream])
def test_a_slow_link_makes_it_decline_and_a_fast_one_fetch(
    relay: Relay, client: kvstore.Client, fetch: Callable[[kvstore.Client, kvstore.BlockKeys], None]
) -> None:
    keys, _ = stored(client, BLOCKS)
    assert planned(client, keys).action == Action.FETCH  # nothing is known yet
    client.observe_compute(BLOCKS * BLOCK_TOKENS, 0.5)
    relay.bytes_per_s = 4 * MIB  # 1 s for all of it, 0.5 s to compute it
    fetch(client, keys)
    slow = planned(client, keys)
    assert (slow.action, slow.fetch_blocks) == (Action.RECOMPUTE, 0)
    assert slow.recompute_s == pytest.approx(1.0)
    hidden = planned(client, keys, overlap=True)
    assert 0 < hidden.fetch_blocks < BLOCKS
    assert hidden.hidden_s > hidden.fetch_s / 2
    relay.bytes_per_s = 1000 * MIB
    for _ in range(8):
        fetch(client, keys)
    fast = planned(client, keys)
    assert (fast.action, fast.fetch_blocks) == (Action.FETCH, BLOCKS)
    assert fast.fetch_s < 0.5


def test_a_client_that_is_told_of_anothers_slow_fetch_declines_as_that_one_would(client: kvstore.Client) -> None:
    keys, _ = stored(client, BLOCKS)
    client.observe_compute(BLOCKS * BLOCK_TOKENS, 0.5)
    client.observe_fetch(keys, 2.0)
    plan = planned(client, keys)
    assert (plan.action, plan.fetch_blocks) == (Action.RECOMPUTE, 0)
    with pytest.raises(kvstore.UsageError, match="seconds=0: allowed is above 0"):
        client.observe_fetch(keys, 0)


def test_a_fetch_that_runs_out_of_time_counts_as_slow(relay: Relay) -> None:
    with kvstore.connect(relay.address, namespace=NAMESPACE, transport="tcp", timeout_s=0.5) as client:
        keys, _ = stored(client, BLOCKS)
        client.observe_compute(BLOCKS * BLOCK_TOKENS, 0.1)
        relay.stall_after(MIB)
        into = np.empty((BLOCKS, NAMESPACE.block_bytes), dtype=np.uint8)
        assert not client.get_into(keys, into).ok.any()
        assert relay.stalled
        relay.resume()
        until(lambda: client.lookup(keys).hit_blocks == BLOCKS, what="a link again")
        assert planned(client, keys).action == Action.RECOMPUTE


def test_a_link_that_is_cut_reads_as_misses_and_comes_back(relay: Relay, client: kvstore.Client) -> None:
    keys, _ = stored(client, 2)
    relay.cut()
    until(lambda: client.lookup(keys).hit_blocks == 2, what="a link again")
    fetch(client, keys)


def test_what_a_relay_carries_takes_as_long_as_its_limit_says(relay: Relay, client: kvstore.Client) -> None:
    """Not faster: that is what it is for. How much slower, a busy machine decides."""
    keys, _ = stored(client, BLOCKS)
    relay.bytes_per_s = 16 * MIB
    client.get_into(keys, np.empty((BLOCKS, NAMESPACE.block_bytes), dtype=np.uint8))
    client.observe_compute(1, 1.0)
    assert planned(client, keys).fetch_s >= BLOCKS * NAMESPACE.block_bytes / (16 * MIB) * 0.95


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_stream_that_waited_for_its_writer_says_nothing_about_the_link(store: ServerProcess, transport: str) -> None:
    with kvstore.connect(store.address, namespace=NAMESPACE, transport=transport, timeout_s=TIMEOUT_S) as client:
        keys = fresh_keys(client, 2)
        data = content(keys, NAMESPACE).reshape(2, NAMESPACE.layers, -1)
        with client.publish_stream(keys) as writing, client.layer_stream(keys, np.empty_like(data)) as reading:
            for layer in range(NAMESPACE.layers):
                assert not reading.ready(layer)
                until(lambda: reading._parts[0].waited, what="the wait")  # pyright: ignore[reportPrivateUsage]
                writing.write(layer, data[:, layer].copy())
            assert writing.commit().stored == 2
            assert reading.wait(NAMESPACE.layers - 1).all()
        client.observe_compute(1000, 1.0)
        assert "nothing has come" in planned(client, keys).why


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_lookup_tells_which_blocks_are_on_the_ssd_and_a_plan_counts_them_apart(transport: str) -> None:
    with (
        ServerProcess(dram="32MiB", disk="256MiB", admission="always") as server,
        kvstore.connect(server.address, namespace=NAMESPACE, transport=transport, timeout_s=TIMEOUT_S) as client,
    ):
        keys, _ = stored(client, BLOCKS)
        assert (client.lookup(keys).tiers == Tier.DRAM).all()

        def demoted() -> bool:
            others = fresh_keys(client, BLOCKS)
            client.put(others, content(others, NAMESPACE))
            found = client.lookup(keys)
            return found.hit_blocks == BLOCKS and bool((found.tiers == Tier.DISK).all())

        until(demoted, 30.0, "all blocks on the SSD")
        client.observe_compute(1000, 1.0)
        assert f"over {transport} from DISK" in planned(client, keys).why
        fetch(client, keys)
        assert (client.lookup(keys).tiers == Tier.DRAM).all()
        assert f"over {transport} from DRAM" in planned(client, keys).why  # what came from the SSD says nothing of it
