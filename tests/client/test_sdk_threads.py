"""One client in the hands of many threads, and of a forked process."""

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvstore
from kvstore import PutStatus
from kvstore.testing.cluster import ServerProcess
from tests.client.sdk import content, fresh_keys, stored

THREADS = 8
ROUNDS = 12


def together(work: Callable[[int], None]) -> None:
    """Run this in eight threads that begin at the same moment; the first failure is raised."""
    gate = threading.Barrier(THREADS)

    def begin(number: int) -> None:
        gate.wait(timeout=30)
        work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(begin, number) for number in range(THREADS)]:
            future.result(timeout=60)


def test_eight_threads_each_get_back_what_they_put(client: kvstore.Client) -> None:
    prompts = [[fresh_keys(client, 1 + (number + turn) % 7) for turn in range(ROUNDS)] for number in range(THREADS)]

    def work(number: int) -> None:
        for keys in prompts[number]:
            data = content(keys, client.namespace)
            assert client.put(keys, data).stored == len(keys)
            assert client.lookup(keys).hit_blocks == len(keys)
            np.testing.assert_array_equal(np.array(client.get(keys).blocks), data)
            into = np.zeros_like(data)
            assert client.get_into(keys, into).hit_blocks == len(keys)
            np.testing.assert_array_equal(into, data)
            with client.view(keys) as view:
                np.testing.assert_array_equal(np.array([view[row] for row in range(len(keys))]), data)
            assert client.delete(keys) == len(keys)

    together(work)


def test_eight_threads_on_the_same_keys_read_whole_blocks_or_misses(client: kvstore.Client) -> None:
    keys = fresh_keys(client, 12)
    data = content(keys, client.namespace)

    def work(number: int) -> None:
        for turn in range(ROUNDS):
            if number < 3:
                # FAILED: it was deleted while it was being written.
                assert PutStatus.NO_ROOM not in client.put(keys, data).statuses.tolist()
            elif number == 3 and turn % 3 == 0:
                client.delete(keys)
            got = client.get(keys)
            for row in np.flatnonzero(got.ok).tolist():
                np.testing.assert_array_equal(got.blocks[row], data[row])

    together(work)


def test_of_eight_threads_that_put_one_prompt_one_writes_each_block(client: kvstore.Client) -> None:
    keys = fresh_keys(client, 40)
    data = content(keys, client.namespace)
    puts: list[kvstore.PutResult] = []
    together(lambda number: puts.append(client.put(keys, data)))
    statuses = np.array([put.statuses for put in puts])
    assert (np.count_nonzero(statuses == PutStatus.STORED, axis=0) == 1).all()
    assert np.isin(statuses, (PutStatus.STORED, PutStatus.EXISTS, PutStatus.PENDING)).all()
    np.testing.assert_array_equal(np.array(client.get(keys).blocks), data)


def test_closing_while_others_call_ends_their_calls_with_a_miss_or_one_clear_line(client: kvstore.Client) -> None:
    keys, data = stored(client, 30)

    def read_on() -> None:
        while True:
            got = client.get(keys)
            for row in np.flatnonzero(got.ok).tolist():
                np.testing.assert_array_equal(got.blocks[row], data[row])

    def work(number: int) -> None:
        if number == 0:
            client.get(keys)
            client.close()
            return
        with pytest.raises(kvstore.UsageError, match=r"^the client is closed$"):
            read_on()

    together(work)


def read_in_child(
    client: kvstore.Client, keys: kvstore.BlockKeys, answers: "multiprocessing.SimpleQueue[bytes]"
) -> None:
    answers.put(b"".join(b"-" if block is None else block.tobytes() for block in client.get(keys).blocks))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_connections_of_its_own(store: ServerProcess, client: kvstore.Client) -> None:
    keys, data = stored(client, 5)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=read_in_child, args=(client, keys, answers))
    child.start()
    assert answers.get() == data.tobytes()
    child.join(timeout=30)
    assert child.exitcode == 0
    np.testing.assert_array_equal(np.array(client.get(keys).blocks), data)  # the parent's own still work
