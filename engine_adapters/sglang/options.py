"""The adapter's own options, as they stand in SGLang's `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from kvstore import UsageError

__all__ = ["ENGINE_KEYS", "Options"]

ENGINE_KEYS = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size", "extra_backend_tag"}
)
"""What the engine itself reads from the same JSON."""

_TRANSPORTS = ("auto", "shm", "mooncake", "tcp")
_TIMEOUT_S_MIN, _TIMEOUT_S_MAX = 0.001, 60.0  # the engine waits for its storage threads: minutes would stop it


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Checked options. The auth token comes from `KVSTORE_AUTH_TOKEN`, for the engine prints its arguments.

    Raises UsageError naming the option, its value and what is allowed.
    """

    revision: str  # of the weights: a commit or digest
    address: str | tuple[str, ...] = "local"
    model: str = ""  # which weights, as all workers name them; the engine's model path if that is no local folder
    adapter: str = ""  # which version of the LoRA adapters of `--lora-paths`
    tenant: str = ""  # salt that keeps tenants apart
    timeout_s: float = 2.0  # bound of every call
    transport: str = "auto"
    checksums: bool = False

    def __post_init__(self) -> None:
        for name in ("revision", "model", "adapter", "tenant"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name}={getattr(self, name)!r}: allowed is text")
        if not self.revision:
            raise UsageError("revision='': allowed is the commit or digest of the weights; stale KV has no other guard")
        addresses = (self.address,) if isinstance(self.address, str) else self.address
        if not addresses or not all(isinstance(address, str) and address for address in addresses):
            raise UsageError(f"address={self.address!r}: allowed is 'host:port', several of them, or 'local'")
        timeout_s: object = self.timeout_s
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or math.isnan(timeout_s):
            raise UsageError(f"timeout_s={timeout_s!r}: allowed is a number of seconds")
        if not _TIMEOUT_S_MIN <= timeout_s <= _TIMEOUT_S_MAX:
            raise UsageError(f"timeout_s={timeout_s!r}: allowed is {_TIMEOUT_S_MIN:g} to {_TIMEOUT_S_MAX:g} seconds")
        if self.transport not in _TRANSPORTS:
            raise UsageError(f"transport={self.transport!r}: allowed is one of {', '.join(_TRANSPORTS)}")
        if not isinstance(self.checksums, bool):
            raise UsageError(f"checksums={self.checksums!r}: allowed is true or false")

    @property
    def connection(self) -> dict[str, Any]:
        """Arguments of `kvstore.connect`, but for the namespace."""
        return {
            "address": self.address if isinstance(self.address, str) else list(self.address),
            "timeout_s": self.timeout_s,
            "transport": self.transport,
            "checksums": self.checksums,
        }

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any] | None) -> Options:
        """The options in the engine's extra config, which holds the engine's own keys too."""
        told = {name: value for name, value in (extra_config or {}).items() if name not in ENGINE_KEYS}
        known = [spec.name for spec in fields(cls)]
        for name in told:
            if name not in known:
                raise UsageError(f"option {name!r}: not known; the options are {', '.join(known)}")
        if "revision" not in told:
            raise UsageError("option 'revision' is missing: name the commit or digest of the weights")
        if isinstance(told.get("address"), list):  # JSON has no tuples
            told["address"] = tuple(cast("Sequence[str]", told["address"]))
        return cls(**told)
