"""Prometheus text of what the shards say. Names are listed in docs/operating.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_HELP = {
    "reserved_blocks": "blocks that writers got a slot for",
    "committed_blocks": "blocks stored",
    "committed_bytes": "payload bytes stored",
    "duplicate_puts": "puts of blocks that were there or being written",
    "refused_puts": "puts refused because nothing could be evicted",
    "over_quota_puts": "puts refused because their tenant is at its limit",
    "aborted_blocks": "reservations given back or ended with their session",
    "expired_reservations": "reservations that ran out",
    "evicted_blocks": "blocks evicted from DRAM",
    "evicted_bytes": "payload bytes evicted from DRAM",
    "deleted_blocks": "blocks deleted or flushed",
    "leases": "leases granted",
    "expired_leases": "leases that ran out",
    "index_resizes": "times the index moved to a larger table",
    "noted_requests": "requests for reading that clients told of, for the eviction policy",
    "client_lookup_blocks": "blocks that clients asked for",
    "client_hit_blocks": "of those, blocks that were there",
    "client_read_blocks": "blocks that clients read",
    "client_read_bytes": "payload bytes that clients read",
    "client_lost_races": "reads whose block was evicted meanwhile (read as misses)",
    "client_checksum_failures": "reads whose bytes did not match their checksum (read as misses)",
}


_DISK_HELP = {
    "written_behind_blocks": "blocks copied to the SSD",
    "skipped_write_behind_blocks": "blocks not copied because the queue was full",
    "failed_write_behind_blocks": "blocks that the SSD refused",
    "demoted_blocks": "blocks that left DRAM and stay on the SSD",
    "promoted_blocks": "blocks brought back from the SSD",
    "failed_promotions": "blocks that could not be read from the SSD (read as misses)",
    "refused_promotions": "blocks not brought back: no slot, or too many under way (read as misses)",
    "found_blocks": "blocks found on the SSD after a start",
    "lost_blocks": "blocks that the SSD gave up: evicted there, or unreadable",
}


_GPU_HELP = {
    "promoted_blocks": "blocks copied into the device segment",
    "promoted_bytes": "payload bytes copied into the device segment",
    "evicted_blocks": "blocks that left the device segment for others",
    "dropped_blocks": "blocks that left the device segment because they left the pool",
    "failures": "times the device failed and its segment was given up",
}
_TENANT_HELP = {
    "used": "bytes of slots that a tenant has",
    "limit": "bytes that it may have at most; 0: no limit",
    "share": "bytes that others can't evict it below",
}
TIERS = ("dram", "disk")
TENANTS_MAX = 256  # those with a quota, then the largest: a label has to stay countable


class _NodeMetrics:
    """Collects from the answers of one moment."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._shards: Sequence[Mapping[str, Any]] = status["shards"]
        self._down = len(status["shards_down"])
        self._tenants: Sequence[Mapping[str, Any]] = status["tenants"][:TENANTS_MAX]

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("kvstore_shards_up", "shards that answer", len(self._shards))
        yield GaugeMetricFamily("kvstore_shards_down", "shards that do not answer", self._down)
        for name, text in _HELP.items():
            counter = CounterMetricFamily(f"kvstore_{name}", text, labels=["shard"])
            for shard in self._shards:
                counter.add_metric([str(shard["shard"])], shard["counters"][name])
            yield counter
        for name, text in _DISK_HELP.items():
            counter = CounterMetricFamily(f"kvstore_disk_{name}", text, labels=["shard"])
            for shard in self._shards:
                counter.add_metric([str(shard["shard"])], shard.get("disk", {}).get("counters", {}).get(name, 0))
            yield counter
        for name, text in _GPU_HELP.items():
            counter = CounterMetricFamily(f"kvstore_gpu_{name}", text, labels=["shard"])
            for shard in self._shards:
                counter.add_metric([str(shard["shard"])], shard.get("gpu", {}).get("counters", {}).get(name, 0))
            yield counter
        resident = GaugeMetricFamily("kvstore_gpu_blocks", "blocks in the device segment", labels=["shard"])
        for shard in self._shards:
            resident.add_metric([str(shard["shard"])], shard.get("gpu", {}).get("resident_blocks", 0))
        yield resident
        yield from self._tenant_metrics()
        pool = GaugeMetricFamily("kvstore_pool_bytes", "bytes of the DRAM pool by use", labels=["shard", "use"])
        warm = GaugeMetricFamily("kvstore_warm_bytes", "bytes of the pool present in memory", labels=["shard"])
        for shard in self._shards:
            for use, amount in shard["bytes"].items():
                pool.add_metric([str(shard["shard"]), use], amount)
            warm.add_metric([str(shard["shard"])], shard["warm_bytes"])
        yield pool
        yield warm
        for name in self._shards[0]["gauges"] if self._shards else ():
            gauge = GaugeMetricFamily(f"kvstore_{name}", name.replace("_", " "), labels=["shard"])
            for shard in self._shards:
                gauge.add_metric([str(shard["shard"])], shard["gauges"][name])
            yield gauge

    def _tenant_metrics(self) -> Iterable[Metric]:
        labels = ["tenant", "tier"]
        for name, text in _TENANT_HELP.items():
            gauge = GaugeMetricFamily(f"kvstore_tenant_{name}_bytes", text, labels=labels)
            for row in self._tenants:
                for tier in TIERS:
                    gauge.add_metric([row["tenant"], tier], row[tier][name])
            yield gauge
        refused = CounterMetricFamily("kvstore_tenant_refused_blocks", "blocks that a quota refused", labels=labels)
        for row in self._tenants:
            for tier in TIERS:
                refused.add_metric([row["tenant"], tier], row[tier]["refused"])
        yield refused


def render(status: Mapping[str, Any]) -> bytes:
    """The exposition text for a node's status."""
    registry = CollectorRegistry()
    registry.register(_NodeMetrics(status))
    return generate_latest(registry)
