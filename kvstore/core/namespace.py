"""A namespace: everything that makes the KV of the same tokens differ. Equal namespaces may share bytes."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from kvstore.core.errors import NamespaceMismatch, UsageError
from kvstore.core.fields import length_prefixed, require_int, require_text
from kvstore.core.layout import CanonicalLayout, Layout, OpaqueLayout

__all__ = ["DEFAULT_TENANT", "ITEM_BYTES", "Namespace"]

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
MAX_BLOCK_TOKENS = 65_535
MAX_PIPELINE_PARTS = 65_535
DEFAULT_TENANT = "default"
_MAGIC = b"kvstore-namespace-v1"
_TENANT_MAGIC = b"kvstore-tenant-v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What two parties must agree on before they may share KV blocks. Change any one field and every key changes.

    Tensor-parallel rank is not a field: in the canonical layout a block holds all heads, whoever wrote it. Raises
    UsageError naming the field, its value and what is allowed.
    """

    model: str  # which weights, as their publisher names them ("org/name"); compared byte for byte
    revision: str  # which version of the weights (commit or digest): an update must never serve the old version's KV
    dtype: str  # of the stored KV, a name of ITEM_BYTES
    block_tokens: int
    layout: Layout  # of this pipeline part's layers
    pipeline: tuple[int, int] = (0, 1)  # (part, parts): which consecutive share of the model's layers a block holds
    adapter: bytes = b""  # digest of the LoRA's weights, never a name or a load index; empty: the base model
    tenant: bytes = field(default=b"", repr=False)  # salt that keeps tenants apart; out of repr, for it may be a secret

    encoding: bytes = field(init=False, repr=False, compare=False)  # what the digest covers; docs/keys.md
    digest: bytes = field(init=False, repr=False, compare=False)  # 16 bytes: the first key of every chain

    def __post_init__(self) -> None:
        _check(self)
        encoding = _MAGIC + length_prefixed(
            self.model,
            self.revision,
            self.dtype,
            self.block_tokens,
            self.layout.encode(),
            self.pipeline[0],
            self.pipeline[1],
            self.adapter,
            self.tenant,
        )
        # Computed once: the key chain starts here on every request.
        object.__setattr__(self, "encoding", encoding)
        object.__setattr__(self, "digest", hashlib.sha256(encoding).digest()[:16])

    @property
    def tenant_id(self) -> str:
        """The tenant's name on the server, for quotas and statistics: 16 hexadecimal digits that don't tell the salt;
        `DEFAULT_TENANT` without one.
        """
        if not self.tenant:
            return DEFAULT_TENANT
        return hashlib.sha256(_TENANT_MAGIC + self.tenant).hexdigest()[:16]

    @property
    def layers(self) -> int:
        """Layers in one block."""
        return self.layout.layers

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.layout.layer_bytes(self.block_tokens, self.itemsize)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all its layers."""
        return self.layers * self.layer_bytes

    def describe(self) -> dict[str, Any]:
        """All fields and the digest as JSON-able values; bytes as hex. Holds the tenant salt: not for public pages."""
        return {
            "model": self.model,
            "revision": self.revision,
            "dtype": self.dtype,
            "block_tokens": self.block_tokens,
            "layout": self.layout.describe(),
            "pipeline": list(self.pipeline),
            "adapter": self.adapter.hex(),
            "tenant": self.tenant.hex(),
            "digest": self.digest.hex(),
        }

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "Namespace":
        """The namespace that `describe` described.

        Raises UsageError naming a field that is missing, unknown or wrong, and NamespaceMismatch when the digest in it
        is not the one computed here: then the two sides would never agree on a key.
        """
        told = _fields("namespace", description)
        digest = told.pop("digest", None)
        _require_names("namespace", told, _DESCRIBED)
        told["layout"] = _layout(told["layout"])
        told["pipeline"] = _tuple(told["pipeline"])
        for name in ("adapter", "tenant"):
            told[name] = _from_hex(name, told[name])
        namespace = cls(**told)
        if digest is not None and digest != namespace.digest.hex():
            raise NamespaceMismatch(
                f"digest={digest!r}: the described fields give {namespace.digest.hex()}; "
                "the peer encodes namespaces differently, or a field was changed on the way"
            )
        return namespace


_DESCRIBED = tuple(told.name for told in fields(Namespace) if told.init)
_LAYOUTS: dict[str, tuple[type[CanonicalLayout] | type[OpaqueLayout], tuple[str, ...], tuple[str, ...]]] = {
    # kind: class, fields that are always described, fields that are described unless they have their default
    "canonical": (CanonicalLayout, ("layers", "kv_heads", "head_dim", "head_dim_v"), ("key_order",)),
    "opaque": (OpaqueLayout, ("tag", "layers", "layer_bytes_per_block"), ()),
}


def _check(namespace: Namespace) -> None:
    require_text("model", namespace.model, "the name of the weights")
    require_text("revision", namespace.revision, "the commit or digest of the weights")
    if not isinstance(namespace.dtype, str) or namespace.dtype not in ITEM_BYTES:
        raise UsageError(f"dtype={namespace.dtype!r}: allowed is one of {', '.join(ITEM_BYTES)}")
    require_int("block_tokens", namespace.block_tokens, 1, MAX_BLOCK_TOKENS)
    if not isinstance(namespace.layout, (CanonicalLayout, OpaqueLayout)):
        raise UsageError(f"layout={namespace.layout!r}: allowed is a CanonicalLayout or an OpaqueLayout")
    _check_pipeline(namespace.pipeline)
    for name in ("adapter", "tenant"):
        _check_bytes(name, getattr(namespace, name))


def _check_pipeline(pipeline: object) -> None:
    pair = cast(tuple[object, ...], pipeline) if isinstance(pipeline, tuple) else ()
    match pair:
        case (int(part), int(parts)) if type(part) is type(parts) is int and 0 <= part < parts <= MAX_PIPELINE_PARTS:
            return
        case _:
            raise UsageError(
                f"pipeline={pipeline!r}: allowed is a tuple (part, parts) of ints "
                f"with 0 <= part < parts <= {MAX_PIPELINE_PARTS}"
            )


def _check_bytes(name: str, value: object) -> None:
    if not isinstance(value, bytes):
        raise UsageError(f"{name}={_shown(name, value)}: allowed is bytes, a digest of the content; empty for none")


def _fields(what: str, description: object) -> dict[str, Any]:
    if not isinstance(description, Mapping):
        raise UsageError(f"{what} description {description!r}: allowed is a mapping of field names to values")
    return dict(cast(Mapping[str, Any], description))


def _require_names(what: str, told: Mapping[str, Any], names: tuple[str, ...]) -> None:
    wrong = sorted(set(told) ^ set(names))
    if wrong:
        state = "unknown" if wrong[0] in told else "missing"
        raise UsageError(f"{what} description: {wrong[0]!r} is {state}; the fields are {', '.join(names)}")


def _layout(description: object) -> Layout:
    told = _fields("layout", description)
    kind = told.pop("kind", None)
    if not isinstance(kind, str) or kind not in _LAYOUTS:
        raise UsageError(f"layout kind={kind!r}: allowed is one of {', '.join(_LAYOUTS)}")
    layout, names, optional = _LAYOUTS[kind]
    _require_names(f"{kind} layout", {name: told[name] for name in told if name not in optional}, names)
    return layout(**told)


def _tuple(value: object) -> Any:
    """JSON has no tuples: a list stands for one. Anything else is left for the field's own check."""
    return tuple(cast(list[object], value)) if isinstance(value, list) else value


def _from_hex(name: str, text: object) -> bytes:
    try:
        return bytes.fromhex(cast(str, text))
    except (TypeError, ValueError) as cause:
        raise UsageError(f"{name}={_shown(name, text)}: allowed is text of hexadecimal bytes") from cause


def _shown(name: str, value: object) -> str:
    """The tenant's salt may be a secret: messages end up in logs, so they tell its type only."""
    return f"<{type(value).__name__}>" if name == "tenant" else repr(value)
