"""Quotas: limits, shares, and whose blocks make room for whom."""

import pytest

from kvstore.core.errors import UsageError
from kvstore.core.states import BlockState, PutStatus
from kvstore.server.eviction.tenants import Quota
from kvstore.server.shard.shard import Shard
from kvstore.wire.control import TenantQuota
from kvstore.wire.messages import KeyRequest
from tests.server.shards import CHUNK, keys, namespace, new_shard, states, store

SLOT = 4096
SLOTS = CHUNK // SLOT  # of 4 KiB, in a chunk
ANN, BOB, CID, BIG = range(4)  # namespaces


def shard_for(chunks: int, watermark_bytes: int = 0) -> Shard:
    """Three tenants with small blocks, and a namespace of bob's with blocks of 32 KiB."""
    shard, _ = new_shard(chunks, watermark_bytes=watermark_bytes)
    for number, tenant in enumerate(["ann", "bob", "cid"]):
        assert shard.open_namespace(namespace(1 + number, 1, 100, tenant)) == number
    assert shard.open_namespace(namespace(9, 1, 30_000, "bob")) == BIG
    return shard


def used(shard: Shard) -> dict[str, int]:
    """Blocks of 4 KiB by tenant."""
    return {str(row["tenant"]): int(row["used"]) // SLOT for row in shard.tenants.describe()}


def test_a_tenant_at_its_limit_makes_room_from_its_own_blocks() -> None:
    shard = shard_for(4)
    shard.set_quotas({"ann": Quota(limit=6 * SLOT)}, {})
    session = shard.open_session()
    store(shard, session, BOB, range(100, 110))
    assert store(shard, session, ANN, range(6)) == [PutStatus.STORED] * 6
    assert store(shard, session, ANN, range(6, 10)) == [PutStatus.STORED] * 4
    assert states(shard, ANN, range(10)).count(BlockState.COMMITTED) == 6
    assert states(shard, ANN, range(6, 10)) == [BlockState.COMMITTED] * 4
    assert used(shard) == {"ann": 6, "bob": 10, "cid": 0}


def test_a_put_beyond_the_limit_is_refused_and_counted_where_nothing_of_its_own_may_go() -> None:
    shard = shard_for(4)
    shard.set_quotas({"ann": Quota(limit=4 * SLOT)}, {})
    session = shard.open_session()
    store(shard, session, ANN, range(4))
    shard.pin(KeyRequest(ANN, keys(0, 1, 2), flag=1))
    statuses = store(shard, session, ANN, range(4, 7))
    assert statuses == [PutStatus.STORED, PutStatus.OVER_QUOTA, PutStatus.OVER_QUOTA]
    assert shard.counters.over_quota_puts == 2
    assert shard.counters.refused_puts == 0
    assert [row["refused"] for row in shard.tenants.describe()] == [2, 0, 0]


def test_a_full_pool_is_no_matter_of_quota() -> None:
    shard = shard_for(1)
    shard.set_quotas({"ann": Quota(limit=100 * SLOT)}, {})
    session = shard.open_session()
    store(shard, session, BOB, range(100, 100 + SLOTS))
    shard.pin(KeyRequest(BOB, keys(*range(100, 100 + SLOTS)), flag=1))
    assert store(shard, session, ANN, [1]) == [PutStatus.NO_ROOM]
    assert shard.counters.refused_puts == 1


def test_nobody_is_evicted_below_its_share_by_others() -> None:
    shard = shard_for(2)
    shard.set_quotas({"ann": Quota(share=10 * SLOT)}, {})
    session = shard.open_session()
    store(shard, session, ANN, range(12))
    for start in range(100, 200, 5):
        assert store(shard, session, BOB, range(start, start + 5)) == [PutStatus.STORED] * 5
    assert used(shard)["ann"] >= 10
    assert states(shard, ANN, range(10)) == [BlockState.COMMITTED] * 10  # deeper blocks went first


def test_what_is_above_the_shares_is_divided_evenly_between_those_who_want_it() -> None:
    shard = shard_for(2)
    shard.set_quotas({"ann": Quota(share=2 * SLOT)}, {})
    session = shard.open_session()
    store(shard, session, ANN, range(12))
    for start in range(100, 200):
        store(shard, session, BOB, [start])
    assert used(shard) == {"ann": 9, "bob": 7, "cid": 0}


def test_a_share_is_no_right_to_others_blocks_beyond_it_nor_a_limit() -> None:
    shard = shard_for(2)
    shard.set_quotas({"ann": Quota(share=6 * SLOT)}, {})
    session = shard.open_session()
    store(shard, session, BOB, range(100, 110))
    assert store(shard, session, ANN, range(SLOTS)) == [PutStatus.STORED] * SLOTS
    assert used(shard)["ann"] == SLOTS


def test_a_share_holds_also_when_whole_chunks_are_emptied_for_blocks_of_another_size() -> None:
    shard = shard_for(2)
    shard.set_quotas({"ann": Quota(share=6 * SLOT)}, {})
    session = shard.open_session()
    store(shard, session, ANN, range(6))  # in one chunk
    store(shard, session, CID, range(200, 200 + 2 * SLOTS - 6))
    assert store(shard, session, BIG, [900, 901]) == [PutStatus.STORED, PutStatus.NO_ROOM]
    assert states(shard, ANN, range(6)) == [BlockState.COMMITTED] * 6


def test_who_is_furthest_above_its_share_makes_room_first() -> None:
    shard = shard_for(3)
    shard.set_quotas({"ann": Quota(share=4 * SLOT), "bob": Quota(share=8 * SLOT)}, {})
    session = shard.open_session()
    store(shard, session, ANN, range(12))  # 8 above
    store(shard, session, BOB, range(100, 112))  # 4 above
    store(shard, session, CID, [200, 201, 202, 203])
    assert used(shard) == {"ann": 8, "bob": 12, "cid": 4}


def test_a_tenant_below_its_share_may_still_replace_its_own_blocks() -> None:
    shard = shard_for(1)
    shard.set_quotas({"ann": Quota(share=6 * SLOT), "bob": Quota(share=2 * SLOT)}, {})
    session = shard.open_session()
    store(shard, session, ANN, range(5))
    store(shard, session, BOB, [100, 101])
    store(shard, session, CID, [200])
    shard.pin(KeyRequest(CID, keys(200), flag=1))
    assert store(shard, session, ANN, [10, 11]) == [PutStatus.STORED] * 2
    assert used(shard) == {"ann": 5, "bob": 2, "cid": 1}


def test_quotas_can_change_while_blocks_are_there() -> None:
    shard = shard_for(2)
    session = shard.open_session()
    store(shard, session, ANN, range(10))
    shard.set_quotas({"ann": Quota(limit=4 * SLOT)}, {})
    assert used(shard)["ann"] == 10
    shard.tick(1.0)
    assert used(shard)["ann"] == 4
    shard.set_quotas({}, {})
    assert store(shard, session, ANN, range(20, 30)) == [PutStatus.STORED] * 10
    assert used(shard)["ann"] == 14
    store(shard, session, BOB, range(100, 100 + 2 * SLOTS))
    assert used(shard) == {"ann": 0, "bob": 2 * SLOTS, "cid": 0}


def test_a_quota_can_come_before_its_tenant() -> None:
    shard, _ = new_shard(2)
    shard.set_quotas({"ann": Quota(limit=2 * SLOT)}, {})
    shard.open_namespace(namespace(1, 1, 100, "ann"))
    store(shard, shard.open_session(), 0, range(5))
    assert used(shard) == {"ann": 2}


def test_room_is_made_ahead_of_need_and_never_out_of_a_share() -> None:
    shard = shard_for(2, watermark_bytes=4 * SLOT)
    session = shard.open_session()
    store(shard, session, ANN, range(2 * SLOTS))
    shard.tick(1.0)
    assert shard.accounting()["free"] == 8 * SLOT  # twice the mark, so that this is not done at every tick
    shard.tick(2.0)
    assert shard.accounting()["free"] == 8 * SLOT
    shard.set_quotas({"ann": Quota(share=14 * SLOT)}, {})
    store(shard, session, ANN, range(100, 108))
    shard.tick(3.0)
    assert used(shard)["ann"] == 14


@pytest.mark.parametrize("quota", [{"dram_limit": -1}, {"disk_share": -1}, {"dram_limit": 5, "dram_share": 6}])
def test_a_quota_that_makes_no_sense_is_refused(quota: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"dram|disk"):
        TenantQuota(**quota)
