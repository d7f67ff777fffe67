"""Quotas of the SSD: what a tenant may have there, across evictions and restarts."""

from pathlib import Path

from kvstore.server.eviction.tenants import Quota
from kvstore.server.tiers.disk.directory import Life
from kvstore.server.tiers.disk.messages import LoadStatus, Quotas, StoreStatus
from tests.server.tiers.disk.rig import DIGEST, OTHER_DIGEST, Rig

BLOCK = 64 << 10  # of the rig, and its slot
CAPACITY = 8 << 20
DURABLE, NO_ROOM = StoreStatus.DURABLE, StoreStatus.NO_ROOM
OK = LoadStatus.OK


def used(rig: Rig) -> dict[str, int]:
    """Blocks by tenant."""
    return {row["tenant"]: row["used"] // BLOCK for row in rig.stats()["quotas"]}


def stored(rig: Rig, first: int, count: int, digest: bytes, tenant: str) -> list[StoreStatus]:
    """Store blocks in batches that a small tier has room for."""
    return [
        status
        for start in range(first, first + count, 4)
        for status in rig.store(range(start, min(start + 4, first + count)), digest=digest, tenant=tenant)
    ]


def test_a_tenant_at_its_limit_evicts_its_own_blocks(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=CAPACITY)
    rig.submit(Quotas({"ann": Quota(limit=10 * BLOCK)}))
    assert stored(rig, 100, 20, OTHER_DIGEST, "bob") == [DURABLE] * 20
    assert stored(rig, 0, 24, DIGEST, "ann") == [DURABLE] * 24
    assert used(rig) == {"ann": 10, "bob": 20}
    assert rig.load(range(16, 24)) == [OK] * 8
    assert rig.load(range(100, 120)) == [OK] * 20
    rig.close()


def test_a_batch_larger_than_the_limit_is_stored_in_part_and_the_rest_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=CAPACITY)
    rig.submit(Quotas({"ann": Quota(limit=3 * BLOCK)}))
    assert rig.store(range(5), tenant="ann") == [DURABLE] * 3 + [NO_ROOM] * 2
    (row,) = rig.stats()["quotas"]
    assert row["refused"] == 2
    rig.close()


def test_nobody_is_evicted_below_its_share_by_others(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=CAPACITY)
    rig.submit(Quotas({"ann": Quota(share=20 * BLOCK)}))
    stored(rig, 0, 30, DIGEST, "ann")
    assert stored(rig, 1000, 400, OTHER_DIGEST, "bob") == [DURABLE] * 400
    assert used(rig)["ann"] >= 20
    assert rig.stats()["evicted_blocks"] > 200
    rig.close()


def test_quotas_and_names_hold_after_a_restart_for_blocks_of_namespaces_that_nobody_has_opened_yet(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, capacity=CAPACITY)
    rig.store(range(8), tenant="ann")
    rig.close()
    again = Rig(tmp_path, capacity=CAPACITY)
    assert used(again) == {"ann": 8}
    again.submit(Quotas({"ann": Quota(share=8 * BLOCK)}))
    stored(again, 1000, 300, OTHER_DIGEST, "bob")
    assert again.load(range(8)) == [OK] * 8
    again.submit(Quotas({"ann": Quota(limit=2 * BLOCK)}))
    assert again.store([50]) == [DURABLE]
    assert used(again)["ann"] == 2
    again.close()


def test_what_is_removed_or_lost_no_longer_counts(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=CAPACITY)
    rig.store(range(8), tenant="ann")
    rig.remove([1, 2])
    assert used(rig) == {"ann": 6}
    rig.flush(DIGEST)
    assert used(rig) == {"ann": 0}
    rig.close()


def test_a_tenant_far_above_a_new_limit_is_refused_while_none_of_its_blocks_may_go(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=CAPACITY)
    rig.store(range(8), tenant="ann")
    books = rig.tier._books  # pyright: ignore[reportPrivateUsage] -- as if all of them were being read
    held = books.directory.select(Life.DURABLE)
    books.hold(held)
    rig.submit(Quotas({"ann": Quota(limit=2 * BLOCK)}))
    assert rig.store([50, 51], tenant="ann") == [NO_ROOM] * 2
    (row,) = rig.stats()["quotas"]
    assert (row["used"], row["refused"]) == (8 * BLOCK, 2)
    books.release(held)
    assert rig.store([50, 51], tenant="ann") == [DURABLE] * 2
    assert used(rig) == {"ann": 2}
    rig.close()
