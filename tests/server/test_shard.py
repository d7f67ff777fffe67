"""What a shard decides, case by case; the model test next door covers the combinations."""

from dataclasses import replace

import numpy as np
import pytest

from kvstore.core.errors import BlockTooLarge, NamespaceMismatch, UsageError
from kvstore.core.states import BlockState, PutStatus
from kvstore.index import IndexReader
from kvstore.server.eviction.lru import LruPolicy
from kvstore.server.shard.blocks import NamespaceInfo
from kvstore.server.shard.shard import NAMESPACES_MAX, IndexSegment, Shard
from kvstore.wire.messages import KeyRequest
from tests.server.shards import CHUNK, keys, namespace, new_shard, refs, reserve, segment, states, store

SMALL = namespace(1, 1, 100)  # slots of 4 KiB, 8 in a chunk
LARGE = namespace(2, 2, 4500)  # slots of 12 KiB, 2 in a chunk
STORED, EXISTS, PENDING, NO_ROOM = PutStatus.STORED, PutStatus.EXISTS, PutStatus.PENDING, PutStatus.NO_ROOM
ABSENT, RESERVED, COMMITTED = BlockState.ABSENT, BlockState.RESERVED, BlockState.COMMITTED


def shard_of(chunks: int) -> Shard:
    shard, _ = new_shard(chunks)
    assert [shard.open_namespace(SMALL), shard.open_namespace(LARGE)] == [0, 1]
    return shard


def pin(shard: Shard, *numbers: int, on: bool = True) -> None:
    shard.pin(KeyRequest(0, keys(*numbers), flag=int(on)))


def test_ten_times_the_capacity_can_be_written_and_the_newest_blocks_are_there() -> None:
    shard = shard_of(2)
    session = shard.open_session()
    for first in range(0, 160, 4):
        assert store(shard, session, 0, range(first, first + 4)) == [STORED] * 4
    assert states(shard, 0, range(144, 160)) == [COMMITTED] * 16
    assert states(shard, 0, range(144)) == [ABSENT] * 144
    assert shard.counters.evicted_blocks == 144


def test_a_batch_larger_than_the_pool_stores_its_prefix_and_refuses_the_rest() -> None:
    shard = shard_of(1)
    assert store(shard, shard.open_session(), 0, range(12)) == [STORED] * 8 + [NO_ROOM] * 4
    assert shard.counters.refused_puts == 4


def test_pinned_and_leased_blocks_survive_ten_times_the_capacity() -> None:
    shard = shard_of(2)
    session = shard.open_session()
    rows = reserve(shard, session, 0, range(4))
    shard.commit(session, refs(rows))
    pin(shard, 0, 1)
    shard.lease(session, refs(rows[2:3]), 60_000, 0.0)
    for first in range(10, 170, 4):
        store(shard, session, 0, range(first, first + 4))
    assert states(shard, 0, range(4)) == [COMMITTED, COMMITTED, COMMITTED, ABSENT]


def test_with_everything_pinned_a_put_is_refused_until_something_is_unpinned() -> None:
    shard = shard_of(1)
    session = shard.open_session()
    store(shard, session, 0, range(8))
    pin(shard, *range(8))
    pin(shard, 3)  # pins are counted
    assert store(shard, session, 0, [100, 101]) == [NO_ROOM, NO_ROOM]
    pin(shard, 3, 5, on=False)
    assert store(shard, session, 0, [100, 101]) == [STORED, NO_ROOM]
    assert states(shard, 0, [3, 5, 100]) == [COMMITTED, ABSENT, COMMITTED]


def test_another_block_size_gets_the_whole_pool_in_one_batch() -> None:
    shard = shard_of(6)
    session = shard.open_session()
    store(shard, session, 0, range(48))
    assert store(shard, session, 1, range(100, 112)) == [STORED] * 12
    assert store(shard, session, 0, range(200, 248)) == [STORED] * 48
    assert shard.accounting()["committed"] == 48 * 4096


