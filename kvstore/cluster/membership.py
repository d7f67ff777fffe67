"""Who belongs to the store. Static for now: the list that the client was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.core.errors import UsageError

DEFAULT_CONTROL_PORT = 7400
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Member:
    """A node, or a shard of one. Its name decides which keys it owns, so all clients must spell it alike."""

    name: str
    weight: float = 1.0


class Membership(Protocol):
    """Where the nodes come from."""

    def nodes(self) -> Sequence[Member]:
        """The nodes of now; names are control addresses, `host:port`."""
        ...


class StaticMembership:
    """Nodes named once and for all.

    Args:
        addresses: `"local"`, `"host:port"`, `"host"`, each with an optional weight as in `"host:7400=2"`; several as
        a list or
            separated by commas. Keys are spread by these names: every client must name the same nodes in the same way.

    Raises:
        UsageError: names the address that is wrong.
    """

    def __init__(self, addresses: str | Sequence[str]) -> None:
        parts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
        self._nodes = tuple(_parse(part.strip()) for part in parts)
        if not self._nodes:
            raise UsageError("no address: allowed is 'local', 'host:port', or several")
        names = [member.name for member in self._nodes]
        doubled = next((name for name in names if names.count(name) > 1), None)
        if doubled is not None:
            raise UsageError(f"address {doubled!r} is named twice")

    def nodes(self) -> Sequence[Member]:
        return self._nodes


def _parse(text: str) -> Member:
    address, _, weight_text = text.partition("=")
    try:
        weight = float(weight_text) if weight_text else 1.0
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise UsageError(f"address {text!r}: the weight after '=' must be a number above 0")
    if address == LOCAL:
        return Member(f"127.0.0.1:{DEFAULT_CONTROL_PORT}", weight)
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, str(DEFAULT_CONTROL_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"address {text!r}: allowed is 'local' or 'host:port' with a port from 1 to 65535")
    return Member(f"{host}:{port}", weight)
