"""The SDK for asyncio: the same client, its calls on threads of its own. One implementation stands behind both.

Calls release the GIL while they copy or wait, so the event loop goes on. A call whose task is cancelled goes on in its
thread, for its timeout at most: until then its memory (`into`, `blocks`) must be left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from kvstore.client.client import Client, View, connect
from kvstore.client.results import Fetched, GetResult, Lookup, PutResult
from kvstore.core.keys import BlockKeys, Extra, KeyScheme, TokenIds
from kvstore.core.namespace import Namespace
from kvstore.device.base import Device
from kvstore.transport.buffers import RegisteredBuffer

P = ParamSpec("P")
R = TypeVar("R")

THREADS = 8  # calls under way at the same time; more wait in line


async def connect_async(
    address: str | Sequence[str] = "local",
    *,
    namespace: Namespace,
    timeout_s: float = 2.0,
    transport: str = "auto",
    checksums: bool = False,
    auth_token: str | None = None,
    device: str | Device | None = None,
) -> AsyncClient:
    """As `kvstore.connect`, for asyncio."""
    client = await asyncio.to_thread(
        connect,
        address,
        namespace=namespace,
        timeout_s=timeout_s,
        transport=transport,
        checksums=checksums,
        auth_token=auth_token,
        device=device,
    )
    return AsyncClient(client)


class AsyncClient:
    """The methods of `Client`, awaitable; arguments, answers and errors are the same. An async context manager."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # None once closed: asyncio then takes a thread of its own for the call, which says that the client is closed.
        self._threads: ThreadPoolExecutor | None = ThreadPoolExecutor(THREADS, thread_name_prefix="kvstore-async")

    @property
    def namespace(self) -> Namespace:
        """Whose blocks these are."""
        return self._client.namespace

    @property
    def scheme(self) -> KeyScheme:
        """How this store makes keys."""
        return self._client.scheme

    def keys(self, token_ids: TokenIds, *, extra: Extra | None = None, after: BlockKeys | None = None) -> BlockKeys:
        """Keys of the full blocks of a token sequence. Pure computation, not awaitable."""
        return self._client.keys(token_ids, extra=extra, after=after)

    def register(self, buffer: object) -> RegisteredBuffer:
        """As `Client.register`. Not awaitable."""
        return self._client.register(buffer)

    def stats(self) -> dict[str, Any]:
        """As `Client.stats`. Not awaitable."""
        return self._client.stats()

    async def lookup(
        self, keys: BlockKeys, *, plan: bool = False, prompt_tokens: int | None = None, overlap: bool = True
    ) -> Lookup:
        """As `Client.lookup`."""
        return await self._call(self._client.lookup, keys, plan=plan, prompt_tokens=prompt_tokens, overlap=overlap)

    def observe_fetch(self, keys: BlockKeys, seconds: float) -> None:
        """As `Client.observe_fetch`."""
        self._client.observe_fetch(keys, seconds)

    def observe_compute(self, tokens: int, seconds: float) -> None:
        """As `Client.observe_compute`. Not awaitable."""
        self._client.observe_compute(tokens, seconds)

    async def get(self, keys: BlockKeys) -> GetResult:
        """As `Client.get`."""
        return await self._call(self._client.get, keys)

    async def get_into(
        self, keys: BlockKeys, into: object, *, offsets: object = None, layers: tuple[int, int] | None = None
    ) -> Fetched:
        """As `Client.get_into`."""
        return await self._call(self._client.get_into, keys, into, offsets=offsets, layers=layers)

    async def view(self, keys: BlockKeys, *, ttl_s: float = 10.0) -> AsyncView:
        """As `Client.view`; use it in an `async with` block."""
        return AsyncView(await self._call(self._client.view, keys, ttl_s=ttl_s), self._call)

    async def put(self, keys: BlockKeys, blocks: object, *, offsets: object = None) -> PutResult:
        """As `Client.put`."""
        return await self._call(self._client.put, keys, blocks, offsets=offsets)

    async def prefetch(self, keys: BlockKeys) -> int:
        """As `Client.prefetch`."""
        return await self._call(self._client.prefetch, keys)

    async def delete(self, keys: BlockKeys) -> int:
        """As `Client.delete`."""
        return await self._call(self._client.delete, keys)

    async def flush(self) -> int:
        """As `Client.flush`."""
        return await self._call(self._client.flush)

    async def pin(self, keys: BlockKeys) -> int:
        """As `Client.pin`."""
        return await self._call(self._client.pin, keys)

    async def unpin(self, keys: BlockKeys) -> int:
        """As `Client.unpin`."""
        return await self._call(self._client.unpin, keys)

    async def close(self) -> None:
        """As `Client.close`."""
        threads, self._threads = self._threads, None
        await asyncio.to_thread(self._client.close)
        if threads is not None:
            threads.shutdown(wait=False)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))


class AsyncView:
    """A `View` whose end is awaited. Its blocks are read without waiting."""

    def __init__(self, view: View, call: Callable[..., Any]) -> None:
        self.view = view
        self._call = call

    async def __aenter__(self) -> View:
        return self.view

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._call(self.view.__exit__, kind, error, trace)
