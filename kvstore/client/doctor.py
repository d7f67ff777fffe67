"""What `kvstorectl ping` and `kvstorectl doctor` find out: ways to a node and their times; what slows or harms it.

Everything here returns values; printing is the command's. A check writes nothing but one scratch block per shard and
path, in a namespace of its own, and deletes it again.
"""

from __future__ import annotations

import errno
import ipaddress
import resource
import secrets
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import xxhash

from kvstore.client.nodes import mooncake_link
from kvstore.core.errors import KvStoreError, ProtocolError, Unavailable, UsageError
from kvstore.core.keys import BlockKeys, chain_keys
from kvstore.core.layout import OpaqueLayout
from kvstore.core.namespace import Namespace
from kvstore.core.sizes import format_size
from kvstore.core.states import PutStatus
from kvstore.transport.base import ShardLink
from kvstore.transport.buffers import Region
from kvstore.transport.channel import RECEIVE_BUFFER_BYTES, Deadline
from kvstore.transport.mooncake_engine import engine_problem
from kvstore.transport.shm import SharedMemoryLink, connect_local
from kvstore.transport.tcp import TcpLink
from kvstore.wire.control import ControlClient, NodeInfo, ShardInfo
from kvstore.wire.tokens import TOKEN_TTL_S

SCRATCH_BYTES: Final = 1 << 20
QUESTIONS: Final = 5  # whose median is told
CHECKSUM_SLICE_BYTES: Final = 256 << 10
CHECKSUM_S: Final = 0.05
CHECKSUM_GIB_S_MIN: Final = 4.0  # below this the checksum, not the socket, decides how fast TCP is
SERVER_FILES_WANTED: Final = 4160  # what one process of the server opens when it serves as many clients as it will take
CLOCK_SKEW_S_MAX: Final = 5.0
_PEER_CREDENTIALS = struct.Struct("3i")
HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
RECEIVE_BUFFER_MAX: Final = Path("/proc/sys/net/core/rmem_max")
_MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The node that is asked, and how."""

    address: str  # host:port of its control port
    auth_token: str = ""
    timeout_s: float = 2.0

    def control(self) -> ControlClient:
        """A connection to its control plane, as a context manager."""
        return ControlClient(self.address, auth_token=self.auth_token, timeout_s=self.timeout_s)


# --- ping ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to a node and how long it takes. `error` says why it can't be used, and is empty if it can."""

    way: str  # control, shm, mooncake, tcp
    shard: int | None  # None: the node itself
    to: str
    connect_ms: float | None = None  # until the first answer
    round_trip_ms: float | None = None  # median of a question about one key
    error: str = ""


def ping(target: Target, count: int) -> list[Way]:
    """All ways to a node, `count` round trips over each.

    Raises:
        Unavailable, UsageError, ProtocolError: its control port does not answer, or refuses us.
    """
    with target.control() as control:
        begin = time.perf_counter()
        info = control.hello("kvstorectl ping")
        connect_ms = _ms_since(begin)
        round_trip_ms = _median_ms(lambda: control.hello("kvstorectl ping"), count)
    ways = [Way(way="control", shard=None, to=target.address, connect_ms=connect_ms, round_trip_ms=round_trip_ms)]
    keys = _scratch_keys(_scratch(SCRATCH_BYTES))
    for shard in info.shards:
        for way, to, make in _links(info, shard, target.timeout_s):
            begin = time.perf_counter()
            try:
                with _opened(make, _scratch(SCRATCH_BYTES), target.timeout_s) as link:
                    connect_ms = _ms_since(begin)
                    # The key is absent, so that nothing counts as used.
                    median_ms = _median_ms(lambda link=link: link.touch(keys.array, target.timeout_s), count)
                ways.append(Way(way=way, shard=shard.number, to=to, connect_ms=connect_ms, round_trip_ms=median_ms))
            except KvStoreError as error:
                ways.append(Way(way=way, shard=shard.number, to=to, error=str(error)))
    return ways


def complete(ways: Sequence[Way]) -> bool:
    """Whether each shard can be reached over at least one way. Clients of another host have no shared memory."""
    shards = {way.shard for way in ways if way.shard is not None}
    return shards == {way.shard for way in ways if way.shard is not None and not way.error}


