"""What readers are told of a block that comes back from the SSD some layers at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from kvstore.index import Probe
from kvstore.server.shard import tiering
from kvstore.server.shard.blocks import Life
from kvstore.server.tiers.disk.messages import Answer, Loaded, Request
from kvstore.wire.messages import BY_LAYERS, RefRequest
from tests.server.shards import refs, reserve
from tests.server.test_tiering_model import NOW_S, SPACE, ShardWithDisk, content

LAYERS = SPACE.layers


class Promotion:
    """Block 0 on its way from the SSD. Each read, of one layer, happens when the test says so."""

    def __init__(self, run: ShardWithDisk) -> None:
        self.run = run
        for number in range(24):  # three times what DRAM holds
            rows = reserve(run.shard, run.session, run.space, [number])
            offset = int(rows["offset"][0])
            run.pool[offset : offset + SPACE.block_bytes] = content(number)
            assert run.shard.commit(run.session, refs(rows)).all()
            run.settle()
        self.request = run.request([0], flag=BY_LAYERS)
        assert self.probe().on_disk(run.space, SPACE.block_bytes).all()
        self.reads: list[tuple[int, Request]] = []
        with patch.object(run.disk.tier, "handle", self._keep):
            run.shard.promote(self.request, NOW_S, lambda: None)
        assert len(self.reads) == LAYERS

    def _keep(self, request: int, message: Request) -> None:
        self.reads.append((request, message))

    def probe(self) -> Probe:
        return self.run.index.probe(self.request.keys)

    def read(self, layer: int) -> None:
        request, message = self.reads[layer]
        answered: list[int] = []
        take = self.run.tiering.take

        def note(answer: Answer) -> None:
            take(answer)
            if isinstance(answer, Loaded):
                answered.append(answer.request)

        with patch.object(self.run.tiering, "take", note):
            self.run.disk.tier.handle(request, message)
            self.run.until(lambda: request in answered)

    def lease(self) -> int:
        found = self.probe()
        named = RefRequest.of(found.handles, found.generations).refs
        lease, held = self.run.shard.lease(self.run.session, named, 600_000, NOW_S)
        assert held.all()
        return lease


@pytest.fixture
def promotion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Promotion]:
    monkeypatch.setattr(tiering, "RANGE_BYTES", SPACE.layer_bytes)
    monkeypatch.setattr(tiering, "BY_LAYERS_BYTES_MIN", SPACE.layer_bytes)
    run = ShardWithDisk(tmp_path / "0", bytes(16))
    yield Promotion(run)
    run.close()


def test_a_layer_counts_once_all_before_it_have_come_in_whatever_order_they_are_read(promotion: Promotion) -> None:
    seen: list[int] = []
    for layer in (1, 0, 3, 2):
        probe = promotion.probe()
        assert probe.loading.all()
        seen.append(int(probe.layers_ready[0]))
        promotion.read(layer)
    assert seen == [0, 0, 2, 2]
    probe = promotion.probe()
    assert probe.readable(promotion.run.space, LAYERS, SPACE.block_bytes).all()
    offset = int(probe.offsets[0])
    np.testing.assert_array_equal(promotion.run.pool[offset : offset + SPACE.block_bytes], content(0))


def test_a_lease_on_a_block_that_is_coming_lasts_beyond_its_arrival(promotion: Promotion) -> None:
    promotion.read(0)
    lease, before = promotion.lease(), promotion.probe()
    for layer in range(1, LAYERS):
        promotion.read(layer)
    after = promotion.probe()
    assert (after.generations == before.generations).all()
    assert (after.offsets == before.offsets).all()
    assert promotion.run.shard.blocks.holds[after.handles[0]] == 1
    assert promotion.run.shard.release(promotion.run.session, np.array([lease], np.uint64), NOW_S).all()


@pytest.mark.parametrize("end", ["deleted", "damaged"])
def test_a_block_that_does_not_arrive_leaves_its_slot_to_those_who_hold_it(promotion: Promotion, end: str) -> None:
    run = promotion.run
    promotion.read(0)
    lease, probe = promotion.lease(), promotion.probe()
    handle, offset = int(probe.handles[0]), int(probe.offsets[0])
    if end == "deleted":
        run.shard.delete(promotion.request)
    else:
        for path in promotion.run.disk.tier._folder.glob("slab-*"):  # pyright: ignore[reportPrivateUsage]
            path.write_bytes(bytes(path.stat().st_size))
    for layer in range(1, LAYERS):
        promotion.read(layer)
    assert not promotion.probe().states.any()
    assert run.shard.blocks.life[handle] == Life.CONDEMNED
    np.testing.assert_array_equal(run.pool[offset : offset + SPACE.layer_bytes], content(0)[: SPACE.layer_bytes])
    assert run.shard.release(run.session, np.array([lease], np.uint64), NOW_S).all()
    assert run.shard.blocks.life[handle] == Life.FREE


def test_who_wants_the_whole_block_waits_for_its_last_layer(promotion: Promotion) -> None:
    told: list[bool] = []
    promotion.run.shard.promote(promotion.run.request([0]), NOW_S, lambda: told.append(True))
    for layer in range(LAYERS):
        assert not told
        promotion.read(layer)
    assert told
