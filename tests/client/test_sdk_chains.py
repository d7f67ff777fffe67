"""The eviction policy hears of each request for reading once, whatever calls it consists of and whatever carries it."""

import time

import numpy as np

import kvstore
from kvstore.testing.cluster import ServerProcess
from tests.client.sdk import content, fresh_keys, stored


def noted(server: ServerProcess) -> int:
    return server.status()["shards"][0]["counters"]["noted_requests"]


def test_a_lookup_a_get_and_a_put_of_the_rest_are_one_request_and_told_before_the_put_ends(
    store: ServerProcess, client: kvstore.Client
) -> None:
    keys = fresh_keys(client, 6)
    data = content(keys, client.namespace)
    client.put(keys[:4], data[:4])
    before = noted(store)
    hits = client.lookup(keys).hit_blocks
    client.get(keys[:hits])
    client.put(keys, data)
    assert noted(store) == before + 1


def test_the_same_prompt_again_is_another_request(store: ServerProcess, client: kvstore.Client) -> None:
    keys, data = stored(client, 3)
    before = noted(store)
    for _ in range(3):
        client.get(keys)
        client.put(keys, data)
    assert noted(store) == before + 3


def test_who_only_reads_is_heard_of_soon(store: ServerProcess, client: kvstore.Client) -> None:
    keys, _ = stored(client, 3)
    before = noted(store)
    client.get_into(keys, np.zeros((3, client.namespace.block_bytes), dtype=np.uint8))
    with client.view(keys[:2]):
        pass
    client.lookup(fresh_keys(client, 2))
    deadline_s = time.monotonic() + 10
    while noted(store) < before + 2 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert noted(store) == before + 2
