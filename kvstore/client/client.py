"""The SDK's client: which shard, which link, what counts as a miss.

A fault of the store never ends or hangs an engine: every call is bounded by its timeout, and whatever can't be
reached by then is a miss (or a put that FAILED). Only wrong input raises.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvstore.client.arena import ArenaPool
from kvstore.client.crew import Crew
from kvstore.client.landing import Landing
from kvstore.client.layer_memory import Shape, device_layers, layer_memory
from kvstore.client.nodes import LinkOptions, NodeLinks, agree
from kvstore.client.planning import Hit, Planner
from kvstore.client.results import Fetched, GetResult, Lookup, Mask, PutResult, leading
from kvstore.client.staging import Staging, StagingMemory
from kvstore.client.streams import LayerStream, PublishStream
from kvstore.cluster.membership import Membership, StaticMembership
from kvstore.cluster.placement import place
from kvstore.core.errors import DeadlineExceeded, KvStoreError, LeaseExpired, ProtocolError, Unavailable, UsageError
from kvstore.core.keys import BlockKeys, Extra, KeyScheme, TokenIds, chain_keys
from kvstore.core.layout import CanonicalLayout
from kvstore.core.namespace import Namespace
from kvstore.core.states import BlockState, PutStatus
from kvstore.device.base import Device
from kvstore.device.opening import open_device
from kvstore.transport.base import HeldBlocks, LayerSink, LayerSource, Part, ShardLink, Wanted
from kvstore.transport.buffers import Blocks, Region, RegisteredBuffer, as_blocks
from kvstore.transport.channel import Deadline
from kvstore.transport.copying import Copy
from kvstore.transport.device_blocks import DeviceBlocks, as_device_blocks, is_on_device, on_device
from kvstore.transport.shm import SharedMemoryLink
from kvstore.wire.control import ControlClient

I64 = NDArray[np.int64]
T = TypeVar("T")

log = logging.getLogger("kvstore")

REPORT_S = 2.0
KEEP_S = 0.1
VIEW_TTL_S_MAX = 600.0
_THREADS_MAX = 16


def connect(
    address: str | Sequence[str] = "local",
    *,
    namespace: Namespace,
    timeout_s: float = 2.0,
    transport: str = "auto",
    checksums: bool = False,
    auth_token: str | None = None,
    device: str | Device | None = None,
    fabric: str | None = None,
    fabric_device: str | None = None,
) -> Client:
    """Connect to a store.

    Args:
        address: `"local"`, `"host:port"`, or several (a list, or separated by commas); `"host:port=2"` gives weight 2.
        namespace: whose blocks this client reads and writes.
        timeout_s: bound of every call.
        transport: `"auto"` takes shared memory on the same host, else Mooncake's engine where `fabric` allows it and
        the server has it, else TCP; `"shm"`, `"mooncake"` or `"tcp"` insist.
        checksums: verify every layer slice over shared memory too; over TCP it is always done.
        auth_token: the server's `auth_token`, if it has one; `KVSTORE_AUTH_TOKEN` unless given.
        device: an accelerator whose memory blocks are read into and put from: `"cuda:0"`, or `"host"`, which stands for
        one where there is none. A device that is handed in open stays the caller's to close.
        fabric: allow one-sided transfers by Mooncake's engine, which trusts the network, where the server has them over
        this protocol: `"tcp"` or `"rdma"`; `KVSTORE_FABRIC` unless given, else none.
        fabric_device: the network card to use for them; `KVSTORE_FABRIC_DEVICE` unless given, else all.

    Raises:
        Unavailable: no node can be reached.
        UsageError: an argument is wrong, or a node refuses the namespace or the token.
        ConfigError: there is no such device here.
    """
    options = LinkOptions(
        namespace=namespace,
        transport=transport,
        timeout_s=timeout_s,
        checksums=checksums,
        auth_token=os.environ.get("KVSTORE_AUTH_TOKEN", "") if auth_token is None else auth_token,
        client=f"kvstore pid {os.getpid()}",
        device=open_device(device) if isinstance(device, str) else device,
        fabric=os.environ.get("KVSTORE_FABRIC", "") if fabric is None else fabric,
        fabric_device=os.environ.get("KVSTORE_FABRIC_DEVICE", "") if fabric_device is None else fabric_device,
    )
    return Client(StaticMembership(address), options, owns_device=isinstance(device, str))


class Client:
    """One namespace in a store; made by `connect`. Safe to use from several threads; a context manager.

    A forked child gets connections of its own at its first call.
    """

    def __init__(self, membership: Membership, options: LinkOptions, *, owns_device: bool = False) -> None:
        self._owns_device = owns_device
        self._membership = membership
        self._options = options
        self._namespace = options.namespace
        self._forking = threading.Lock()
        self._prepare()
        try:
            self._connect()
        except BaseException:  # Ctrl-C too: what is open by now has nobody else to close it
            self.close()
            raise
        self._start_keeper()

    @property
    def timeout_s(self) -> float:
        """Bound of every call."""
        return self._options.timeout_s

    @property
    def device(self) -> Device | None:
        """The accelerator that this client was connected with."""
        return self._options.device

    # --- keys --------------------------------------------------------------------------------------------------------

    @property
    def namespace(self) -> Namespace:
        """Whose blocks these are."""
        return self._namespace

    @property
    def scheme(self) -> KeyScheme:
        """How this store makes keys."""
        return self._scheme

    def keys(self, token_ids: TokenIds, *, extra: Extra | None = None, after: BlockKeys | None = None) -> BlockKeys:
        """Keys of the full blocks of a token sequence; see `kvstore.chain_keys`."""
        return chain_keys(self._namespace, token_ids, extra=extra, scheme=self._scheme, after=after)

    # --- reading -----------------------------------------------------------------------------------------------------

    def lookup(
        self, keys: BlockKeys, *, plan: bool = False, prompt_tokens: int | None = None, overlap: bool = True
    ) -> Lookup:
        """State of each block, and the longest prefix that can be used. Changes nothing.

        Args:
            keys: of the n blocks.
            plan: also say how much of the prefix is worth fetching: by what this client's fetches took lately, and by
            what was told to `observe_compute`. Before that is known, all of it.
            prompt_tokens: of the whole prompt, with those that no key stands for; the keys' unless given.
            overlap: of the plan: whether the engine computes while layers arrive (`layer_stream`), or after the fetch.
        """
        count = _count(keys)
        block_tokens = self._namespace.block_tokens
        if prompt_tokens is None:
            prompt_tokens = count * block_tokens
        elif prompt_tokens < count * block_tokens:
            raise UsageError(f"prompt_tokens={prompt_tokens}: {count} keys stand for {count * block_tokens} of them")
        states = np.zeros(count, dtype=np.uint8)
        layers_ready = np.zeros(count, dtype=np.uint16)
        tiers = np.zeros(count, dtype=np.uint8)
        parts: list[Hit] = []

        def ask(link: ShardLink, rows: I64, deadline: Deadline) -> None:
            found = link.lookup(keys.array[rows], deadline.left_s())
            states[rows], layers_ready[rows], tiers[rows] = found.states, found.layers_ready, found.tiers
            parts.append(Hit(link.transport, rows, found.tiers))

        self._each_shard(keys, ask)
        self._planner.note_tiers(keys.array["lo"], tiers)
        hit = leading(states == BlockState.COMMITTED)
        planned = self._planner.plan(parts, hit, prompt_tokens, overlap=overlap) if plan else None
        return Lookup(states, layers_ready, hit, hit * block_tokens, tiers, planned)

    def observe_compute(self, tokens: int, seconds: float) -> None:
        """Tell how long the engine took to compute so many tokens of a prompt; `lookup(plan=True)` compares with it.

        An engine that knows its speed tells it once: so many tokens, and the seconds they take.
        """
        if tokens < 1 or not 0 < seconds < float("inf"):
            raise UsageError(
                f"tokens={tokens}, seconds={seconds}: allowed is 1 or more of the one, above 0 of the other"
            )
        self._planner.computing.observe(tokens, seconds)

    def observe_fetch(self, keys: BlockKeys, seconds: float) -> None:
        """Tell how long it took to fetch these blocks, where another client of the same host did that.

        The client that fetches knows by itself. An engine that plans in one process and fetches in others tells the one
        that plans.
        """
        if not 0 < seconds < float("inf"):
            raise UsageError(f"seconds={seconds}: allowed is above 0")
        if self._closed.is_set() or not _count(keys):
            return
        size = self._namespace.block_bytes
        parts = self._route(keys)
        in_turn = all(link.transport == "shm" for _, _, link, _ in parts)
        for _, _, link, rows in parts:
            share = len(rows) / len(keys) if in_turn else 1.0
            self._planner.observe_fetch(
                link.transport,
                keys.array["lo"][rows],
                len(rows) * size,
                seconds * share,
                to_device=self._options.device is not None,
            )

    def get_into(
        self, keys: BlockKeys, into: object, *, offsets: object = None, layers: tuple[int, int] | None = None
    ) -> Fetched:
        """Copy blocks, or a range of their layers, straight into the caller's memory.

        Args:
            keys: of the n blocks wanted.
            into: n blocks as one C-contiguous array or tensor, a list of n buffers, or a buffer from `register` with
            `offsets`.
            offsets: byte offset of each block in a registered buffer, shape (n,).
            layers: half-open range; all layers unless given. Each target then has the bytes of that range.

        With a device, `into` may be one contiguous tensor of it, with or without `offsets`. The copies start after what
        is on the default stream by now (or the stream that the object names), and have ended when this returns.

        Raises:
            LayoutMismatch, UsageError, UnregisteredBuffer: the target does not fit; nothing was copied.
            DeviceError: the device failed or took too long: it may still be writing to the target.
        """
        chosen = self._layers(layers)
        size = (chosen[1] - chosen[0]) * self._namespace.layer_bytes
        target = self._blocks(into, offsets, _count(keys), size, "into", writable=True)
        return self._fetch(keys, target, chosen, size)

    def get(self, keys: BlockKeys) -> GetResult:
        """Copy blocks into memory that the client provides and recycles."""
        size = self._namespace.block_bytes
        count = _count(keys)
        memory = self._arenas.take(count * size)
        rows = memory.reshape(count, size)
        target = Region(memory, np.arange(count, dtype=np.int64) * size)
        fetched = self._fetch(keys, target, (0, self._namespace.layers), size)
        blocks = [rows[row] if good else None for row, good in enumerate(fetched.ok.tolist())]
        return GetResult(fetched.ok, fetched.bytes, blocks)

    def view(self, keys: BlockKeys, *, ttl_s: float = 10.0) -> View:
        """Blocks where they lie, without a copy (over TCP: one copy), read-only, for as long as the view is open.

        The lease is renewed in the background; should that fail for `ttl_s`, the end of the `with` block raises
        `LeaseExpired`.
        """
        _require_ttl(ttl_s)
        count = _count(keys)
        parts: list[tuple[I64, HeldBlocks]] = []

        def ask(link: ShardLink, rows: I64, deadline: Deadline) -> None:
            parts.append((rows, link.lease(keys.array[rows], ttl_s, deadline.left_s())))

        self._each_shard(keys, ask)
        view = View(self._namespace, count, parts, ttl_s, self._options.timeout_s)
        self._views.add(view)
        return view

    def layer_stream(
        self,
        keys: BlockKeys,
        into: object,
        *,
        layers: tuple[int, int] | None = None,
        heads: tuple[int, int] | None = None,
        slots: object = None,
        ttl_s: float = 10.0,
        stream: int | None = None,
        copy: Copy | None = None,
    ) -> LayerStream:
        """Have blocks arrive layer by layer, in order, while the caller computes; blocks that are still being written
        too: their layers come as their writer publishes them.

        Args:
            keys: of the n blocks wanted.
            into: one contiguous buffer of n blocks, each with the layers and heads asked for; or a list with one buffer
            a layer, of n slices, or with `slots` of any number.
            layers: half-open range; all layers unless given.
            heads: half-open range of KV heads; all unless given. Canonical layouts only.
            slots: which slice of each layer's buffer each block goes to, shape (n,).
            ttl_s: the blocks are held for so long, again and again, while the stream lasts.
            stream: of the engine (`torch.cuda.current_stream().cuda_stream`), where `into` is used on another one than
            the default stream or the one that the object names. Host memory has none.
            copy: `copy(target, source)` of two uint8 arrays of shape (n, size), as numpy.copyto. Where all blocks come
            from memory of this host, a layer is copied with it when it is waited for, by the thread that waits. For
            engines that compute with all cores of the host, and whose threads share in a copy: one beside the computing
            would slow both down.

        With a device, `into` may be tensors of it. Copies start after what is on the engine's stream by now, and what
        is put there after a `wait` starts after that layer's copies. The end of the stream waits for all of them.

        Raises:
            LayoutMismatch, UsageError: the memory does not fit, or a range is outside; nothing was copied.
            DeviceError: the device failed.
        """
        chosen = self._layers(layers)
        wanted = Wanted(*chosen, *self._heads(heads))
        count = _count(keys)
        _require_ttl(ttl_s)
        shape = Shape(count, chosen[1] - chosen[0], wanted.size, self._namespace.dtype)
        landing = self._landing(into, slots, shape, stream)
        if landing is None:
            memory = replace(layer_memory(into, slots, shape, name="into", writable=True), copy=copy)
        else:
            memory = landing.memory
        parts: list[tuple[I64, LayerSource]] = []
        links: list[ShardLink] = []

        def ask(link: ShardLink, rows: I64, deadline: Deadline) -> None:
            parts.append((rows, link.layers(keys.array[rows], wanted, memory.take(rows), ttl_s, deadline.left_s())))
            links.append(link)

        try:
            self._each_shard(keys, ask)
        except BaseException:  # Ctrl-C too: what is held by now has no stream that would let go of it
            for _, source in parts:
                source.close()
            if landing is not None:
                landing.close(None, self._options.timeout_s)
            raise
        size = wanted.layers * wanted.size

        def complete(number: int, seconds: float, waited: bool) -> None:
            rows, transport = parts[number][0], links[number].transport
            self._planner.observe_fetch(
                transport,
                keys.array["lo"][rows],
                len(rows) * size,
                seconds,
                to_device=landing is not None,
                waited=waited,
            )

        arriving = LayerStream(
            parts,
            chosen,
            count,
            timeout_s=self._options.timeout_s,
            lost=lambda number: self._drop(links[number]),
            complete=complete,
            crew=self._crew,
            landing=landing,
            ahead=copy is None or any(link.transport != "shm" for link in links),
        )
        self._views.add(arriving)
        return arriving

    def prefetch(self, keys: BlockKeys) -> int:
        """Say that these blocks will be wanted soon: they count as used now. How many are there."""
        return int(np.count_nonzero(self._ask(keys, lambda link, part, left_s: link.touch(part, left_s))))

    # --- writing -----------------------------------------------------------------------------------------------------

    def put(self, keys: BlockKeys, blocks: object, *, offsets: object = None) -> PutResult:
        """Store blocks. Those that are there, or being written by somebody else, are left alone.

        Args:
            keys: of the n blocks.
            blocks: as `into` of `get_into`, whole blocks.
            offsets: as there.

        Raises:
            LayoutMismatch, UsageError, UnregisteredBuffer: the source does not fit; nothing was stored.
            DeviceError: the device failed or took too long; blocks that were not copied by then are not stored.
        """
        size = self._namespace.block_bytes
        count = _count(keys)
        source = self._blocks(blocks, offsets, count, size, "blocks", writable=False)
        statuses = np.full(count, PutStatus.FAILED, dtype=np.uint8)

        def ask(link: ShardLink, rows: I64, deadline: Deadline) -> None:
            if not isinstance(source, DeviceBlocks):
                statuses[rows] = link.store(keys.array[rows], source.take(rows), deadline.left_s())
                return

            def store(part: I64, region: Region) -> None:
                statuses[rows[part]] = link.store(keys.array[rows[part]], region, deadline.left_s())

            self._staged().send(source.take(rows), size, deadline, store)

        self._each_shard(keys, ask)
        return PutResult(statuses, int(np.count_nonzero(statuses == PutStatus.STORED)) * size)

    def publish_stream(
        self, keys: BlockKeys, *, heads: tuple[int, int] | None = None, ttl_s: float = 30.0
    ) -> PublishStream:
        """Store blocks layer by layer, as they are computed. Readers follow each layer; `commit` makes them complete.

        Args:
            keys: of the n blocks.
            heads: half-open range of KV heads that this stream writes, as of one tensor-parallel rank; all unless
            given. Canonical layouts only. Streams of other clients write the rest, in any order: a block is visible
            once all its heads are committed, and dropped when one of its streams ends without a commit. Of heads that
            another stream writes already, this one's are PENDING.
            ttl_s: after so long without a layer the blocks are dropped; also when after so long not all heads have
            their stream.

        Raises:
            UsageError: an argument is wrong; nothing was reserved.
        """
        _require_ttl(ttl_s)
        start, size = self._heads(heads)
        part = None if size == self._namespace.layer_bytes else Part(start, size)
        statuses = np.full(_count(keys), PutStatus.FAILED, dtype=np.uint8)
        parts: list[tuple[I64, LayerSink]] = []

        def ask(link: ShardLink, rows: I64, deadline: Deadline) -> None:
            sink = link.publish(keys.array[rows], ttl_s, deadline.left_s(), part)
            parts.append((rows, sink))
            statuses[rows] = sink.statuses

        try:
            self._each_shard(keys, ask)
        except BaseException:  # Ctrl-C too: what is reserved by now has no stream that would drop it
            for _, sink in parts:
                with contextlib.suppress(KvStoreError):
                    sink.abort(self._options.timeout_s)
            raise
        return PublishStream(self._namespace, statuses, parts, size, self._options.timeout_s, self._staging_memory)

    def delete(self, keys: BlockKeys) -> int:
        """Remove blocks; how many were there."""
        return int(np.count_nonzero(self._ask(keys, lambda link, part, left_s: link.delete(part, left_s))))

    def flush(self) -> int:
        """Remove every block of this namespace; how many were there. Nodes that can't be reached are left out."""
        options, removed = self._options, 0
        for member in self._members:
            with (
                contextlib.suppress(Unavailable),
                ControlClient(member.name, auth_token=options.auth_token, timeout_s=options.timeout_s) as control,
            ):
                removed += control.flush(self._namespace.digest)
        return removed

    def pin(self, keys: BlockKeys) -> int:
        """Keep blocks from being evicted, until `unpin`. Pins are counted. How many are there."""
        return int(np.count_nonzero(self._ask(keys, lambda link, part, left_s: link.pin(part, True, left_s))))

    def unpin(self, keys: BlockKeys) -> int:
        """Take one pin off; how many are there."""
        return int(np.count_nonzero(self._ask(keys, lambda link, part, left_s: link.pin(part, False, left_s))))

    # --- the rest ----------------------------------------------------------------------------------------------------

    def register(self, buffer: object) -> RegisteredBuffer:
        """Check a writable buffer once, to name blocks in it by offset from then on."""
        return RegisteredBuffer(buffer, self._namespace.dtype)

    def stats(self) -> dict[str, Any]:
        """What this client has moved, by link."""
        links = [
            {
                "node": node.member.name,
                "shard": number,
                "transport": link.transport if link else None,
                "up": link is not None and link.usable,
                **(asdict(link.meter.counters) if link else {}),
            }
            for node in self._nodes
            for number, link in enumerate(node.links)
        ]
        return {"namespace": self._namespace.digest.hex(), "links": links}

    def close(self) -> None:
        """End all sessions. Open views end too. Idempotent."""
        self._closed.set()
        if self._pid != os.getpid():
            return  # a fork that never used it: the connections are its parent's
        for node in self._nodes:
            node.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        self._crew.close()
        if self._staging_memory is not None:
            self._staging_memory.close()
        if self._options.device is not None and self._owns_device:
            self._options.device.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """All that belongs to one process: a forked child starts again from here."""
        self._closed = threading.Event()
        self._kick = threading.Event()
        self._arenas = ArenaPool()
        device = self._options.device
        self._planner = Planner(
            layers=self._namespace.layers,
            block_bytes=self._namespace.block_bytes,
            block_tokens=self._namespace.block_tokens,
            to_device=device is not None,
        )
        self._staging_memory = None if device is None else StagingMemory(device)
        self._staging = None if self._staging_memory is None else Staging(self._staging_memory)
        self._threads: ThreadPoolExecutor | None = None
        self._crew = Crew("kvstore-layers")
        self._views: weakref.WeakSet[View | LayerStream] = weakref.WeakSet()
        self._members = self._membership.nodes()
        self._nodes = [NodeLinks(member, self._options) for member in self._members]
        self._pid = os.getpid()

    def _connect(self) -> None:
        """Reach every node that can be reached, and take over their way to make keys."""
        failures: list[Unavailable] = []
        for node in self._nodes:
            try:
                node.connect()
            except Unavailable as error:
                failures.append(error)
        infos = [node.info for node in self._nodes if node.info is not None]
        if not infos:
            raise failures[0]
        wanted = self._options.transport
        if wanted in ("shm", "mooncake") and not any(link for node in self._nodes for link in node.links):
            reason = "no shard of {} is reachable on this host" if wanted == "shm" else "{}: " + self._nodes[0].why_not
            raise Unavailable(f"transport={wanted!r}: {reason.format(self._members[0].name)}")
        agree(infos)
        self._scheme = infos[0].scheme

    def _start_keeper(self) -> None:
        keeper = threading.Thread(target=Client._keep, args=(weakref.ref(self), self._closed, self._kick), daemon=True)
        keeper.name = "kvstore-keeper"
        keeper.start()

    def _start_in_child(self) -> None:
        """Connections of our own. The parent's are let go of without a word: it still uses them."""
        with self._forking:
            if self._pid == os.getpid():
                return
            self._prepare()
            for node in self._nodes:
                node.reconnect()  # what is down reads as a miss, as always
            self._start_keeper()

    def _keep_up(self, report: bool) -> None:
        """One round of the background: reconnect what is down, renew the leases of open views, report."""
        now_s = time.monotonic()
        for node in self._nodes:
            if node.needs_connect(now_s):
                node.reconnect()
        for view in list(self._views):
            view.renew_if_due(now_s)
        for node in self._nodes:
            for number, link in enumerate(node.links):
                if link is None:
                    continue
                try:
                    link.tidy(self._options.timeout_s)
                    if report:
                        link.report(self._options.timeout_s)
                except KvStoreError:
                    node.drop(number, link)

    @staticmethod
    def _keep(client_ref: weakref.ref[Client], closed: threading.Event, kick: threading.Event) -> None:
        """The background thread: ends with its client, whether that was closed or forgotten."""
        report_at_s = time.monotonic() + REPORT_S
        while not closed.is_set():
            kick.wait(KEEP_S)
            kick.clear()
            client = client_ref()
            if client is None or closed.is_set():
                return
            report = time.monotonic() >= report_at_s
            try:
                client._keep_up(report)
            except Exception:  # without this thread links would never be made again, nor leases renewed
                log.exception("the background of a kvstore client met a bug; it goes on")
            if report:
                report_at_s = time.monotonic() + REPORT_S
            del client

    def _fetch(self, keys: BlockKeys, target: Blocks | DeviceBlocks, layers: tuple[int, int], size: int) -> Fetched:
        ok = np.zeros(len(keys), dtype=np.bool_)

        def ask(link: ShardLink, rows: I64, deadline: Deadline) -> None:
            part = keys.array[rows]
            to_device = isinstance(target, DeviceBlocks)
            began_s = time.monotonic()
            moved = 0
            try:
                if isinstance(target, DeviceBlocks):
                    ok[rows] = self._fetch_to_device(link, part, target.take(rows), layers, size, deadline)
                else:
                    ok[rows] = link.fetch(part, target.take(rows), layers, deadline.left_s())
                moved = int(np.count_nonzero(ok[rows]))
            except DeadlineExceeded:
                moved = len(rows)  # all of them would have taken even longer
                raise
            finally:
                took_s = time.monotonic() - began_s
                self._planner.observe_fetch(link.transport, part["lo"], moved * size, took_s, to_device=to_device)

        self._each_shard(keys, ask)
        return Fetched(ok, int(np.count_nonzero(ok)) * size)

    def _fetch_to_device(
        self,
        link: ShardLink,
        keys: NDArray[np.void],
        target: DeviceBlocks,
        layers: tuple[int, int],
        size: int,
        deadline: Deadline,
    ) -> Mask:
        if isinstance(link, SharedMemoryLink) and link.reaches_device:
            return link.fetch(keys, target, layers, deadline.left_s())

        def fill(rows: I64, region: Region) -> Mask:
            return link.fetch(keys[rows], region, layers, deadline.left_s())

        return self._staged().receive(target, size, deadline, fill)

    def _ask(self, keys: BlockKeys, question: Callable[[ShardLink, NDArray[np.void], float], Mask]) -> Mask:
        answers = np.zeros(_count(keys), dtype=np.bool_)

        def ask(link: ShardLink, rows: I64, deadline: Deadline) -> None:
            answers[rows] = question(link, keys.array[rows], deadline.left_s())

        self._each_shard(keys, ask)
        return answers

    def _each_shard(self, keys: BlockKeys, ask: Callable[[ShardLink, I64, Deadline], None]) -> None:
        """Ask every shard about its keys, those behind sockets side by side. What can't be reached is left
        unanswered.
        """
        if self._closed.is_set():
            raise UsageError("the client is closed")
        if self._pid != os.getpid():
            self._start_in_child()
        if not len(keys):
            return
        deadline = Deadline(self._options.timeout_s)
        parts = self._route(keys)
        if len(parts) == 1 or all(link.transport == "shm" for _, _, link, _ in parts):
            for waiting, part in zip(range(len(parts), 0, -1), parts, strict=True):
                # A shard that stands still leaves the others their share of the time.
                self._guarded(part, ask, Deadline(deadline.left_s() / waiting))
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="kvstore")
        asked = [self._threads.submit(self._guarded, part, ask, deadline) for part in parts]
        wait(asked)  # all of them, also when one refuses: the caller's memory is the caller's again after the call
        for future in asked:
            future.result()

    def _route(self, keys: BlockKeys) -> list[tuple[NodeLinks, int, ShardLink, I64]]:
        """Node, shard number, link and rows of each part that can be reached."""
        if len(self._nodes) == 1 and len(self._nodes[0].links) == 1:
            link = self._nodes[0].links[0]
            return [] if link is None else [(self._nodes[0], 0, link, np.arange(len(keys)))]
        parts: list[tuple[NodeLinks, int, ShardLink, I64]] = []
        owner = place(keys.array, self._members)
        for number_of_node, node in enumerate(self._nodes):
            rows = np.flatnonzero(owner == number_of_node)
            if not len(rows) or not node.links:
                continue
            shard_of = place(keys.array[rows], node.shards)
            for number, link in enumerate(node.links):
                mine = rows[shard_of == number]
                if link is not None and len(mine):
                    parts.append((node, number, link, mine))
        return parts

    def _guarded(
        self,
        part: tuple[NodeLinks, int, ShardLink, I64],
        ask: Callable[[ShardLink, I64, Deadline], None],
        deadline: Deadline,
    ) -> None:
        node, number, link, rows = part
        try:
            ask(link, rows, deadline)
        except (Unavailable, ProtocolError):
            # The rows stay misses. The background makes a new link; until then this shard costs nothing.
            node.drop(number, link)
            self._kick.set()

    def _drop(self, link: ShardLink) -> None:
        """A link was lost outside of a call. The background makes a new one."""
        for node in self._nodes:
            for number, known in enumerate(node.links):
                if known is link:
                    node.drop(number, link)
        self._kick.set()

    def _heads(self, heads: tuple[int, int] | None) -> tuple[int, int]:
        """Start and size of the bytes of each layer that hold these heads."""
        namespace = self._namespace
        if heads is None:
            return 0, namespace.layer_bytes
        layout = namespace.layout
        if not isinstance(layout, CanonicalLayout):
            raise UsageError(f"heads={heads!r}: the layout is opaque, only whole layers can be had")
        try:
            first, end = (operator.index(head) for head in heads)
        except (TypeError, ValueError):
            first, end = 0, 0
        if not 0 <= first < end <= layout.kv_heads:
            raise UsageError(f"heads={heads!r}: allowed is a half-open range within 0 to {layout.kv_heads}")
        size = layout.head_bytes(namespace.block_tokens, namespace.itemsize)
        return first * size, (end - first) * size

    def _layers(self, layers: tuple[int, int] | None) -> tuple[int, int]:
        if layers is None:
            return 0, self._namespace.layers
        try:
            first, end = (operator.index(layer) for layer in layers)
        except (TypeError, ValueError):
            first, end = 0, 0  # not two whole numbers: refused like a range of none
        if not 0 <= first < end <= self._namespace.layers:
            raise UsageError(f"layers={layers!r}: allowed is a half-open range within 0 to {self._namespace.layers}")
        return first, end

    def _staged(self) -> Staging:
        assert self._staging is not None, "blocks in device memory come with a device"
        return self._staging

    def _landing(self, into: object, slots: object, shape: Shape, stream: int | None) -> Landing | None:
        """The way into `into`, where that is device memory."""
        if stream is not None and (not isinstance(stream, int) or stream < 0):
            raise UsageError(f"stream={stream!r}: allowed is a CUDA stream's handle, an integer")
        staging, target = self._staging_memory, None
        if staging is not None:
            target = device_layers(staging.device, into, slots, shape, name="into", stream=stream, writable=True)
        if staging is not None and target is not None:
            return Landing(staging, target, shape.size)
        if stream is not None:
            raise UsageError(f"stream={stream}: goes with tensors of the client's device")
        return None

    def _blocks(
        self, value: object, offsets: object, count: int, size: int, name: str, *, writable: bool
    ) -> Blocks | DeviceBlocks:
        device = self._options.device
        if device is None:
            return self._host_blocks(value, offsets, count, size, name, writable=writable)
        if isinstance(value, DeviceBlocks):
            return value
        if not is_on_device(value):
            return on_device(device, self._host_blocks(value, offsets, count, size, name, writable=writable))
        blocks = as_device_blocks(device, value, offsets, count, size, name, self._namespace.dtype)
        if blocks.stream is not None:
            device.follow(blocks.stream)
        return blocks

    def _host_blocks(
        self, value: object, offsets: object, count: int, size: int, name: str, *, writable: bool
    ) -> Blocks:
        if isinstance(value, RegisteredBuffer):
            if offsets is None:
                raise UsageError(f"{name}: a registered buffer needs offsets=, one per key")
            return value.at(offsets, count, size)
        if offsets is not None:
            raise UsageError(f"{name}: offsets= goes with a buffer from register()")
        return as_blocks(value, count, size, name, self._namespace.dtype, writable=writable)


