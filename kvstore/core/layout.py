"""How the bytes of one block are arranged.

The canonical layout, outermost first (drawn for 2 layers, 2 heads):

    | layer 0                                         | layer 1                                         |
    | head 0                 | head 1                 | head 0                 | head 1                 |
    | K: tokens x head_dim | V: tokens x head_dim_v   | ...

so any layer range times any head range is a few contiguous byte ranges: layers stream one by one, writers and readers
with different tensor-parallel sizes share blocks, and heads can move. An engine whose kernels want K transposed may say
so (`key_order`): its blocks then need no unpacking, and are other blocks than those of engines that don't. An adapter
that cannot take its engine's block apart uses an opaque layout instead: layers still stream, heads do not.
"""

from dataclasses import dataclass
from typing import Literal

from kvstore.core.errors import UsageError
from kvstore.core.fields import length_prefixed, require_int, require_text

__all__ = ["MAX_LAYERS", "CanonicalLayout", "Layout", "OpaqueLayout"]

MAX_LAYERS = 65_535  # `layers_ready` is a uint16 in the index and on the wire
MAX_HEADS = 65_535
MAX_HEAD_DIM = 65_535
MAX_LAYER_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class CanonicalLayout:
    """Bytes in the order [layer][kv_head][k|v][token][head_dim], nothing between them.

    `layers` counts what one block holds: the layers of this pipeline part, not of the whole model. `head_dim_v` is the
    size of a value head where it differs from the key's; 0 where there are no values (a latent cache keeps K only).
    Left out, it becomes `head_dim`, so both spellings are equal. `key_order`: "dim" where each K lies as
    [head_dim][token]; values stay as they are. Raises UsageError naming the field.
    """

    layers: int
    kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    key_order: Literal["token", "dim"] = "token"

    def __post_init__(self) -> None:
        require_int("layers", self.layers, 1, MAX_LAYERS)
        require_int("kv_heads", self.kv_heads, 1, MAX_HEADS)
        require_int("head_dim", self.head_dim, 1, MAX_HEAD_DIM)
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        else:
            require_int("head_dim_v", self.head_dim_v, 0, MAX_HEAD_DIM)
        if self.key_order not in ("token", "dim"):
            raise UsageError(f"key_order={self.key_order!r}: allowed is 'token' or 'dim'")

    @property
    def value_dim(self) -> int:
        """Elements of one value head: `head_dim_v`, or `head_dim` where that was left out."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    def head_bytes(self, block_tokens: int, itemsize: int) -> int:
        """Bytes of one head of one layer: its K, then its V."""
        return block_tokens * (self.head_dim + self.value_dim) * itemsize

    def layer_bytes(self, block_tokens: int, itemsize: int) -> int:
        """Bytes of one layer of one block."""
        return self.kv_heads * self.head_bytes(block_tokens, itemsize)

    def head_range(
        self, layer_lo: int, layer_hi: int, head_lo: int, head_hi: int, block_tokens: int, itemsize: int
    ) -> list[tuple[int, int]]:
        """(offset, length) in bytes of the runs that hold heads [head_lo, head_hi) of layers [layer_lo, layer_hi).

        Runs ascend, never touch and are never empty: neighbours are merged, so all heads of a layer range are one run,
        and an empty range has none. Raises UsageError when a range is reversed or leaves the block.
        """
        _require_range("layer", layer_lo, layer_hi, self.layers)
        _require_range("head", head_lo, head_hi, self.kv_heads)
        if layer_lo == layer_hi or head_lo == head_hi:
            return []
        head_bytes = self.head_bytes(block_tokens, itemsize)
        layer_bytes = self.layer_bytes(block_tokens, itemsize)
        if head_hi - head_lo == self.kv_heads:
            return [(layer_lo * layer_bytes, (layer_hi - layer_lo) * layer_bytes)]
        length = (head_hi - head_lo) * head_bytes
        return [(layer * layer_bytes + head_lo * head_bytes, length) for layer in range(layer_lo, layer_hi)]

    def encode(self) -> bytes:
        """The layout's part of the namespace encoding; see docs/keys.md."""
        fields = ("canonical", self.layers, self.kv_heads, self.head_dim, self.value_dim)
        # Said only where it is not "token": keys made before there was another order stay what they are.
        return length_prefixed(*fields) if self.key_order == "token" else length_prefixed(*fields, self.key_order)

    def describe(self) -> dict[str, str | int]:
        """The fields as JSON-able values, and `kind`: what `Namespace.from_description` reads back."""
        described: dict[str, str | int] = {
            "kind": "canonical",
            "layers": self.layers,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "head_dim_v": self.value_dim,
        }
        return described if self.key_order == "token" else {**described, "key_order": self.key_order}


@dataclass(frozen=True, slots=True)
class OpaqueLayout:
    """Bytes that only their writer understands, named by `tag`; layers follow one another with equal sizes.

    The tag must name everything that decides the arrangement (engine, version of its format, tensor-parallel rank and
    size), because equal tags mean interchangeable bytes. Raises UsageError naming the field.
    """

    tag: str
    layers: int
    layer_bytes_per_block: int

    def __post_init__(self) -> None:
        require_text("tag", self.tag, "the name of the engine's arrangement, with its version and tensor-parallel part")
        require_int("layers", self.layers, 1, MAX_LAYERS)
        require_int("layer_bytes_per_block", self.layer_bytes_per_block, 1, MAX_LAYER_BYTES)

    def layer_bytes(self, block_tokens: int, itemsize: int) -> int:  # noqa: ARG002 - the signature of all layouts
        """Bytes of one layer of one block, as declared: an opaque layer does not follow from tokens and dtype."""
        return self.layer_bytes_per_block

    def encode(self) -> bytes:
        """The layout's part of the namespace encoding; see docs/keys.md."""
        return length_prefixed("opaque", self.tag, self.layers, self.layer_bytes_per_block)

    def describe(self) -> dict[str, str | int]:
        """The fields as JSON-able values, and `kind`: what `Namespace.from_description` reads back."""
        return {
            "kind": "opaque",
            "tag": self.tag,
            "layers": self.layers,
            "layer_bytes_per_block": self.layer_bytes_per_block,
        }


Layout = CanonicalLayout | OpaqueLayout


def _require_range(name: str, low: int, high: int, count: int) -> None:
    if not 0 <= low <= high <= count:
        raise UsageError(f"{name} range [{low}, {high}): allowed is 0 <= low <= high <= {count}")