def test_pinned_blocks_in_many_chunks_do_not_keep_another_block_size_out_of_the_others() -> None:
    shard = shard_of(20)
    session = shard.open_session()
    store(shard, session, 0, range(160))
    # The oldest block of each of the first twelve chunks, as a reader would pin the heads of twelve prompts.
    offsets = reserved_offsets(shard, range(160))
    pinned = [int(np.flatnonzero(offsets // CHUNK == chunk)[0]) for chunk in np.unique(offsets // CHUNK)[:12].tolist()]
    pin(shard, *pinned)
    assert store(shard, session, 1, range(200, 220)) == [STORED] * 16 + [NO_ROOM] * 4
    assert states(shard, 0, pinned) == [COMMITTED] * 12


def reserved_offsets(shard: Shard, numbers: range) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return shard.blocks.offset[: len(numbers)]


def test_a_put_never_evicts_the_blocks_of_its_own_prefix_that_are_there() -> None:
    shard = shard_of(2)
    session = shard.open_session()
    store(shard, session, 0, range(4))  # the oldest of all, and the prefix of what comes last
    store(shard, session, 0, range(50, 62))
    assert store(shard, session, 0, range(10)) == [EXISTS] * 4 + [STORED] * 6
    assert states(shard, 0, range(10)) == [COMMITTED] * 10


def test_a_key_is_written_by_one_and_the_others_learn_it() -> None:
    shard = shard_of(2)
    first, second = shard.open_session(), shard.open_session()
    rows = reserve(shard, first, 0, [1, 2, 1])
    assert rows["status"].tolist() == [STORED, STORED, PENDING]
    assert reserve(shard, second, 0, [2, 3])["status"].tolist() == [PENDING, STORED]
    shard.commit(first, refs(rows[:2]))
    assert reserve(shard, second, 0, [1, 2])["status"].tolist() == [EXISTS, EXISTS]


def test_reserved_blocks_show_the_layers_that_have_arrived_and_never_go_back() -> None:
    shard = shard_of(2)
    session = shard.open_session()
    rows = reserve(shard, session, 1, [1])
    for layers_ready, answer in [(1, 1), (0, 0), (3, 0), (2, 1), (2, 1)]:
        assert shard.publish(session, refs(rows), layers_ready).tolist() == [answer]
    row = shard.lookup(KeyRequest(1, keys(1)))[0]
    assert (row["state"], row["layers_ready"]) == (RESERVED, 2)
    assert shard.publish(shard.open_session(), refs(rows), 2).tolist() == [0]


def test_a_dead_clients_reservation_is_free_at_once() -> None:
    shard = shard_of(1)
    dead, other = shard.open_session(), shard.open_session()
    reserve(shard, dead, 0, range(8))
    shard.close_session(dead)
    assert store(shard, other, 0, range(8)) == [STORED] * 8


def test_a_frozen_writers_key_is_writable_elsewhere_when_its_time_is_over_and_its_late_commit_counts_for_nothing() -> (
    None
):
    shard = shard_of(1)
    frozen, other = shard.open_session(), shard.open_session()
    old = reserve(shard, frozen, 0, [1], now_s=0.0, ttl_ms=1000)
    assert reserve(shard, other, 0, [1], now_s=0.9)["status"].tolist() == [PENDING]
    fresh = reserve(shard, other, 0, [1], now_s=1.0)
    assert fresh["status"].tolist() == [STORED]
    assert fresh["offset"][0] != old["offset"][0]
    assert shard.gauges()["quarantined_blocks"] == 1
    # The slot that it may still write into stays out of use whatever pressure there is.
    store(shard, other, 0, range(10, 40), now_s=1.0)
    assert old["offset"][0] not in shard.blocks.offset[shard.blocks.life == 2]
    assert shard.commit(frozen, refs(old)).tolist() == [0]
    assert shard.gauges()["quarantined_blocks"] == 0
    assert states(shard, 0, [1]) == [RESERVED]
    assert shard.commit(other, refs(fresh)).tolist() == [1]


def test_a_frozen_writers_slot_comes_back_when_it_dies() -> None:
    shard = shard_of(1)
    frozen = shard.open_session()
    reserve(shard, frozen, 0, range(8), ttl_ms=1000)
    shard.expire(2.0)
    assert reserve(shard, shard.open_session(), 0, [100], now_s=2.0)["status"].tolist() == [NO_ROOM]
    shard.close_session(frozen)
    assert shard.accounting()["free"] == CHUNK


def test_a_deleted_block_stays_where_it_is_until_its_last_reader_lets_go() -> None:
    shard = shard_of(1)
    session, other = shard.open_session(), shard.open_session()
    rows = reserve(shard, session, 0, range(8))
    shard.commit(session, refs(rows))
    first, _ = shard.lease(session, refs(rows[:1]), 60_000, 0.0)
    second, _ = shard.lease(other, refs(rows[:1]), 60_000, 0.0)
    assert shard.delete(KeyRequest(0, keys(0))).tolist() == [1]
    assert states(shard, 0, [0]) == [ABSENT]
    shard.release(session, np.array([first], dtype=np.uint64), 1.0)
    assert shard.gauges()["condemned_blocks"] == 1
    assert shard.accounting()["free"] == 0
    shard.release(other, np.array([second], dtype=np.uint64), 1.0)
    assert shard.accounting()["free"] == 4096


def test_a_lease_ends_on_time_unless_it_is_renewed_and_with_its_session_in_any_case() -> None:
    shard = shard_of(1)
    session, other = shard.open_session(), shard.open_session()
    rows = reserve(shard, session, 0, [1])
    shard.commit(session, refs(rows))
    lease, _ = shard.lease(session, refs(rows), 1000, 0.0)
    number = np.array([lease], dtype=np.uint64)
    assert shard.renew(other, number, 1000, 0.5).tolist() == [0], "a lease is its session's"
    assert shard.renew(session, number, 1000, 0.5).tolist() == [1]
    shard.expire(1.2)
    assert shard.gauges()["held_blocks"] == 1
    assert shard.renew(session, number, 1000, 1.5).tolist() == [0], "too late, even before expire() has seen it"
    shard.expire(1.5)
    assert shard.gauges()["held_blocks"] == 0
    assert shard.counters.expired_leases == 1
    shard.lease(session, refs(rows), 1000, 2.0)
    shard.close_session(session)
    assert shard.gauges()["leases_now"] == 0


def test_flush_removes_one_namespace_or_all() -> None:
    shard = shard_of(4)
    session = shard.open_session()
    store(shard, session, 0, range(4))
    store(shard, session, 1, range(10, 12))
    assert shard.flush(b"nobody knows me!") == 0
    assert shard.flush(SMALL.digest) == 4
    assert [space["blocks"] for space in shard.namespaces()] == [2]
    assert shard.flush(b"") == 2
    assert shard.namespaces() == []


def test_deleting_a_pinned_block_ends_its_pins() -> None:
    shard = shard_of(1)
    session = shard.open_session()
    rows = reserve(shard, session, 0, [1])
    shard.commit(session, refs(rows))
    pin(shard, 1)
    shard.lease(session, refs(rows), 60_000, 0.0)
    shard.delete(KeyRequest(0, keys(1)))
    assert shard.gauges()["pinned_blocks"] == 0


def test_the_index_grows_with_the_blocks_and_readers_of_the_old_one_are_told() -> None:
    made: list[IndexSegment] = []

    def new_segment(size_bytes: int) -> IndexSegment:
        made.append(segment(size_bytes))
        return made[-1]

    board = np.zeros(64 * CHUNK // 4096, np.uint32)
    shard = Shard(
        pool_bytes=64 * CHUNK,
        chunk_bytes=CHUNK,
        new_segment=new_segment,
        make_policy=lambda: LruPolicy(board),
        index_entries=4,
    )
    shard.open_namespace(SMALL)
    session = shard.open_session()
    before = IndexReader(made[0].memory)
    rows = reserve(shard, session, 0, range(10))
    assert not before.retired
    store(shard, session, 0, range(100, 300))
    assert before.retired
    assert shard.counters.index_resizes > 0
    after = IndexReader(made[-1].memory)
    assert not after.retired
    assert after.probe(keys(*range(10))).generations.tolist() == rows["generation"].tolist()
    assert shard.commit(session, refs(rows)).all()


# --- bad input --------------------------------------------------------------------------------------------------------


def test_keys_of_another_namespace_are_refused_by_name_and_nothing_is_reserved() -> None:
    shard = shard_of(4)
    session = shard.open_session()
    store(shard, session, 0, [1])
    with pytest.raises(NamespaceMismatch, match=r"the first is key 1 of this call, stored under 0101.*\(model-1\)"):
        reserve(shard, session, 1, [50, 1])
    assert states(shard, 1, [50]) == [ABSENT]


def test_blocks_of_another_size_than_the_namespaces_are_refused() -> None:
    shard = shard_of(4)
    request = KeyRequest(0, keys(1), ttl_ms=1000, size_bytes=99)
    with pytest.raises(NamespaceMismatch, match=r"blocks of 99 bytes; namespace 0101.* has blocks of 100 bytes"):
        shard.reserve(shard.open_session(), request, 0.0)


def test_a_namespace_that_was_never_opened_is_refused() -> None:
    shard = shard_of(4)
    with pytest.raises(NamespaceMismatch, match="unknown namespace number 2"):
        shard.lookup(KeyRequest(2, keys(1)))


def test_a_digest_with_another_geometry_is_refused() -> None:
    shard = shard_of(4)
    with pytest.raises(NamespaceMismatch, match="1 layers x 100 bytes here, not 2 x 50"):
        shard.open_namespace(namespace(1, 2, 50))


def test_the_largest_block_fills_a_chunk_with_its_checksums_and_one_byte_more_is_refused() -> None:
    shard = shard_of(2)
    largest = CHUNK - 2 * 8
    space = shard.open_namespace(namespace(7, 1, largest))
    assert store(shard, shard.open_session(), space, [1, 2, 3]) == [STORED, STORED, NO_ROOM]
    with pytest.raises(BlockTooLarge, match=f"don't fit the largest slot of {CHUNK} bytes.*--chunk"):
        shard.open_namespace(namespace(8, 1, largest + 1))


def test_there_is_a_limit_on_namespaces() -> None:
    shard = shard_of(1)
    for number in range(2, NAMESPACES_MAX):
        shard.open_namespace(NamespaceInfo(number.to_bytes(16, "big"), 1, 100, ""))
    with pytest.raises(UsageError, match=f"{NAMESPACES_MAX} namespaces already"):
        shard.open_namespace(namespace(99, 1, 100))


def test_the_policy_is_told_each_blocks_key_and_the_value_of_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, _ = new_shard()
    told: list[tuple[list[int], list[float]]] = []

    def admit(handles: np.ndarray, low: np.ndarray, values: np.ndarray) -> None:
        assert len(handles) == len(low)
        told.append((low.tolist(), values.tolist()))

    monkeypatch.setattr(shard.tenants.policy(0), "admit", admit)
    session = shard.open_session()
    for number, value in ((1, 1.0), (2, 0.25)):
        space = shard.open_namespace(replace(namespace(number, 1, 4096), value=value))
        store(shard, session, space, [10 * number, 10 * number + 1])
    assert told == [(keys(10, 11)["lo"].tolist(), [1.0, 1.0]), (keys(20, 21)["lo"].tolist(), [0.25, 0.25])]