class View:
    """Blocks under a lease; made by `Client.view`. Use it as a context manager.

    `view[i]` is block i as read-only uint8 of shape (block bytes,), or None where there is no such block. What it
    returns must not be used after the `with` block.
    """

    def __init__(
        self, namespace: Namespace, count: int, parts: list[tuple[I64, HeldBlocks]], ttl_s: float, timeout_s: float
    ) -> None:
        self._namespace = namespace
        self._parts = parts
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._open = True
        self._lapsed = False
        self._renew_at_s = time.monotonic() + ttl_s / 3
        self._lock = threading.Lock()
        self.ok: Mask = np.zeros(count, dtype=np.bool_)
        self._blocks: list[NDArray[np.uint8] | None] = [None] * count
        for rows, held in parts:
            self.ok[rows] = held.held
            if len(rows) == count:
                self._blocks = held.blocks
                continue
            for row, block in zip(rows.tolist(), held.blocks, strict=True):
                self._blocks[row] = block

    @property
    def hit_blocks(self) -> int:
        """Blocks before the first one that is missing."""
        return leading(self.ok)

    def __len__(self) -> int:
        return len(self.ok)

    def __getitem__(self, row: int) -> NDArray[np.uint8] | None:
        if not self._open:
            raise UsageError("the view is closed; its blocks may be others' by now")
        return self._blocks[row]

    def array(
        self, row: int, dtype: DTypeLike | None = None, shape: tuple[int, ...] | None = None
    ) -> NDArray[Any] | None:
        """Block as a read-only array of another dtype (the namespace's unless given) and shape, or None for a miss.

        Raises:
            UsageError: numpy has no such dtype as the namespace's: name one of the same width.
        """
        block: NDArray[Any] | None = self[row]
        if block is None:
            return None
        typed = block.view(self._own_dtype() if dtype is None else dtype)
        return typed if shape is None else typed.reshape(shape)

    def _own_dtype(self) -> np.dtype[Any]:
        name = self._namespace.dtype
        try:
            return np.dtype(name)
        except TypeError as cause:
            carrier = f"uint{8 * self._namespace.itemsize}"
            raise UsageError(f"dtype {name}: numpy has none; ask for its bits, as dtype={carrier!r}") from cause

    def check(self) -> None:
        """Make sure that everything read so far was read under a valid lease.

        Raises:
            LeaseExpired: it had run out: drop what was read, look up again.
        """
        self._lapsed |= not all(held.valid() for _, held in self._parts)
        if self._lapsed:
            raise LeaseExpired(f"the lease of {self._ttl_s:g} s ran out: what was read may be other blocks' bytes")

    def close(self) -> None:
        """Give the blocks back. Idempotent.

        Raises:
            LeaseExpired: the lease had run out before.
        """
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._blocks = []
            try:
                self.check()
            finally:
                for _, held in self._parts:
                    held.release()
                self._parts = []  # a closed view keeps no memory mapped

    def __enter__(self) -> View:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except LeaseExpired:
            if kind is None:
                raise

    def renew_if_due(self, now_s: float) -> None:
        """Prolong the lease when a third of it has passed. The client's background calls this."""
        with self._lock:
            if not self._open or now_s < self._renew_at_s:
                return
            self._renew_at_s = now_s + self._ttl_s / 3
            for _, held in self._parts:
                try:
                    held.renew(self._ttl_s, self._timeout_s)
                except KvStoreError:
                    self._renew_at_s = now_s + self._ttl_s / 10  # again soon; what runs out meanwhile is noticed


def _require_ttl(ttl_s: float) -> None:
    if not 0.01 <= ttl_s <= VIEW_TTL_S_MAX:
        raise UsageError(f"ttl_s={ttl_s}: allowed is 0.01 to {VIEW_TTL_S_MAX:g} seconds")


def _count(keys: BlockKeys) -> int:
    """How many keys, once it is clear that they are keys."""
    if not isinstance(keys, BlockKeys):
        raise UsageError(f"keys: {type(keys).__name__} is no batch of keys; pass BlockKeys, as keys() makes them")
    return len(keys)
