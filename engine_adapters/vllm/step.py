"""What the scheduler's side and the workers' side tell one another, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

__all__ = ["Batch", "Introduction", "StepPlan", "StepReport"]

I64 = NDArray[np.int64]
NO_BLOCKS: I64 = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Introduction(KVConnectorHandshakeMetadata):
    """What a worker says of itself once its KV cache is there."""

    namespace: dict[str, object] | None
    """Of its blocks, as `Namespace.describe` tells it; None where it has none."""

    why_not: str = ""
    """The reason then, in one line."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks to move."""

    keys: tuple[bytes, ...] = ()
    """For each pipeline part, as of `BlockKeys.tobytes`."""

    block_ids: I64 = field(default_factory=lambda: NO_BLOCKS)
    """The engine's number of each block, shape (n,)."""

    def __len__(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class StepPlan(KVConnectorMetadata):
    """What the workers do in one step."""

    number: int
    tokens: int
    """That the step computes."""

    load: Batch = field(default_factory=Batch)
    save: Batch = field(default_factory=Batch)
    patience_s: float = 1.0
    """How long the step may wait for what it loads."""


@dataclass(frozen=True, slots=True)
class StepReport(KVConnectorWorkerMetadata):
    """What came of it. Of several ranks: what all have done, and what the slowest took."""

    number: int
    loaded: bool = True
    """False where a block did not come: nothing was saved then."""

    load_s: float = 0.0
    compute_tokens: int = 0
    compute_s: float = 0.0
    """The forward pass without its waits; 0 where that says nothing about prefill."""

    saved: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """Which blocks of the plan are in the store now, shape (n,)."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Of two ranks in the same step."""
        assert isinstance(other, StepReport)
        return replace(
            self,
            loaded=self.loaded and other.loaded,
            load_s=max(self.load_s, other.load_s),
            compute_s=max(self.compute_s, other.compute_s),
            saved=self.saved & other.saved if len(self.saved) == len(other.saved) else self.saved[:0],
        )
