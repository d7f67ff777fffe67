"""The asynchronous client answers as the synchronous one does, many calls at a time, and survives cancelled ones."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import numpy as np
import pytest

import kvstore
from kvstore.testing.cluster import ServerProcess
from tests.client.conftest import TIMEOUT_S
from tests.client.sdk import content, fresh_keys, fresh_tokens, one_line, space, stored

Reach = Callable[[], AbstractAsyncContextManager[kvstore.AsyncClient]]


@pytest.fixture
def reach(store: ServerProcess, transport: str) -> Reach:
    """Connects to the server over the transport of the day."""

    @asynccontextmanager
    async def connected() -> AsyncIterator[kvstore.AsyncClient]:
        async with await kvstore.connect_async(
            store.address, namespace=space(), transport=transport, timeout_s=TIMEOUT_S
        ) as client:
            yield client

    return connected


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine to its end, a minute at most."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


def test_keys_and_what_they_are_made_of_are_the_same(client: kvstore.Client, reach: Reach) -> None:
    async def main() -> None:
        async with reach() as other:
            assert (other.namespace, other.scheme) == (client.namespace, client.scheme)
            tokens = fresh_tokens(3)
            assert other.keys(tokens, extra=b"salt") == client.keys(tokens, extra=b"salt") != client.keys(tokens)

    run(main)


def test_a_lookup_plans_by_what_its_client_was_told_and_has_fetched(client: kvstore.Client, reach: Reach) -> None:
    async def main() -> None:
        async with reach() as other:
            keys, data = stored(client, 6)
            first = (await other.lookup(keys, plan=True)).plan
            assert first is not None
            assert (first.action, first.fetch_blocks) == (kvstore.Action.FETCH, 6)
            await other.get_into(keys, np.empty_like(data))
            other.observe_compute(1, 1e-12)
            second = (await other.lookup(keys, plan=True, prompt_tokens=1000, overlap=False)).plan
            assert second is not None
            assert (second.action, second.hidden_s) == (kvstore.Action.RECOMPUTE, 0.0)

    run(main)


def test_every_call_answers_as_the_synchronous_client_does(client: kvstore.Client, reach: Reach) -> None:
    async def main() -> None:
        async with reach() as other:
            keys = fresh_keys(client, 6)
            data = content(keys, client.namespace)
            first = await other.put(keys[:4], data[:4])
            assert (first.stored, first.present, first.bytes) == (4, 4, data[:4].nbytes)
            assert (await other.put(keys[:4], data[:4])).statuses.tolist() == client.put(
                keys[:4], data[:4]
            ).statuses.tolist()
            mine, theirs = await other.lookup(keys), client.lookup(keys)
            assert (mine.hit_blocks, mine.hit_tokens) == (theirs.hit_blocks, theirs.hit_tokens) == (4, 16)
            assert mine.states.tolist() == theirs.states.tolist()
            assert mine.layers_ready.tolist() == theirs.layers_ready.tolist()
            got = await other.get(keys)
            assert got.ok.tolist() == client.get(keys).ok.tolist()
            assert got.blocks[4:] == [None, None]
            np.testing.assert_array_equal(np.array(got.blocks[:4]), data[:4])
            layer = np.zeros((6, 4096), dtype=np.uint8)
            assert (await other.get_into(keys, layer, layers=(1, 2))).hit_blocks == 4
            np.testing.assert_array_equal(layer[:4], data[:4, 4096:])
            assert await other.pin(keys) == client.pin(keys) == 4
            assert await other.unpin(keys) == client.unpin(keys) == 4
            assert await other.prefetch(keys) == client.prefetch(keys) == 4
            assert await other.delete(keys[:1]) == client.delete(keys[1:2]) == 1
            assert other.stats().keys() == client.stats().keys()
            assert [link["written_blocks"] for link in other.stats()["links"]] == [4]

    run(main)


def test_registered_buffers_and_views_are_the_same(client: kvstore.Client, reach: Reach) -> None:
    keys, data = stored(client, 3)

    async def main() -> None:
        async with reach() as other:
            memory = np.zeros((4, data.shape[1]), dtype=np.uint8)
            registered = other.register(memory)
            offsets = np.array([3, 0, 2]) * data.shape[1]
            assert (await other.get_into(keys, registered, offsets=offsets)).hit_blocks == 3
            np.testing.assert_array_equal(memory[[3, 0, 2]], data)
            fresh = fresh_keys(other, 3)
            assert (await other.put(fresh, registered, offsets=offsets)).stored == 3
            async with await other.view(kvstore.BlockKeys.concat(fresh, keys), ttl_s=5) as view:
                assert view.hit_blocks == 6
                np.testing.assert_array_equal(np.array([view[row] for row in range(6)]), np.concatenate([data, data]))
            with one_line(kvstore.UsageError, "the view is closed"):
                view[0]

    run(main)


def test_wrong_input_is_the_same_clear_line(reach: Reach) -> None:
    async def main() -> None:
        async with reach() as other:
            keys = fresh_keys(other, 2)
            with one_line(kvstore.LayoutMismatch, "2 keys"):
                await other.put(keys, b"short")
            with one_line(kvstore.UsageError, "ttl_s=0"):
                await other.view(keys, ttl_s=0)
            with one_line(kvstore.UsageError, "layers=(2, 1)"):
                await other.get_into(keys, bytearray(8), layers=(2, 1))
            assert (await other.lookup(keys)).hit_blocks == 0
        with one_line(kvstore.ConfigError, "transport='pigeon'"):
            await kvstore.connect_async("local", namespace=space(), transport="pigeon")

    run(main)


def test_a_closed_client_refuses_every_call_with_the_same_clear_line(reach: Reach, transport: str) -> None:
    async def main() -> None:
        async with reach() as other:
            keys = fresh_keys(other, 1)
            view = await other.view(keys)
        await other.close()  # again
        for call in (other.lookup, other.get, other.view, other.delete, other.pin, other.unpin, other.prefetch):
            with one_line(kvstore.UsageError, "the client is closed"):
                await call(keys)
        if transport == "shm":
            with one_line(kvstore.LeaseExpired, "ran out"):
                async with view:
                    pass

    run(main)


def test_a_hundred_calls_at_once_each_get_their_own_answer(reach: Reach) -> None:
    async def main() -> None:
        async with reach() as other:
            prompts = [fresh_keys(other, 1 + number % 5) for number in range(100)]
            data = [content(keys, other.namespace) for keys in prompts]
            puts = await asyncio.gather(*map(other.put, prompts, data))
            assert [put.stored for put in puts] == [len(keys) for keys in prompts]
            gets = await asyncio.gather(*map(other.get, prompts))
            for got, expected in zip(gets, data, strict=True):
                np.testing.assert_array_equal(np.array(got.blocks), expected)

    run(main)


def test_a_cancelled_call_breaks_neither_the_client_nor_the_other_calls(reach: Reach) -> None:
    async def main() -> None:
        async with reach() as other:
            keys = fresh_keys(other, 50)
            data = content(keys, other.namespace)
            await other.put(keys, data)
            tasks = [asyncio.ensure_future(other.get(keys)) for _ in range(40)]
            await asyncio.sleep(0)  # they have begun, more than are under way at the same time
            for task in tasks[::2]:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(answer, asyncio.CancelledError) for answer in ended[::2])
            for answer in ended[1::2]:
                assert isinstance(answer, kvstore.GetResult)
                np.testing.assert_array_equal(np.array(answer.blocks), data)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await other.get(keys)
            np.testing.assert_array_equal(np.array((await other.get(keys)).blocks), data)
            assert all(link["up"] for link in other.stats()["links"])

    run(main)


def test_a_put_whose_task_was_cancelled_is_either_whole_or_not_there(reach: Reach) -> None:
    async def main() -> None:
        async with reach() as other:
            prompts = [fresh_keys(other, 20) for _ in range(20)]
            tasks = [asyncio.ensure_future(other.put(keys, content(keys, other.namespace))) for keys in prompts]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for keys in prompts:  # put again: what is there by then is right
                put = await other.put(keys, content(keys, other.namespace))
                while put.present < len(keys):  # the cancelled call is still writing
                    put = await other.put(keys, content(keys, other.namespace))
                got = await other.get(keys)
                np.testing.assert_array_equal(np.array(got.blocks), content(keys, other.namespace))

    run(main)


def test_the_event_loop_goes_on_while_a_call_is_under_way(client: kvstore.Client, reach: Reach) -> None:
    keys, _ = stored(client, 1000)

    async def main() -> None:
        async with reach() as other:
            turns = 0
            while turns < 10:  # in one call, sooner or later; a call that blocks the loop lets it turn twice
                waiting = asyncio.ensure_future(other.get(keys))
                turns = 0
                while not waiting.done():
                    await asyncio.sleep(0)
                    turns += 1
                assert (await waiting).hit_blocks == 1000

    run(main)
