"""A node: the process that starts the shards and the data port's workers, watches them, and serves control and HTTP.

It holds no block and stands on no hot path: clients talk to shards and workers directly. A shard that dies is started
again, empty, under a new boot id; the others go on.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import re
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvstore.core.errors import ConfigError, KvStoreError, Unavailable, UsageError
from kvstore.core.keys import BlockKeys, KeyScheme
from kvstore.core.namespace import DEFAULT_TENANT
from kvstore.core.sizes import format_size
from kvstore.core.states import BlockState
from kvstore.device.opening import require_device
from kvstore.server.children import Child
from kvstore.server.config import ServerConfig
from kvstore.server.control import ControlService, serve_control
from kvstore.server.http import StatusServer
from kvstore.server.shard.process import TENANT_PATTERN, ShardConfig
from kvstore.transport.channel import RECEIVE_BUFFER_BYTES, Deadline
from kvstore.transport.memory import create_segment
from kvstore.transport.mooncake_engine import engine_problem
from kvstore.transport.shm import ShardCalls, connect_local
from kvstore.wire.control import BlockInfo, NodeInfo, ShardInfo, TenantQuota
from kvstore.wire.frames import Op
from kvstore.wire.messages import ANY_NAMESPACE, KeyRequest
from kvstore.wire.tokens import issue_token

log = logging.getLogger("kvstore")

R = TypeVar("R")

READY_TIMEOUT_S = 30.0
SHARD_TIMEOUT_S = 2.0
WATCH_S = 0.2
SIGNAL_S = 0.5
CALLS_GRACE_S = 0.5
RESTART_PAUSE_S = 1.0  # a shard that dies at once is not started in a tight loop
_LOCK_FILE = "lock"
_NODE_FILE = "node.json"
_QUOTA_FILE = "quotas.json"


class DataDir:
    """The folder that survives restarts: who this node is, its key seed, how often it has started.

    Raises:
        ConfigError: can't be made or written, or another server uses it.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / _LOCK_FILE).open("w")
        except OSError as error:
            raise ConfigError(
                f"data_dir={str(path)!r}: {error.strerror}; name a folder that this user may write"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"data_dir={str(path)!r}: another kvstore-server uses it") from error
        self._read(path / _NODE_FILE)
        self._write(path / _NODE_FILE, {"node_id": self.node_id, "epoch": self.epoch, "key_seed": self.key_seed})
        self._quota_path = path / _QUOTA_FILE
        self.quotas = self._read_quotas()

    def keep_quotas(self, quotas: dict[str, TenantQuota]) -> None:
        """These quotas, by tenant, hold from now on.

        Raises:
            ConfigError: can't be written; the former ones stay.
        """
        self._write(self._quota_path, {tenant: asdict(quota) for tenant, quota in quotas.items()})
        self.quotas = quotas

    def close(self) -> None:
        """Let another server use the folder."""
        self._lock.close()

    def _read(self, path: Path) -> None:
        try:
            known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
            self.node_id = str(known.get("node_id") or uuid.uuid4())
            self.epoch = int(known.get("epoch", 0)) + 1
            self.key_seed = KeyScheme(seed=known.get("key_seed", secrets.randbits(63))).seed
        except (OSError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: unreadable ({error}); remove it to start as a new node") from error

    def _read_quotas(self) -> dict[str, TenantQuota]:
        path = self._quota_path
        try:
            known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
            return {tenant: TenantQuota(**quota) for tenant, quota in known.items()}
        except (OSError, AttributeError, TypeError, ValueError, UsageError) as error:
            raise ConfigError(f"{path}: unreadable ({error}); remove it to start without quotas") from error

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        fresh = path.with_suffix(".new")
        try:
            with fresh.open("w") as file:
                json.dump(value, file)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error


class ShardHandle:
    """A shard's process and a line to it for administration."""

    def __init__(
        self, number: int, config: ServerConfig, socket_path: Path, quotas: Callable[[], dict[str, list[int]]]
    ) -> None:
        self.number = number
        self.socket_path = socket_path
        self._quotas = quotas
        self._config = config
        self._calls: ShardCalls | None = None
        self._lock = threading.Lock()
        self.boot_id = ""
        self.child = self._start()

    def call(self, action: Callable[[ShardCalls, Deadline], R]) -> R:
        """Ask the shard, over a connection that is made anew when it broke.

        Raises:
            Unavailable: it does not answer in time.
        """
        deadline = Deadline(SHARD_TIMEOUT_S)
        with self._lock:
            if self._calls is None or not self._calls.channel.usable:
                self._calls = ShardCalls(connect_local(str(self.socket_path), deadline))
            return action(self._calls, deadline)

    def restart(self) -> None:
        """After its death: a new one, empty, under a new boot id."""
        self.child.stop()
        self.socket_path.unlink(missing_ok=True)
        self.child = self._start()
        self.child.wait_ready(READY_TIMEOUT_S)

    def info(self) -> ShardInfo:
        """What clients are told."""
        pool, chunk = self._config.pool_bytes_per_shard, self._config.chunk_bytes
        return ShardInfo(self.number, self.boot_id, str(self.socket_path), pool, chunk)

    def stop(self) -> None:
        """End the process."""
        self.child.stop()
        self.socket_path.unlink(missing_ok=True)

    def _start(self) -> Child:
        self.boot_id = uuid.uuid4().hex
        described = ShardConfig(
            shard=self.number,
            boot_id=self.boot_id,
            socket_path=str(self.socket_path),
            pool_bytes=self._config.pool_bytes_per_shard,
            chunk_bytes=self._config.chunk_bytes,
            policy=self._config.policy,
            disk_dir=str(self._config.data_dir / f"shard-{self.number}"),
            disk_bytes=self._config.disk_bytes_per_shard,
            admission=self._config.admission,
            watermark_bytes=self._config.watermark_bytes_per_shard,
            gpu=self._config.gpu,
            gpu_bytes=self._config.gpu_bytes_per_shard,
        )
        # Read now, not when the node started: a shard that is started again must know the quotas set meanwhile.
        described = {**asdict(described), "quotas": self._quotas()}
        return Child(f"shard {self.number}", "kvstore.server.shard.process", described)


class FabricHandle:
    """A shard's fabric worker, and the landing space that it shares with the data port workers."""

    def __init__(self, config: ServerConfig, shard: ShardHandle) -> None:
        self._config = config
        self._shard = shard
        self.socket_path = shard.socket_path.with_name(f"{shard.socket_path.stem}-fabric.sock")
        self.landing_fd = create_segment(
            f"kvstore-landing-{shard.number}", max(mmap.PAGESIZE, config.landing_bytes_per_worker * config.data_workers)
        )
        self.child = self._start()

    def restart(self) -> None:
        """After its death."""
        self.child.stop()
        self.socket_path.unlink(missing_ok=True)
        self.child = self._start()
        self.child.wait_ready(READY_TIMEOUT_S)

    def stop(self) -> None:
        """End the process."""
        self.child.stop()
        self.socket_path.unlink(missing_ok=True)
        os.close(self.landing_fd)

    def _start(self) -> Child:
        config = self._config
        described = {
            "socket_path": str(self.socket_path),
            "shard_socket": str(self._shard.socket_path),
            "landing_fd": self.landing_fd,
            "host": config.fabric_address,
            "protocol": config.fabric,
            "device": config.fabric_device,
        }
        name = f"fabric worker of shard {self._shard.number}"
        return Child(name, "kvstore.server.fabric", described, pass_fds=[self.landing_fd])


class Node:
    """See the module. `start`, then `wait`, then `stop`."""

    def __init__(self, config: ServerConfig, version: str) -> None:
        self._config = config
        self._version = version
        self._started_s = time.monotonic()
        self.boot_id = uuid.uuid4().hex
        self._token_key = secrets.token_bytes(32)
        self._stopping = threading.Event()
        self._quota_lock = threading.Lock()
        self._cleanups: list[Callable[[], object]] = []
        self._shards: list[ShardHandle] = []
        self._fabrics: list[FabricHandle] = []
        self._workers: list[Child] = []
        self.control_port = 0
        self.data_port = 0
        self.http_port = 0

    def start(self) -> None:
        """Bring everything up; on failure nothing is left running.

        Raises:
            ConfigError: a port, folder or size can't be had; one line says which.
        """
        try:
            self._start()
        except BaseException:  # Ctrl-C too: processes that were started must not outlive us
            self.stop()
            raise

    def wait(self) -> None:
        """Until `request_stop`."""
        # Not one endless wait: the kernel may hand a signal to another thread (right after a SIGCONT it often does),
        # and Python runs its handler only when the main thread next wakes up.
        while not self._stopping.wait(SIGNAL_S):
            pass

    def request_stop(self) -> None:
        """Make `wait` return; safe in a signal handler."""
        self._stopping.set()

    def stop(self) -> None:
        """End all processes and remove the sockets."""
        self._stopping.set()
        while self._cleanups:
            self._cleanups.pop()()

    # --- what the control plane and the HTTP port ask ----------------------------------------------------------------

    def describe(self) -> NodeInfo:
        """The answer to HELLO, with a fresh token."""
        host = self._config.host
        return NodeInfo(
            address=self._config.endpoint(self.control_port),
            node_id=self._data_dir.node_id,
            boot_id=self.boot_id,
            epoch=self._data_dir.epoch,
            scheme=self._scheme,
            token=issue_token(self._token_key, self.boot_id, secrets.token_bytes(16), time.time()),
            data_host="" if host in {"0.0.0.0", "::", ""} else host,
            data_port=self.data_port,
            shards=tuple(shard.info() for shard in self._shards),
            fabric=self._config.fabric,
        )

    def status(self) -> dict[str, Any]:
        """Everything about this node as JSON-able values."""
        shards: list[dict[str, Any]] = []
        down: list[int] = []
        for shard in self._shards:
            try:
                shards.append(shard.call(lambda calls, deadline: calls.stats(deadline)))
            except KvStoreError:
                down.append(shard.number)
        return {
            "version": self._version,
            "node_id": self._data_dir.node_id,
            "boot_id": self.boot_id,
            "epoch": self._data_dir.epoch,
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "healthy": not down
            and all(child.alive for child in (*self._workers, *(fabric.child for fabric in self._fabrics))),
            "endpoints": self.endpoints(),
            "fabric": self._config.fabric,
            "key_algorithm": self._scheme.algorithm,
            "tenants": _tenants(shards, self._data_dir.quotas),
            "shards": shards,
            "shards_down": down,
        }

    def endpoints(self) -> dict[str, str]:
        """Where to reach this node."""
        endpoint = self._config.endpoint
        return {
            "control": endpoint(self.control_port),
            "data": endpoint(self.data_port),
            "http": f"http://{endpoint(self.http_port)}",
        }

    def query(self, keys: BlockKeys) -> list[BlockInfo]:
        """Where each block stands, whichever shard has it."""
        found = [BlockInfo(-1, BlockState.ABSENT, 0, 0)] * len(keys)
        for shard in self._shards:
            request = KeyRequest(ANY_NAMESPACE, keys.array)
            rows = shard.call(lambda calls, deadline, request=request: calls.lookup(request, deadline))
            for place in np.flatnonzero(rows["state"]).tolist():
                row = rows[place]
                state = BlockState(int(row["state"]))
                found[place] = BlockInfo(shard.number, state, int(row["layers_ready"]), int(row["size"]))
        return found

    def pin(self, keys: BlockKeys, *, on: bool) -> int:
        """Add or take off a pin; how many blocks are there."""
        return self._ask(Op.PIN, KeyRequest(ANY_NAMESPACE, keys.array, flag=int(on)))

    def delete(self, keys: BlockKeys) -> int:
        """Remove blocks; how many were there."""
        return self._ask(Op.DELETE, KeyRequest(ANY_NAMESPACE, keys.array))

    def flush(self, digest: bytes) -> int:
        """Remove a namespace (empty: all); how many blocks."""
        return sum(shard.call(lambda calls, deadline: calls.flush(digest, deadline)) for shard in self._shards)

    def set_quota(self, tenant: str, quota: TenantQuota) -> None:
        """Say what a tenant may have, from now on and after restarts.

        Raises:
            UsageError: no name of a tenant, or shares that add up to more than there is.
            Unavailable: a shard does not answer; the others know it, and it is kept.
        """
        if not re.fullmatch(TENANT_PATTERN, tenant):
            raise UsageError(f"tenant {tenant[:40]!r}: allowed is {TENANT_PATTERN}, as the status shows it")
        with self._quota_lock:
            quotas = {**self._data_dir.quotas, tenant: quota}
            for tier, capacity in (("dram", self._config.dram), ("disk", self._config.disk)):
                shares = sum(getattr(each, f"{tier}_share") for each in quotas.values())
                if shares > capacity:
                    raise UsageError(
                        f"{tier} shares of {format_size(shares)} in all: there are {format_size(capacity)} in this tier"
                    )
            self._data_dir.keep_quotas({name: each for name, each in quotas.items() if each != TenantQuota()})
            told = self._quotas_per_shard()
            silent: list[str] = []
            for shard in self._shards:
                try:
                    shard.call(lambda calls, deadline: calls.set_quotas(told, deadline))
                except KvStoreError:
                    silent.append(str(shard.number))
            if silent:
                raise Unavailable(
                    f"shard {', '.join(silent)} does not answer: the quota is kept, and holds there after its restart, "
                    "or when it is set again"
                )

    # --- inside ------------------------------------------------------------------------------------------------------

    def _quotas_per_shard(self) -> dict[str, list[int]]:
        """Keys are spread evenly, so each shard has an equal part of every quota."""
        shards = self._config.shards
        return {
            tenant: [-(-amount // shards) for amount in astuple(quota)]
            for tenant, quota in self._data_dir.quotas.items()
        }

    def _ask(self, op: Op, request: KeyRequest) -> int:
        return sum(
            int(np.count_nonzero(shard.call(lambda calls, deadline: calls.ask(op, request, deadline))))
            for shard in self._shards
        )

    def _start(self) -> None:
        config = self._config
        if config.gpu:
            require_device(config.gpu)
        if config.fabric:
            _warn_of_fabric(config)
        self._data_dir = DataDir(config.data_dir)
        self._cleanups.append(self._data_dir.close)
        seed = config.key_seed if config.key_seed >= 0 else self._data_dir.key_seed
        self._scheme = KeyScheme(config.key_algorithm, seed)  # pyright: ignore[reportArgumentType] -- checked by ServerConfig
        _prepare_runtime_dir(config.runtime_dir)
        # Before the shards start, and because gRPC would complain in lines of its own.
        _listen("control port", config.host, config.control_port).close()
        _listen("HTTP port", config.host, config.http_port).close()
        listener = _listen("data port", config.host, config.data_port)
        self._cleanups.append(listener.close)
        self.data_port = listener.getsockname()[1]
        for number in range(config.shards):
            path = config.runtime_dir / f"shard-{number}-{os.getpid()}-{self.boot_id[:8]}.sock"
            shard = ShardHandle(number, config, path, self._quotas_per_shard)
            self._cleanups.append(shard.stop)
            self._shards.append(shard)
        starting = [shard.child for shard in self._shards]
        if config.fabric:
            _wait_ready(starting)
            for shard in self._shards:
                self._fabrics.append(FabricHandle(config, shard))
                self._cleanups.append(self._fabrics[-1].stop)
            starting = [fabric.child for fabric in self._fabrics]
        self._cleanups.append(self._stop_workers)
        self._workers += [self._start_worker(listener, number) for number in range(config.data_workers)]
        _wait_ready([*starting, *self._workers])
        service = ControlService(self, config.auth_token, self._version)
        server, self.control_port = serve_control(service, config.endpoint(config.control_port))
        self._cleanups.append(lambda: server.stop(grace=CALLS_GRACE_S).wait())
        http = StatusServer(config.host, config.http_port, self.status)
        self.http_port = http.server_address[1]
        threading.Thread(target=http.serve_forever, name="http", daemon=True).start()
        self._cleanups.append(http.server_close)
        self._cleanups.append(http.shutdown)
        watcher = threading.Thread(target=self._watch, args=(listener,), name="watch", daemon=True)
        watcher.start()
        self._cleanups.append(watcher.join)

    def _start_worker(self, listener: socket.socket, number: int) -> Child:
        landing_fds = [fabric.landing_fd for fabric in self._fabrics]
        configuration = {
            "listener_fd": listener.fileno(),
            "boot_id": self.boot_id,
            "token_key": self._token_key.hex(),
            "shard_sockets": [str(shard.socket_path) for shard in self._shards],
            "fabric_sockets": [str(fabric.socket_path) for fabric in self._fabrics],
            "landing_fds": landing_fds,
            "landing_start": number * self._config.landing_bytes_per_worker,
            "landing_bytes": self._config.landing_bytes_per_worker,
        }
        fds = [listener.fileno(), *landing_fds]
        return Child("data port worker", "kvstore.server.data_port", configuration, pass_fds=fds)

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.stop()

    def _watch(self, listener: socket.socket) -> None:
        """Start again what has died, until the node stops."""
        while not self._stopping.wait(WATCH_S):
            try:
                for shard in self._shards:
                    if not shard.child.alive:
                        log.error("shard %d died; starting it again, empty", shard.number)
                        shard.restart()
                for place, worker in enumerate(self._workers):
                    if not worker.alive:
                        log.error("a data port worker died; starting it again")
                        worker.stop()
                        self._workers[place] = self._start_worker(listener, place)
                        self._workers[place].wait_ready(READY_TIMEOUT_S)
                for fabric in self._fabrics:
                    if not fabric.child.alive:
                        log.error("a %s ended; starting it again", fabric.child.name)
                        fabric.restart()
            except (Unavailable, OSError) as error:
                log.error("restart failed: %s; trying again", error)
                self._stopping.wait(RESTART_PAUSE_S)


def _wait_ready(children: Sequence[Child]) -> None:
    for child in children:
        child.wait_ready(READY_TIMEOUT_S)


def _warn_of_fabric(config: ServerConfig) -> None:
    """Say what is being opened.

    Raises:
        ConfigError: Mooncake's engine can't be had.
    """
    problem = engine_problem()
    if problem:
        raise ConfigError(f"fabric={config.fabric!r}: {problem}")
    log.warning(
        "fabric=%s: Mooncake's engine listens on all addresses of this host and asks nobody who he is: "
        "whoever reaches its ports reads every block. Keep them to a trusted network (docs/operating.md)",
        config.fabric,
    )


def _tenants(shards: list[dict[str, Any]], quotas: dict[str, TenantQuota]) -> list[dict[str, Any]]:
    """What each tenant has over all shards, and its quota; those with a quota first, then the largest."""
    found: dict[str, dict[str, Any]] = {}
    for tenant in [*quotas, DEFAULT_TENANT, *(row["tenant"] for shard in shards for row in shard["quotas"])]:
        quota = quotas.get(tenant, TenantQuota())
        found[tenant] = {
            "tenant": tenant,
            "dram": {"used": 0, "limit": quota.dram_limit, "share": quota.dram_share, "refused": 0},
            "disk": {"used": 0, "limit": quota.disk_limit, "share": quota.disk_share, "refused": 0},
        }
    for shard in shards:
        for tier, rows in (("dram", shard["quotas"]), ("disk", shard.get("disk", {}).get("quotas", []))):
            for row in rows:
                if row["tenant"] in found:
                    found[row["tenant"]][tier]["used"] += row["used"]
                    found[row["tenant"]][tier]["refused"] += row["refused"]
    return sorted(found.values(), key=lambda row: (row["tenant"] not in quotas, -row["dram"]["used"]))


def _prepare_runtime_dir(path: Path) -> None:
    """Make the folder of local sockets, for this user alone, and remove sockets that nobody listens on any more."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat()
    except OSError as error:
        raise ConfigError(f"runtime_dir={str(path)!r}: {error.strerror}") from error
    if owner.st_uid != os.geteuid():
        raise ConfigError(f"runtime_dir={str(path)!r} belongs to user {owner.st_uid}; name a folder of your own")
    path.chmod(0o700)
    for stale in path.glob("shard-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(stale))
            except (ConnectionRefusedError, FileNotFoundError):
                stale.unlink(missing_ok=True)
            except OSError:
                continue  # somebody listens, if slowly: not ours to remove


def _listen(name: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)  # its connections inherit it
        listener.bind((host, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{name} {host}:{port}: {error.strerror}") from error
    return listener
