"""What `kv_connector_extra_config` may say, checked before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from kvstore import ConfigError

__all__ = ["Options"]

DEFAULT_ADDRESS = "127.0.0.1:7400"
TRANSPORTS = ("auto", "shm", "mooncake", "tcp")
LAYOUTS = ("auto", "canonical", "opaque")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The connector's settings. Raises ConfigError naming the culprit and what is allowed."""

    address: str = DEFAULT_ADDRESS
    """Of the store, "host:port", or several separated by commas; `KVSTORE_ADDRESS` unless given."""

    model: str = ""
    """A name of the weights that all engines use; the hub's name, or the folder's, unless given."""

    revision: str = ""
    """Commit or digest of the weights. Left out: the hub's commit, or a digest of the weights' files."""

    tenant: str = ""
    """A salt: engines with other salts share nothing."""

    transport: Literal["auto", "shm", "mooncake", "tcp"] = "auto"
    timeout_s: float = 2.0
    """How long a step waits for its loads, and any other call to the store takes, at most."""

    checksums: bool = False
    """Verify every layer slice over shared memory too; over TCP that is always done."""

    auth_token: str = ""
    """The server's; `KVSTORE_AUTH_TOKEN` unless given."""

    layout: Literal["auto", "canonical", "opaque"] = "auto"
    """How blocks lie in the store. "auto": as the engine has them where that can be cut by heads, else canonical where
    the backend can be unpacked, else opaque. "canonical": never in the engine's own order, so that backends of
    different orders share blocks.
    """

    load: bool = True
    save: bool = True
    """Whether to read from the store, and whether to write; `kv_role` may forbid one of them, too."""

    save_generated: bool = True
    """Whether to save blocks with generated tokens as well as those of prompts."""

    follow: bool = False
    """Also use blocks that another engine is computing just now: start on their first layers."""

    follow_timeout_s: float = 30.0
    """How long to wait for such an engine."""

    plan: bool = True
    """Decline what is slower to fetch than to recompute, by what was seen lately."""

    @classmethod
    def parse(cls, told: Mapping[str, Any]) -> Options:
        """From the extra config; what it leaves out comes from the environment or is the default."""
        known = {field.name: field for field in fields(cls)}
        for name in told:
            if name not in known:
                raise ConfigError(f"kv_connector_extra_config: {name!r} is unknown; allowed is {', '.join(known)}")
        values: dict[str, Any] = {
            "address": os.environ.get("KVSTORE_ADDRESS", DEFAULT_ADDRESS),
            "auth_token": os.environ.get("KVSTORE_AUTH_TOKEN", ""),
            **told,
        }
        for name, value in values.items():
            _check(name, value, getattr(cls(), name))
        return cls(**values)


def _check(name: str, value: Any, default: Any) -> None:
    allowed = {"transport": TRANSPORTS, "layout": LAYOUTS}.get(name)
    if allowed is not None:
        if value not in allowed:
            raise _refusal(name, value, f"one of {', '.join(allowed)}")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise _refusal(name, value, "true or false")
    elif isinstance(default, float):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.001 <= value <= 3600:
            raise _refusal(name, value, "0.001 to 3600 seconds")
    elif not isinstance(value, str):
        raise _refusal(name, value, "text")


def _refusal(name: str, value: Any, allowed: str) -> ConfigError:
    shown = f"<{type(value).__name__}>" if name in ("tenant", "auth_token") else repr(value)
    return ConfigError(f"kv_connector_extra_config: {name}={shown}: allowed is {allowed}")
