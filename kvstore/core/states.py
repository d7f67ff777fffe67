"""The closed sets of answers: what a block is, and what a put did with it."""

from enum import IntEnum

__all__ = ["BlockState", "PutStatus", "Tier"]


class BlockState(IntEnum):
    """Where a block stands. Values fit a uint8 and are part of the index layout and of the wire: never renumber."""

    ABSENT = 0
    """Not here: recompute it, or be the one who writes it."""

    RESERVED = 1
    """A writer holds it and its layers are arriving; the layers counted by `layers_ready` may already be read."""

    COMMITTED = 2
    """Complete and immutable."""


class Tier(IntEnum):
    """Where the bytes of a committed block lie. Values fit a uint8 and are part of the index layout: never renumber."""

    DRAM = 0
    """In the shard's pool: it can be read right away."""

    DISK = 1
    """On the SSD only: asking for it brings it back into the pool first."""

    LOADING = 2
    """On its way from the SSD into the pool; the layers counted by `layers_ready` may already be read there."""


class PutStatus(IntEnum):
    """What one put did with one block. Values fit a uint8 and are part of the wire: never renumber."""

    STORED = 0
    """This put wrote the block, or the part of it that it had, and that is committed."""

    EXISTS = 1
    """The block was committed already; nothing was written."""

    PENDING = 2
    """Another writer holds the reservation and will commit it, or let it expire; nothing was written."""

    NO_ROOM = 3
    """Explicit refusal: there was no free slot and nothing could be evicted; nothing was written."""

    FAILED = 4
    """The shard was unreachable or the deadline passed: the block may be absent."""

    OVER_QUOTA = 5
    """Explicit refusal: the tenant is at its limit and none of its own blocks may go; nothing was written."""
