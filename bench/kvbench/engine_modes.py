"""The ways that `kvbench engine` fills and finds a cache: for each, the connector's configuration and its servers.

All servers listen on loopback, on ports that are free, and are given as much memory.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

from kvbench.engine_process import free_ports, server_process
from kvbench.errors import BenchError
from kvstore.testing.cluster import ServerProcess

_SHM: Final = Path("/dev/shm")


class Mode(StrEnum):
    """Who has the KV."""

    COLD = "cold"
    PREFIX_CACHE = "prefix_cache"
    KVSTORE = "kvstore"
    MOONCAKE_STORE = "mooncake_store"
    LMCACHE_MP = "lmcache_mp"
    EXAMPLE_CONNECTOR = "example_connector"


@dataclass(frozen=True, slots=True)
class Bench:
    """What the modes are given."""

    python: Path  # of vLLM's environment
    versions: Mapping[str, str]  # of its packages
    pool_gib: int  # that each store has room for
    revision: str  # of the model
    folder: Path  # for logs and configurations, removed at the end


@dataclass(frozen=True, slots=True)
class Store:
    """A store that runs."""

    connector: Mapping[str, Any]  # vLLM's KVTransferConfig
    environment: Mapping[str, str] = field(default_factory=dict[str, str])  # of the engine
    pids: tuple[int, ...] = ()  # of its servers


class Opening(Protocol):
    """Starts a store; it ends with the context."""

    def __call__(self, bench: Bench) -> AbstractContextManager[Store]: ...


@contextmanager
def _kvstore(bench: Bench) -> Iterator[Store]:
    server = ServerProcess(dram=f"{bench.pool_gib}GiB")
    try:
        _start(server)
        connector = {
            "kv_connector": "KvStoreConnector",
            "kv_connector_module_path": "engine_adapters.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"address": server.address, "revision": bench.revision},
        }
        yield Store(connector, pids=(server.pid,))
    finally:
        server.close()


def _start(server: ServerProcess) -> None:
    """With all its memory present, as the peers' is."""
    try:
        server.start()
        server.wait_warm()
    except (RuntimeError, TimeoutError) as cause:
        raise BenchError(f"kvstore-server: {cause}") from cause


@contextmanager
def _mooncake_store(bench: Bench) -> Iterator[Store]:
    """Its standalone store over tcp, the mode that runs without a GPU.

    Its metadata server and its transfers listen on all interfaces while it runs, whatever it is told here.
    """
    _require(bench, "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
    master, metrics, metadata, client, http = free_ports(5)
    binaries = bench.python.parent
    local = {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}
    configuration = {
        "mode": "standalone-store",
        "metadata_server": f"http://127.0.0.1:{metadata}/metadata",
        "master_server_address": f"127.0.0.1:{master}",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": 0,
        "local_buffer_size": "512MB",
    }
    path = bench.folder / "mooncake.json"
    path.write_text(json.dumps(configuration), encoding="utf-8")
    with ExitStack() as stack:
        commands = {
            master: (
                str(binaries / "mooncake_master"),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={master}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={metrics}",
                "--enable_http_metadata_server=true",
                "--http_metadata_server_host=127.0.0.1",
                f"--http_metadata_server_port={metadata}",
            ),
            client: (
                str(binaries / "mooncake_client"),
                "--host=127.0.0.1",
                f"--port={client}",
                f"--http_port={http}",
                f"--global_segment_size={bench.pool_gib}GB",
                f"--master_server_address=127.0.0.1:{master}",
                f"--metadata_server=http://127.0.0.1:{metadata}/metadata",
                "--protocol=tcp",
            ),
        }
        pids = [
            stack.enter_context(server_process(command, port, bench.folder / f"{Path(command[0]).name}.log", local))
            for port, command in commands.items()
        ]
        connector = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
        yield Store(connector, {"MOONCAKE_CONFIG_PATH": str(path), **local}, tuple(pids))


@contextmanager
def _lmcache_mp(bench: Bench) -> Iterator[Store]:
    """Its server in a process of its own, KV through shared memory: its fastest way without a GPU."""
    _require(bench, "lmcache")
    port, http = free_ports(2)
    segment = f"kvbench-{port}-{bench.folder.name}"
    command = (
        *(str(bench.python.parent / "lmcache"), "server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--http-host", "127.0.0.1", "--http-port", str(http)),
        *("--l1-size-gb", str(bench.pool_gib), "--no-l1-use-lazy", "--shm-name", segment),
        *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto", "--disable-observability"),
    )
    quiet = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
    try:
        with server_process(command, port, bench.folder / "lmcache.log", quiet) as pid:
            connector = {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
            }
            yield Store(connector, quiet, (pid,))
    finally:
        for left in _SHM.glob(f"*{segment}*"):
            left.unlink(missing_ok=True)


@contextmanager
def _example_connector(bench: Bench) -> Iterator[Store]:
    """The example that vLLM carries: files in memory, one a layer, written and read by the engine itself."""
    if not _SHM.is_dir():
        raise BenchError(f"there is no {_SHM}, where its files belong")
    folder = Path(tempfile.mkdtemp(prefix=f"kvbench-{bench.folder.name}-", dir=_SHM))
    try:
        yield Store(
            {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(folder)},
            }
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require(bench: Bench, *packages: str) -> None:
    """Any of these."""
    if not set(packages) & set(bench.versions):
        raise BenchError(f"package {packages[0]} is not installed in the environment of {bench.python}")


STORES: Final[Mapping[Mode, Opening]] = {
    Mode.KVSTORE: _kvstore,
    Mode.MOONCAKE_STORE: _mooncake_store,
    Mode.LMCACHE_MP: _lmcache_mp,
    Mode.EXAMPLE_CONNECTOR: _example_connector,
}
PEERS: Final = frozenset({Mode.MOONCAKE_STORE, Mode.LMCACHE_MP, Mode.EXAMPLE_CONNECTOR})
