"""The server's configuration: a TOML file, then `KVSTORE_*` variables, then flags; the last one wins.

Read once, here, into frozen values that check themselves. No other file sees the environment.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from kvstore.core.errors import ConfigError, UsageError
from kvstore.core.keys import KeyScheme
from kvstore.core.sizes import format_size, parse_size
from kvstore.device.opening import cuda_ordinal
from kvstore.transport.mooncake_engine import PROTOCOLS

CHUNK_BYTES = 256 << 20
CHUNK_BYTES_MAX = 2 << 30
CHUNKS_MIN = 8
DRAM_BYTES_MIN = 256 << 20
DISK_BYTES_MIN = 64 << 20
GPU_BYTES_MIN = 8 << 20
DISK_BYTES_MAX = 64 << 30  # unless told otherwise
_NOT_GIVEN = -1
ADMISSIONS = ("always", "second", "never")
POLICY_NAMES = ("reuse", "lru", "s3fifo")  # those of `kvstore.server.eviction.POLICIES`
SHARE_OF_MEMORY = 4  # the DRAM tier takes one part in four of what is available
SOCKET_PATH_BYTES_MAX = 100  # the kernel's limit is 107; a few are kept for the file name's digits
_MIB = 1 << 20
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def available_memory_bytes() -> int:
    """Memory that this process may use: of the machine, or of its control group where that is less."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    if _GROUP_LIMIT.exists():
        limit = _GROUP_LIMIT.read_text().strip()
        if limit.isdigit():
            available = min(available, int(limit))
    return available