# --- doctor ----------------------------------------------------------------------------------------------------------


class Finding(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"  # it works, but slower or less safe than it could be
    FAIL = "fail"
    SKIP = "skip"  # can't be told from here


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `doctor`."""

    name: str
    finding: Finding
    text: str
    advice: str = ""  # what to do about it


def examine(target: Target) -> list[Check]:
    """All checks, those of the node first. Nothing is raised for a node that can't be reached: that is a finding."""
    try:
        with target.control() as control:
            begin = time.perf_counter()
            info = control.hello("kvstorectl doctor")
            took_ms = _ms_since(begin)
            status = control.stats()
    except KvStoreError as error:
        return [_no_control(error), *_host_checks(serves=_is_loopback(_host_of(target.address)))]
    ways = list(check_ways(target, info, status))
    reached = f"{target.address} answers in {took_ms:.1f} ms: node {info.node_id[:8]}"
    return [
        Check("control", Finding.OK, reached),
        _check_versions(status),
        _check_shards(status),
        _check_exposure(target, status),
        _check_fabric(info),
        _check_warm(status),
        *ways,
        _check_integrity(status),
        _check_clock(info),
        _check_server_files(info, target.timeout_s),
        *_host_checks(serves=any(way.finding is Finding.OK and way.name.startswith("shm") for way in ways)),
    ]


def _no_control(error: KvStoreError) -> Check:
    match error:
        case ProtocolError():
            advice = "install the same version of kvstore-llm on both sides"
        case UsageError():
            advice = "give the server's auth_token with KVSTORE_AUTH_TOKEN"
        case _:
            advice = "start kvstore-server there, or name its control port with --address"
    return Check("control", Finding.FAIL, str(error), advice)


def _check_versions(status: Mapping[str, Any]) -> Check:
    ours, theirs = metadata.version("kvstore-llm"), str(status["version"])
    if ours == theirs:
        return Check("versions", Finding.OK, f"{ours} on both sides")
    text = f"the server is {theirs}, this is {ours}; they speak the same protocol version"
    return Check("versions", Finding.WARN, text, "upgrade the older one when convenient")


def _check_shards(status: Mapping[str, Any]) -> Check:
    up, down = len(status["shards"]), cast("list[int]", status["shards_down"])
    if down:
        names = ", ".join(map(str, down))
        text = f"{len(down)} of {up + len(down)} do not answer: {names}"
        return Check("shards", Finding.FAIL, text, "see the server's log; the node starts dead shards again by itself")
    if not status["healthy"]:
        return Check("shards", Finding.FAIL, "a worker of the data port is down", "see the server's log")
    return Check("shards", Finding.OK, f"{up} of {up} answer")


def _check_exposure(target: Target, status: Mapping[str, Any]) -> Check:
    host = _host_of(str(status["endpoints"]["control"]))
    if _is_loopback(host):
        return Check("exposure", Finding.OK, f"listens on {host} only: clients of this host")
    try:
        with ControlClient(target.address, timeout_s=target.timeout_s) as stranger:
            stranger.hello("kvstorectl doctor")
    except UsageError:
        return Check("exposure", Finding.OK, f"listens on {host} and wants a token; nothing is encrypted on the way")
    except KvStoreError as error:
        return Check("exposure", Finding.SKIP, str(error))
    text = f"listens on {host} and lets everybody in"
    return Check("exposure", Finding.WARN, text, "start it with --auth-token, or on loopback")


def _check_fabric(info: NodeInfo) -> Check:
    """Whether one-sided transfers are possible between the two, and what they expose."""
    name = "fabric"
    problem = engine_problem()
    ours = f"here: {problem}" if problem else "here Mooncake's engine can be had"
    if not info.fabric:
        return Check(name, Finding.SKIP, f"off at the server (its setting `fabric` is empty); {ours}")
    if problem:
        return Check(name, Finding.SKIP, f"the server offers {info.fabric}, TCP is used all the same; {ours}")
    text = f"the server offers {info.fabric}, and {ours}; whoever reaches its engine's ports reads every block"
    return Check(
        name, Finding.WARN, text, f"keep them to a trusted network; clients ask for it by KVSTORE_FABRIC={info.fabric}"
    )


def _check_warm(status: Mapping[str, Any]) -> Check:
    pool = sum(int(shard["pool_bytes"]) for shard in status["shards"])
    warm = sum(int(shard["warm_bytes"]) for shard in status["shards"])
    if warm >= pool:
        return Check("memory", Finding.OK, f"all {format_size(pool)} of the pool are present")
    cold = pool - warm
    text = f"{warm / pool:.0%} of {format_size(pool)} are present; the first copies into the rest take longer"
    available = _available_memory_bytes()
    if _is_loopback(_host_of(str(status["endpoints"]["control"]))) and 0 <= available < cold:
        return Check("memory", Finding.FAIL, f"{text}, and this host has no memory left for it", "lower --dram")
    return Check("memory", Finding.WARN, text, "wait: the server is still warming up")


def _check_integrity(status: Mapping[str, Any]) -> Check:
    wrong = sum(int(shard["counters"]["client_checksum_failures"]) for shard in status["shards"])
    if wrong:
        text = f"{wrong:,} reads did not match their checksum since the start (all were answered as misses)"
        return Check("integrity", Finding.FAIL, text, "something damages data: test the memory, look at the network")
    return Check("integrity", Finding.OK, "no read failed its checksum since the start")


def _check_clock(info: NodeInfo) -> Check:
    # A token tells when it was issued: `kvstore.wire.tokens` describes its first eight bytes.
    issued_s = int.from_bytes(bytes.fromhex(info.token)[:8], "little") - TOKEN_TTL_S
    skew_s = issued_s - time.time()
    if abs(skew_s) <= CLOCK_SKEW_S_MAX:
        return Check("clock", Finding.OK, "the server's and this host's agree")
    text = f"the server's is {abs(skew_s):,.0f} s {'ahead' if skew_s > 0 else 'behind'}; the store works all the same"
    return Check("clock", Finding.WARN, text, "set both by NTP, or logs and metrics won't line up")


def _check_server_files(info: NodeInfo, timeout_s: float) -> Check:
    limit = _open_files_limit(info, timeout_s)
    if limit is None:
        return Check("server files", Finding.SKIP, "its limit can be seen from its own host and user only")
    if limit >= SERVER_FILES_WANTED:
        return Check("server files", Finding.OK, f"each process may open {limit:,}")
    text = f"each process may open {limit:,}: at most about {max(limit - 64, 0) // 2:,} TCP connections a worker"
    return Check("server files", Finding.WARN, text, f"ulimit -n {2 * SERVER_FILES_WANTED}, or LimitNOFILE= of a unit")


def _open_files_limit(info: NodeInfo, timeout_s: float) -> int | None:
    """The limit of a shard's process, by its local socket; None where that can't be had."""
    for shard in info.shards:
        try:
            with closing(connect_local(shard.socket_path, Deadline(timeout_s))) as channel:
                raw = channel.stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
            pid: int = _PEER_CREDENTIALS.unpack(raw)[0]
            if pid:
                return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
        except (KvStoreError, OSError):
            continue
    return None


# --- doctor: a block there and back ----------------------------------------------------------------------------------


def check_ways(target: Target, info: NodeInfo, status: Mapping[str, Any]) -> Iterator[Check]:
    """A scratch block there and back, over every way to each shard that is up."""
    namespace = _scratch(_scratch_bytes(status))
    down = cast("list[int]", status["shards_down"])
    for shard in info.shards:
        if shard.number in down:
            continue
        for way, to, make in _links(info, shard, target.timeout_s):
            name = f"{way} shard {shard.number}"
            try:
                with _opened(make, namespace, target.timeout_s) as link:
                    yield _there_and_back(name, link, namespace, target.timeout_s)
            except KvStoreError as error:
                yield _no_shm(name, target, error) if way == "shm" else _no_way(name, to, error)


def _there_and_back(name: str, link: ShardLink, namespace: Namespace, timeout_s: float) -> Check:
    """Put a block of random bytes, get it, compare, delete it."""
    keys = _scratch_keys(namespace).array
    sent = np.frombuffer(secrets.token_bytes(namespace.block_bytes), dtype=np.uint8)
    received = np.zeros_like(sent)
    at_start = np.zeros(1, dtype=np.int64)
    try:
        begin = time.perf_counter()
        status = PutStatus(int(link.store(keys, Region(sent, at_start), timeout_s)[0]))
        put_ms = _ms_since(begin)
        if status is not PutStatus.STORED:
            text = f"a scratch block was not stored: {status.name}"
            return Check(name, Finding.WARN, text, "pins or leases hold the whole pool: unpin, or enlarge --dram")
        begin = time.perf_counter()
        found = link.fetch(keys, Region(received, at_start), (0, namespace.layers), timeout_s)[0]
        get_ms = _ms_since(begin)
        asked_ms = _median_ms(lambda: link.touch(keys, timeout_s), QUESTIONS)
    finally:
        link.delete(keys, timeout_s)
    if not found:
        return Check(name, Finding.WARN, "a scratch block was evicted at once", "the pool is far too small: --dram")
    if not np.array_equal(sent, received):
        return Check(name, Finding.FAIL, "a scratch block came back changed", "do not use this store; report it")
    size, gib = format_size(namespace.block_bytes), namespace.block_bytes / (1 << 30)
    text = (
        f"{size} put in {put_ms:.1f} ms and got in {get_ms:.1f} ms ({1000 * gib / get_ms:.1f} GiB/s), "
        f"asked in {asked_ms:.2f} ms, content verified, deleted again"
    )
    return Check(name, Finding.OK, text)


def _no_shm(name: str, target: Target, error: KvStoreError) -> Check:
    cause = error.__cause__
    number = cause.errno if isinstance(cause, OSError) else None
    if number == errno.ENOENT and not _is_loopback(_host_of(target.address)):
        text = "the server is on another host, or its runtime_dir is not mounted here; TCP is used"
        return Check(name, Finding.SKIP, text)
    match number:
        case errno.ENOENT:
            advice = "mount the server's runtime_dir at the same path in this container"
        case errno.EACCES | errno.EPERM | None:
            advice = "run clients as the user that runs the server"
        case _:
            advice = "see the server's log"
    return Check(name, Finding.WARN, f"not attached, TCP is used: {error}", advice)


def _no_way(name: str, to: str, error: KvStoreError) -> Check:
    advice = f"open {to} in the firewall, or see the server's log"
    if isinstance(error, Unavailable):
        return Check(name, Finding.FAIL, f"no connection: {error}", advice)
    return Check(name, Finding.FAIL, str(error), advice)


def _scratch(block_bytes: int) -> Namespace:
    """A namespace that only checks use: the same one every time, for a server never forgets one."""
    layout = OpaqueLayout(tag="scratch", layers=1, layer_bytes_per_block=block_bytes)
    return Namespace(model="kvstorectl", revision="scratch", dtype="uint8", block_tokens=2, layout=layout)


def _scratch_keys(namespace: Namespace) -> BlockKeys:
    """One key that nobody has."""
    return chain_keys(namespace, [secrets.randbits(31), secrets.randbits(31)])


def _scratch_bytes(status: Mapping[str, Any]) -> int:
    """The block size that most of the pool serves: in a full pool, a block of another size costs a chunk of others."""
    sizes: dict[int, int] = {}
    for shard in status["shards"]:
        for held in shard["namespaces"]:
            size = int(held["bytes"]) // int(held["blocks"])
            sizes[size] = sizes.get(size, 0) + int(held["bytes"])
    return max(sizes, key=lambda size: sizes[size], default=SCRATCH_BYTES)


# --- doctor: this host -----------------------------------------------------------------------------------------------


def _host_checks(*, serves: bool) -> list[Check]:
    """What this host is like; `serves`: whether the server is here, too."""
    pages = [check_huge_pages()] if serves else []
    return [*pages, check_receive_buffer(), _check_checksum(), _check_own_files()]


def check_huge_pages(path: Path = HUGE_PAGES) -> Check:
    """Whether the kernel gives huge pages to shared memory that asks for them."""
    name = "huge pages"
    text = _read(path)
    if text is None:
        return Check(name, Finding.SKIP, f"this kernel has no {path}")
    mode = text.partition("[")[2].partition("]")[0]
    if mode in {"always", "within_size", "advise", "force"}:
        return Check(name, Finding.OK, f"shared memory gets them ({mode})")
    advice = f"as root: echo advise > {path}, then restart the server"
    return Check(name, Finding.WARN, f"shared memory does not get them ({mode}); warming up takes longer", advice)


def check_receive_buffer(path: Path = RECEIVE_BUFFER_MAX) -> Check:
    """Whether a connection may have the receive buffer that the client asks for."""
    name = "socket buffers"
    text = _read(path)
    if text is None or not text.isdigit():
        return Check(name, Finding.SKIP, f"{path} can't be read here")
    limit = int(text)
    if limit >= RECEIVE_BUFFER_BYTES:
        return Check(name, Finding.OK, f"up to {format_size(limit)}")
    text = f"at most {format_size(limit)}, and {format_size(RECEIVE_BUFFER_BYTES)} are asked for: TCP reads are slower"
    return Check(name, Finding.WARN, text, f"as root: sysctl -w net.core.rmem_max={RECEIVE_BUFFER_BYTES}")


def _check_checksum() -> Check:
    """How fast this host verifies what comes over TCP, from the cache, as it is done there."""
    payload = secrets.token_bytes(CHECKSUM_SLICE_BYTES)
    rounds = 0
    begin = time.perf_counter()
    while (took_s := time.perf_counter() - begin) < CHECKSUM_S:
        xxhash.xxh3_64_intdigest(payload)
        rounds += 1
    gib_s = rounds * len(payload) / took_s / (1 << 30)
    text = f"xxh3-64 at {gib_s:.1f} GiB/s"
    if gib_s >= CHECKSUM_GIB_S_MIN:
        return Check("checksums", Finding.OK, text)
    advice = "is the host overloaded, or is this a build of xxhash without vector instructions?"
    return Check("checksums", Finding.WARN, f"{text}: TCP can't be faster than that", advice)


def _check_own_files() -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit >= 1024:
        return Check("client files", Finding.OK, f"a process may open {limit:,}; a client needs at most 4 a shard")
    text = f"a process may open {limit:,}; a client needs up to 4 a shard"
    return Check("client files", Finding.WARN, text, "ulimit -n 4096")


# --- shared by both --------------------------------------------------------------------------------------------------

_MakeLink = Callable[[], ShardLink]


def _links(info: NodeInfo, shard: ShardInfo, timeout_s: float) -> Iterator[tuple[str, str, _MakeLink]]:
    """The ways to a shard that both sides have: name, where it leads, and how to connect."""
    yield "shm", Path(shard.socket_path).name, lambda: SharedMemoryLink(shard.socket_path, timeout_s=timeout_s)
    if info.fabric and not engine_problem():
        yield "mooncake", f"Mooncake's ports at {info.data_host}", lambda: mooncake_link(info, shard, timeout_s)
    yield (
        "tcp",
        f"{info.data_host}:{info.data_port}",
        lambda: TcpLink(info.data_host, info.data_port, token=info.token, shard=shard.number, timeout_s=timeout_s),
    )


@contextmanager
def _opened(make: _MakeLink, namespace: Namespace, timeout_s: float) -> Iterator[ShardLink]:
    link = make()
    try:
        link.open(namespace, timeout_s)
        yield link
    finally:
        link.close()


def _median_ms(action: Callable[[], object], count: int) -> float:
    times_ms: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        action()
        times_ms.append(_ms_since(begin))
    return statistics.median(times_ms)


def _ms_since(begin_s: float) -> float:
    return (time.perf_counter() - begin_s) * 1000


def _host_of(address: str) -> str:
    """The host of `host:port` or `[v6]:port`."""
    return address.rpartition(":")[0].strip("[]")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _available_memory_bytes() -> int:
    """Memory that this host could still give, or -1 where that can't be told."""
    for line in (_read(_MEMORY) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return -1


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
