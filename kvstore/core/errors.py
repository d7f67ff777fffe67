"""Every error this package raises on purpose, as one small tree split by what the caller can do about it.

    KvStoreError
    ├── UsageError (also a ValueError)   your call is wrong: fix it, a retry cannot help
    │   ├── NamespaceMismatch            the keys or blocks belong to another namespace than the peer's
    │   ├── LayoutMismatch               the bytes are arranged, typed or shaped in another way than the namespace says
    │   ├── BlockTooLarge                a block exceeds the largest slot of the server
    │   ├── UnregisteredBuffer           a transfer names a buffer that was never registered, or reaches beyond it
    │   └── ConfigError                  a flag, variable, file key or optional package is wrong or missing
    ├── Unavailable                      the server cannot be reached: retry later, or recompute
    │   └── DeadlineExceeded             it did not answer in time
    ├── LeaseExpired                     bytes under this lease may have been reused: drop what was read, look up again
    ├── DeviceError                      an accelerator refused a call, or did not end its copies in time
    ├── ProtocolError                    the peer broke the rules or speaks an incompatible version: report it
    └── IndexFull                        the block index has no free entry: evict, or enlarge it

A miss is an answer, never an error. Lower-layer errors are translated once, at the boundary, with `raise ... from`.
"""

# ruff: noqa: N818 - a name like LeaseExpired says what happened; the suffix "Error" would add nothing.

__all__ = [
    "BlockTooLarge",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceError",
    "IndexFull",
    "KvStoreError",
    "LayoutMismatch",
    "LeaseExpired",
    "NamespaceMismatch",
    "ProtocolError",
    "Unavailable",
    "UnregisteredBuffer",
    "UsageError",
]


class KvStoreError(Exception):
    """Base of all errors here: catch it to treat any fault of the store as a miss."""


class UsageError(KvStoreError, ValueError):
    """The caller's input is wrong. The message names the culprit, its value and what is allowed."""


class NamespaceMismatch(UsageError):
    """Keys, blocks or a session belong to another namespace (or key scheme) than the peer's."""


class LayoutMismatch(UsageError):
    """Bytes are arranged, typed or shaped in another way than the namespace's layout says."""


class BlockTooLarge(UsageError):
    """A block exceeds the largest slot that the server offers."""


class UnregisteredBuffer(UsageError):
    """A transfer names memory outside every buffer that the client registered."""


class StreamClosed(UsageError):
    """A layer stream was used after it was cancelled, left, committed or aborted."""


class ConfigError(UsageError):
    """A flag, environment variable, file key, size or optional package is wrong or missing."""


class Unavailable(KvStoreError):
    """The server cannot be reached or has gone away. Retry later, or recompute."""


class DeadlineExceeded(Unavailable):
    """The server did not answer within the deadline of the call."""


class LeaseExpired(KvStoreError):
    """The lease ran out: bytes read under it may be another block's. Drop them and look up again."""


class DeviceError(KvStoreError):
    """An accelerator refused a call, or did not end its copies in time: what they were to fill is undefined."""


class ProtocolError(KvStoreError):
    """The peer broke the rules of the protocol, or speaks an incompatible version of it."""


class IndexFull(KvStoreError):
    """The block index has no free entry for a new key."""
