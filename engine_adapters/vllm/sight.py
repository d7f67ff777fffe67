"""What operators and routers see: counts through vLLM's own statistics and Prometheus, and KV events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter
from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["COUNTS", "PromMetrics", "Stats", "Tally", "stored_events"]

MEDIUM: Final = "STORAGE"
COUNTS: Final = {
    "lookups": "requests that were looked up",
    "asked_tokens": "prompt tokens that the engine itself did not have, of requests looked up",
    "hit_tokens": "of these, tokens to load",
    "declined_tokens": "tokens that are there and are faster to recompute",
    "loads": "steps that loaded",
    "load_blocks": "blocks loaded, by each rank",
    "load_bytes": "bytes loaded, by each rank",
    "load_s": "seconds from the start of a load to its last layer",
    "load_wait_s": "of these, seconds that the forward pass waited",
    "failed_blocks": "blocks that did not come and were recomputed",
    "saves": "steps that saved",
    "save_blocks": "blocks stored, by each rank",
    "save_bytes": "bytes stored, by each rank",
    "save_s": "seconds that the forward pass was held up by saving",
    "unsaved_blocks": "blocks that could not be stored: no room, or the store was away",
}
"""What is counted, with its help text. Sums over ranks and over the interval."""


class Tally:
    """Counts since they were last taken."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, **counts: float) -> None:
        """Add to these of `COUNTS`."""
        for name, count in counts.items():
            if count:
                self._counts[name] = self._counts.get(name, 0) + count

    def take(self) -> Stats | None:
        """What was counted; None for nothing."""
        counts, self._counts = self._counts, {}
        return Stats(data=dict(counts)) if counts else None


class Stats(KVConnectorStats):
    """Counts of an interval, as vLLM carries them from ranks to its logger and to Prometheus."""

    def reset(self) -> None:
        """Start again from nothing."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        """With those of another rank or interval."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: what is not zero, and the speed of loads."""
        told = {name: round(self.data[name], 4) for name in COUNTS if self.data.get(name)}
        if self.data.get("load_s"):
            told["load_gib_s"] = round(self.data["load_bytes"] / self.data["load_s"] / 2**30, 2)
        return told

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class PromMetrics(KVConnectorPromMetrics):
    """`vllm:kvstore_*`: one counter for each of `COUNTS`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {
            name: counter(name=f"vllm:kvstore_{_prometheus(name)}", documentation=help_text, labelnames=labelnames)
            for name, help_text in COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        for name, count in transfer_stats_data.items():
            if name in self._counters and count > 0:
                self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(count)


def _prometheus(name: str) -> str:
    return name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name


def stored_events(stored: Iterable[tuple[Request, int]], block_tokens: int) -> list[KVCacheEvent]:
    """KV events for blocks that are in the store now: a request, and which of its blocks. Their hashes are vLLM's own,
    which routers compute as well; the store does not use them.
    """
    events: list[KVCacheEvent] = []
    for request, block in stored:
        hashes = request.block_hashes
        if block >= len(hashes):
            continue  # its hash is made when the engine next looks at the request, by when somebody else may ask
        lora = request.lora_request
        events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(hashes[block])],
                parent_block_hash=maybe_convert_block_hash(hashes[block - 1]) if block else None,
                token_ids=list(request.all_token_ids[block * block_tokens : (block + 1) * block_tokens]),
                block_size=block_tokens,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM,
                lora_name=lora.name if lora else None,
            )
        )
    return events