def _default_dram() -> int:
    return max(available_memory_bytes() // SHARE_OF_MEMORY, DRAM_BYTES_MIN) // _MIB * _MIB


def _default_disk(folder: Path) -> int:
    """A quarter of the space that is free where the data folder is or will be."""
    while not folder.exists():
        folder = folder.parent
    space = os.statvfs(folder)
    share = min(space.f_bavail * space.f_frsize // SHARE_OF_MEMORY, DISK_BYTES_MAX) // _MIB * _MIB
    return share if share >= 64 * DISK_BYTES_MIN else 0


def _default_data_dir() -> Path:
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path("~/.local/share").expanduser()) / "kvstore"


def _default_runtime_dir() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return Path(base) / "kvstore"
    return Path(tempfile.gettempdir()) / f"kvstore-{os.geteuid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All settings of `kvstore-server`. Each field's `help` is what users read in `--help` and `config show`."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on; loopback unless told otherwise"})
    control_port: int = field(default=7400, metadata={"help": "gRPC control port; 0 takes a free one"})
    data_port: int = field(default=7401, metadata={"help": "TCP data port; 0 takes a free one"})
    http_port: int = field(default=7402, metadata={"help": "HTTP port: /metrics /health /status; 0 takes a free one"})
    shards: int = field(default=1, metadata={"help": "shards, one process each"})
    data_workers: int = field(default=1, metadata={"help": "processes that serve the data port"})
    dram: int = field(
        default_factory=_default_dram,
        metadata={
            "help": "DRAM tier of all shards together; a quarter of the available memory unless given",
            "size": True,
        },
    )
    policy: str = field(
        default=POLICY_NAMES[0],
        metadata={"help": "what is evicted from DRAM: reuse (forecast from the traffic), lru, s3fifo"},
    )
    chunk: int = field(
        default=CHUNK_BYTES,
        metadata={"help": "unit that the pool is divided in, and the largest block", "size": True},
    )
    disk: int = field(
        default_factory=lambda: _NOT_GIVEN,
        metadata={
            "help": "SSD tier of all shards together, in data_dir; 0: none; a quarter of the free space, at most 64GiB, "
            "unless given",
            "size": True,
        },
    )
    watermark: int = field(
        default=1, metadata={"help": "percent of the DRAM tier kept free ahead of need; 0 evicts only at need"}
    )
    admission: str = field(
        default="second",
        metadata={"help": "what is written to the SSD: always, second (what is used a second time), never"},
    )
    gpu: str = field(
        default="",
        metadata={
            "help": "device of the GPU tier: cuda:0 and so on; host: the host's memory in its place; empty: none"
        },
    )
    gpu_bytes: int = field(
        default=1 << 30,
        metadata={"help": "device memory of all shards together, where there is a GPU tier", "size": True},
    )
    fabric: str = field(
        default="",
        metadata={
            "help": "serve one-sided reads and writes by Mooncake's engine: tcp, rdma; empty: off. It has no "
            "authentication: on a trusted network only"
        },
    )
    fabric_host: str = field(
        default="", metadata={"help": "address under which Mooncake's engine is reached; empty: that of host"}
    )
    fabric_device: str = field(default="", metadata={"help": "network card of Mooncake's engine; empty: all"})
    fabric_landing: int = field(
        default=256 << 20,
        metadata={
            "help": "memory of each shard that Mooncake clients put blocks through; 0: they put over TCP",
            "size": True,
        },
    )
    data_dir: Path = field(default_factory=_default_data_dir, metadata={"help": "folder of what survives a restart"})
    runtime_dir: Path = field(default_factory=_default_runtime_dir, metadata={"help": "folder of local sockets"})
    key_algorithm: str = field(
        default="xxh3-128",
        metadata={"help": "block key hash: xxh3-128, or blake3 where tenants don't trust one another"},
    )
    key_seed: int = field(
        default=-1,
        metadata={
            "help": "seed of the block keys; nodes that clients use together need the same; -1: random, kept in data_dir"
        },
    )
    auth_token: str = field(
        default="", metadata={"help": "clients must show this token to open a session", "secret": True}
    )

    def __post_init__(self) -> None:
        for name in ("control_port", "data_port", "http_port"):
            _require(name, getattr(self, name), 0, 65535)
        ports = [port for port in (self.control_port, self.data_port, self.http_port) if port]
        if len(set(ports)) != len(ports):
            raise ConfigError(f"control_port, data_port and http_port must differ: {ports}")
        _require("shards", self.shards, 1, 64)
        _require("data_workers", self.data_workers, 1, 64)
        if self.chunk % _MIB or not _MIB <= self.chunk <= CHUNK_BYTES_MAX:
            most = format_size(CHUNK_BYTES_MAX)
            raise ConfigError(f"chunk={format_size(self.chunk)}: allowed is a whole number of MiB, up to {most}")
        least = self.shards * CHUNKS_MIN * _MIB
        if self.dram < least:
            raise ConfigError(f"dram={format_size(self.dram)}: at least {format_size(least)} for {self.shards} shards")
        if self.disk == _NOT_GIVEN:
            object.__setattr__(self, "disk", _default_disk(self.data_dir))
        if 0 < self.disk < self.shards * DISK_BYTES_MIN:
            raise ConfigError(
                f"disk={format_size(self.disk)}: allowed is 0 (none) or at least {format_size(self.shards * DISK_BYTES_MIN)}"
            )
        _require("watermark", self.watermark, 0, 50)
        if self.policy not in POLICY_NAMES:
            raise ConfigError(f"policy={self.policy!r}: allowed is one of {', '.join(POLICY_NAMES)}")
        if self.admission not in ADMISSIONS:
            raise ConfigError(f"admission={self.admission!r}: allowed is one of {', '.join(ADMISSIONS)}")
        if self.gpu:
            cuda_ordinal(self.gpu)
        if self.gpu and self.gpu_bytes < self.shards * GPU_BYTES_MIN:
            least = format_size(self.shards * GPU_BYTES_MIN)
            raise ConfigError(
                f"gpu_bytes={format_size(self.gpu_bytes)}: at least {least} for {self.shards} shards, or gpu empty"
            )
        if self.fabric not in ("", *PROTOCOLS):
            raise ConfigError(f"fabric={self.fabric!r}: allowed is one of {', '.join(PROTOCOLS)}, or empty for off")
        if self.fabric and (self.fabric_address in {"0.0.0.0", ""} or ":" in self.fabric_address):
            raise ConfigError(
                f"fabric_host={self.fabric_host!r}: name the IPv4 address that clients reach; host={self.host!r} is none"
            )
        _require("fabric_landing", self.fabric_landing, 0, 1 << 40)
        if not -1 <= self.key_seed < 1 << 64:
            raise ConfigError(f"key_seed={self.key_seed}: allowed is -1 (random) or 0 to 2**64 - 1")
        try:
            KeyScheme(cast("Any", self.key_algorithm))
        except UsageError as error:
            raise ConfigError(f"key_algorithm: {error}") from error
        if len(os.fsencode(self.runtime_dir)) > SOCKET_PATH_BYTES_MAX - 40:
            raise ConfigError(
                f"runtime_dir={str(self.runtime_dir)!r}: too long for a socket path; at most {SOCKET_PATH_BYTES_MAX - 40} bytes"
            )

    def endpoint(self, port: int) -> str:
        """`host:port`, as addresses are written: IPv6 in brackets."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @property
    def fabric_address(self) -> str:
        """Where Mooncake's engine is reached."""
        return self.fabric_host or self.host

    @property
    def landing_bytes_per_worker(self) -> int:
        """Each data port worker's part of a shard's landing space."""
        return self.fabric_landing // self.data_workers if self.fabric else 0

    @property
    def pool_bytes_per_shard(self) -> int:
        """Each shard's part of the DRAM tier, in whole chunks."""
        return self.dram // self.shards // self.chunk_bytes * self.chunk_bytes

    @property
    def watermark_bytes_per_shard(self) -> int:
        """What each shard keeps free."""
        return self.pool_bytes_per_shard * self.watermark // 100

    @property
    def disk_bytes_per_shard(self) -> int:
        """Each shard's part of the SSD tier."""
        return self.disk // self.shards

    @property
    def gpu_bytes_per_shard(self) -> int:
        """Each shard's part of the GPU tier."""
        return self.gpu_bytes // self.shards if self.gpu else 0

    @property
    def chunk_bytes(self) -> int:
        """The chunk in force: smaller than asked for where the pool is too small for several."""
        largest = self.dram // self.shards // CHUNKS_MIN >> 20 << 20
        return min(self.chunk, largest)

    def show(self) -> dict[str, str | int]:
        """All settings as text, secrets hidden."""
        shown: dict[str, str | int] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.metadata.get("secret"):
                shown[spec.name] = "(set)" if value else ""
            elif spec.metadata.get("size"):
                shown[spec.name] = format_size(value)
            else:
                shown[spec.name] = value if isinstance(value, int) else str(value)
        return shown


def load(arguments: argparse.Namespace, environment: Mapping[str, str]) -> ServerConfig:
    """The configuration in force.

    Raises:
        ConfigError: names the file, key, variable or flag, its value, and what is allowed.
    """
    path = arguments.config or environment.get("KVSTORE_CONFIG")
    values: dict[str, Any] = _from_file(Path(path)) if path else {}
    names = {spec.name for spec in fields(ServerConfig)}
    for variable, text in environment.items():
        name = variable.removeprefix("KVSTORE_").lower()
        if variable.startswith("KVSTORE_") and name in names:
            values[name] = _convert(variable, name, text)
    for name in names:
        text = getattr(arguments, name, None)
        if text is not None:
            values[name] = _convert(f"--{name.replace('_', '-')}", name, text)
    return ServerConfig(**values)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per setting, and `--config`."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with these settings, names with underscores")
    for spec in fields(ServerConfig):
        kind = "SIZE" if spec.metadata.get("size") else "DIR" if spec.name.endswith("_dir") else "VALUE"
        parser.add_argument(f"--{spec.name.replace('_', '-')}", metavar=kind, help=spec.metadata["help"])


def _from_file(path: Path) -> dict[str, Any]:
    try:
        read = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not TOML: {error}") from error
    names = [spec.name for spec in fields(ServerConfig)]
    unknown = sorted(set(read) - set(names))
    if unknown:
        raise ConfigError(f"config file {str(path)!r}: unknown key {unknown[0]!r}; allowed are {', '.join(names)}")
    return {name: _convert(f"config file {str(path)!r}: {name}", name, value) for name, value in read.items()}


_CONVERSIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "str": (str, "text"),
    "Path": (lambda text: Path(text).expanduser(), "a path"),
}


def _convert(source: str, name: str, value: object) -> Any:
    """A setting's value from text, or from TOML's own types."""
    spec = next(spec for spec in fields(ServerConfig) if spec.name == name)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{source}: {value!r} is neither text nor a number")
    if spec.metadata.get("size"):
        return _size(source, value)
    convert, allowed = _CONVERSIONS[str(spec.type)]
    try:
        return convert(str(value))
    except (ValueError, RuntimeError) as error:  # the latter from a path in the home of a user that isn't known
        raise ConfigError(f"{source}: {value!r} is not allowed; {allowed} is") from error


def _size(source: str, text: str | int) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _require(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name}={value}: allowed is {least} to {most}")
