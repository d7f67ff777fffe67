"""Links from one client to the shards of one node: made at HELLO, dropped when they fail, made again in the
background.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.cluster.membership import Member
from kvstore.core.errors import ConfigError, KvStoreError, ProtocolError, Unavailable
from kvstore.core.namespace import Namespace
from kvstore.device.base import Device
from kvstore.transport.base import ShardLink
from kvstore.transport.mooncake import MooncakeLink
from kvstore.transport.mooncake_engine import PROTOCOLS, engine_problem
from kvstore.transport.shm import SharedMemoryLink
from kvstore.transport.tcp import TcpLink
from kvstore.wire.control import ControlClient, NodeInfo, ShardInfo

RETRY_S_MIN = 0.1
RETRY_S_MAX = 0.5
TRANSPORTS = ("auto", "shm", "mooncake", "tcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """How a client wants to be connected."""

    namespace: Namespace
    transport: str = "auto"
    timeout_s: float = 2.0
    checksums: bool = False
    auth_token: str = ""
    client: str = "kvstore"
    device: Device | None = None
    fabric: str = ""  # the protocol of a server's fabric that "auto" may take; empty: none
    fabric_device: str = ""  # network card of our engine; empty: all

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport={self.transport!r}: allowed is one of {', '.join(TRANSPORTS)}")
        if self.fabric not in ("", *PROTOCOLS):
            raise ConfigError(f"fabric={self.fabric!r}: allowed is one of {', '.join(PROTOCOLS)}, or empty for none")
        if not 0.001 <= self.timeout_s <= 3600:
            raise ConfigError(f"timeout_s={self.timeout_s}: allowed is 0.001 to 3600 seconds")


class NodeLinks:
    """All links to one node. `links[i]` leads to shard i, or is None while that shard can't be reached.

    The circuit breaker of the SDK: a call never waits for a reconnect, it reads as a miss until the background has
    made one.
    """

    def __init__(self, member: Member, options: LinkOptions) -> None:
        self.member = member
        self.info: NodeInfo | None = None
        self.links: list[ShardLink | None] = []
        self.why_not = ""  # what the last link that could not be made met
        self._options = options
        self._next_try_s = 0.0
        self._pause_s = RETRY_S_MIN
        self._connecting = threading.Lock()
        self._closed = False

    @property
    def shards(self) -> tuple[Member, ...]:
        """The node's shards for placement, as far as known."""
        return tuple(Member(f"{self.member.name}/{number}") for number in range(len(self.links)))

    def connect(self) -> None:
        """HELLO, then a link to each shard that has none.

        Raises:
            Unavailable: the node does not answer.
            UsageError, ProtocolError: it refuses us.
        """
        options = self._options
        with self._connecting:
            with ControlClient(self.member.name, auth_token=options.auth_token, timeout_s=options.timeout_s) as control:
                info = control.hello(options.client)
            links: list[ShardLink | None] = [*self.links] if len(self.links) == len(info.shards) else []
            links += [None] * (len(info.shards) - len(links))
            for shard in info.shards:
                link = links[shard.number]
                if link is not None and link.usable and link.boot_id == shard.boot_id:
                    continue
                if link is not None:
                    link.close()
                    links[shard.number] = None
                try:
                    links[shard.number] = self._link(info, shard)
                except Unavailable as error:
                    self.why_not = str(error)
            self.info, self.links = info, links
            if self._closed:  # meanwhile: these links came too late for `close` to see them
                self.close()

    def drop(self, shard: int, link: ShardLink) -> None:
        """Give up a link that has failed: no call uses it again."""
        link.close()
        if self.links[shard] is link:
            self.links[shard] = None

    def needs_connect(self, now_s: float) -> bool:
        """Whether the background should try now."""
        if self.info is not None and all(link is not None and link.usable for link in self.links):
            return False
        return now_s >= self._next_try_s

    def reconnect(self) -> None:
        """Try to become whole again; the pause before the next try grows while that fails."""
        with contextlib.suppress(KvStoreError):  # still down, or it refuses us now: calls go on reading as misses
            self.connect()
        now_s = time.monotonic()
        if self.needs_connect(now_s):
            self._next_try_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, RETRY_S_MAX)
        else:
            self._next_try_s, self._pause_s = 0.0, RETRY_S_MIN

    def close(self) -> None:
        """End all sessions, also those that a reconnect is just about to make."""
        self._closed = True
        for link in self.links:
            if link is not None:
                link.close()

    def _link(self, info: NodeInfo, shard: ShardInfo) -> ShardLink:
        return make_link(self.member.name, info, shard, self._options)


def make_link(name: str, info: NodeInfo, shard: ShardInfo, options: LinkOptions) -> ShardLink:
    """A link to a shard of this node, over the best way that the options allow and that can be had.

    Raises:
        Unavailable: there is none; what the last one met.
    """
    make: list[Callable[[], ShardLink]] = []
    if options.transport in ("auto", "shm"):
        make.append(
            lambda: SharedMemoryLink(shard.socket_path, timeout_s=options.timeout_s, checksums=options.checksums)
        )
    if options.transport == "mooncake" or (
        options.transport == "auto" and options.fabric and options.fabric == info.fabric
    ):
        make.append(lambda: mooncake_link(info, shard, options.timeout_s, options.fabric_device))
    if options.transport in ("auto", "tcp"):
        make.append(
            lambda: TcpLink(
                info.data_host, info.data_port, token=info.token, shard=shard.number, timeout_s=options.timeout_s
            )
        )
    failures: list[Unavailable] = []
    for attempt in make:
        try:
            link = attempt()
        except Unavailable as error:
            failures.append(error)
            continue
        if link.boot_id != shard.boot_id:
            link.close()
            failures.append(Unavailable(f"{name}: shard {shard.number} was restarted just now"))
            continue
        try:
            link.open(options.namespace, options.timeout_s)
            if options.device is not None and isinstance(link, SharedMemoryLink):
                link.use_device(options.device, options.timeout_s)
        except BaseException:  # Ctrl-C too: nobody has the link yet
            link.close()
            raise
        return link
    raise failures[-1]


def mooncake_link(info: NodeInfo, shard: ShardInfo, timeout_s: float, device: str = "") -> ShardLink:
    """A link by one-sided transfers.

    Raises:
        Unavailable: one of both sides has no engine, or the other side's does not answer.
    """
    if not info.fabric:
        raise Unavailable(f"{info.address} serves no fabric: its setting `fabric` is empty")
    problem = engine_problem()
    if problem:
        raise Unavailable(problem)
    return MooncakeLink(
        info.data_host,
        info.data_port,
        token=info.token,
        shard=shard.number,
        pool_bytes=shard.pool_bytes,
        timeout_s=timeout_s,
        device=device,
    )


def agree(infos: list[NodeInfo]) -> None:
    """All nodes must make keys in the same way.

    Raises:
        ProtocolError: names the two that don't.
    """
    for info in infos[1:]:
        if info.scheme != infos[0].scheme:
            raise ProtocolError(
                f"{infos[0].address} and {info.address} make different block keys; start all nodes with the same "
                f"--key-seed and --key-algorithm"
            )
