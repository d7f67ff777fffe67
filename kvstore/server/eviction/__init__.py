"""Eviction policies. They only choose victims; the shard decides and acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.server.eviction.base import EvictionPolicy
from kvstore.server.eviction.lru import LruPolicy
from kvstore.server.eviction.reuse import ReusePolicy
from kvstore.server.eviction.s3fifo import S3FifoPolicy

NewPolicy = Callable[[NDArray[np.uint32]], EvictionPolicy]

POLICIES: Final[Mapping[str, NewPolicy]] = MappingProxyType(
    {"reuse": ReusePolicy, "lru": LruPolicy, "s3fifo": S3FifoPolicy}
)
"""How each policy is made from a touch board, by the name that it has in the configuration; the default first."""
