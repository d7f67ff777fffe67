"""The plugin's own options, as they stand in LMCache's `extra_config`, and what of LMCache's own it can't work with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore import UsageError

__all__ = ["PLUGIN", "Options", "check_engine"]

PLUGIN = "kvstore"
"""What the plugin is called in `remote_storage_plugins`, alone or with an instance behind a dot."""

_LOADING = frozenset({"module_path", "class_name"})  # LMCache's own options of a plugin
_TRANSPORTS = ("auto", "shm", "mooncake", "tcp")
_TIMEOUT_S_MIN = 0.001
_SERDE = "naive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Checked options. The auth token comes from `KVSTORE_AUTH_TOKEN`, for LMCache logs its configuration.

    Raises UsageError naming the option, its value and what is allowed.
    """

    revision: str  # of the weights: a commit or digest
    address: str = "local"
    model: str = ""  # which weights, as all workers name them; the engine's model unless that is a local folder
    tenant: str = ""  # salt that keeps tenants apart
    timeout_s: float = 2.0  # bound of every call
    transport: str = "auto"
    checksums: bool = False

    def __post_init__(self) -> None:
        for name in ("revision", "address", "model", "tenant"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name}={getattr(self, name)!r}: allowed is text")
        if not self.revision:
            raise UsageError("revision='': allowed is the commit or digest of the weights; stale KV has no other guard")
        if not self.address:
            raise UsageError("address='': allowed is 'host:port', several of them with commas between, or 'local'")
        timeout_s: object = self.timeout_s
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not math.isfinite(timeout_s):
            raise UsageError(f"timeout_s={timeout_s!r}: allowed is a number of seconds")
        if timeout_s < _TIMEOUT_S_MIN:
            raise UsageError(f"timeout_s={timeout_s!r}: allowed is {_TIMEOUT_S_MIN:g} seconds or more")
        if self.transport not in _TRANSPORTS:
            raise UsageError(f"transport={self.transport!r}: allowed is one of {', '.join(_TRANSPORTS)}")
        if not isinstance(self.checksums, bool):
            raise UsageError(f"checksums={self.checksums!r}: allowed is true or false")

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any] | None, plugin: str) -> Options:
        """The options of the plugin with that full name: `remote_storage_plugin.NAME.OPTION`."""
        prefix = f"remote_storage_plugin.{plugin}."
        told = {
            key.removeprefix(prefix): value for key, value in (extra_config or {}).items() if key.startswith(prefix)
        }
        told = {name: value for name, value in told.items() if name not in _LOADING}
        known = [spec.name for spec in fields(cls)]
        for name in told:
            if name not in known:
                raise UsageError(f"option {prefix + name!r}: not known; the options are {', '.join(known)}")
        if "revision" not in told:
            raise UsageError(f"option {prefix + 'revision'!r} is missing: name the commit or digest of the weights")
        return cls(**told)

    @property
    def connection(self) -> dict[str, Any]:
        """Arguments of `kvstore.connect`."""
        names = ("address", "timeout_s", "transport", "checksums")
        return {name: getattr(self, name) for name in names}


def check_engine(config: Any, options: Options) -> None:
    """Refuse what this plugin would only seem to support.

    Args:
        config: LMCache's `LMCacheEngineConfig`.
        options: the plugin's.

    Raises:
        UsageError: naming LMCache's setting, its value and what is allowed.
    """
    if config.use_layerwise:
        raise UsageError("use_layerwise=True: allowed is False, chunks go to the store whole")
    if config.remote_serde not in (None, _SERDE):
        raise UsageError(f"remote_serde={config.remote_serde!r}: allowed is {_SERDE!r}, chunks have one size each")
    most_s = config.blocking_timeout_secs / 2  # a read may ask for whole chunks and, in vain, for a shorter one
    if options.timeout_s > most_s:
        raise UsageError(
            f"timeout_s={options.timeout_s!r}: allowed is at most {most_s:g}, half of LMCache's blocking_timeout_secs"
        )
