"""Joint blocks in the shard, case by case; `test_shard_model` covers the combinations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvstore.core.errors import NamespaceMismatch, UsageError
from kvstore.core.states import BlockState, PutStatus
from kvstore.server.shard.parts import PARTS_MAX
from kvstore.server.shard.shard import Shard
from kvstore.wire.messages import Finish, KeyRequest
from tests.server.shards import keys, namespace, new_shard, refs, reserve, reserve_part, states, store

SPACE = namespace(1, 2, 1000)  # slots of 4 KiB, 8 in a chunk
FIRST, SECOND = (0, 500), (500, 1000)
STORED, EXISTS, PENDING, NO_ROOM = PutStatus.STORED, PutStatus.EXISTS, PutStatus.PENDING, PutStatus.NO_ROOM
ABSENT, RESERVED, COMMITTED = BlockState.ABSENT, BlockState.RESERVED, BlockState.COMMITTED


def shard_of(chunks: int = 1) -> Shard:
    shard, _ = new_shard(chunks)
    assert shard.open_namespace(SPACE) == 0
    return shard


def watermark(shard: Shard, number: int) -> int:
    return int(shard.lookup(KeyRequest(0, keys(number)))["layers_ready"][0])


def reserved_bytes(shard: Shard) -> int:
    return shard.accounting()["reserved"]


def test_writers_in_any_order_get_the_same_slot_and_the_last_commit_makes_the_block_visible() -> None:
    for order in [(FIRST, SECOND), (SECOND, FIRST)]:
        shard = shard_of()
        writers = [shard.open_session() for _ in order]
        rows = [reserve_part(shard, w, 0, [1, 2], part) for w, part in zip(writers, order, strict=True)]
        assert all((row["status"] == STORED).all() for row in rows)
        assert rows[0]["offset"].tolist() == rows[1]["offset"].tolist()
        assert shard.commit(writers[1], refs(rows[1])).tolist() == [1, 1]
        assert states(shard, 0, [1, 2]) == [RESERVED] * 2
        assert shard.commit(writers[0], refs(rows[0])).tolist() == [1, 1]
        assert states(shard, 0, [1, 2]) == [COMMITTED] * 2
        assert len(shard.parts) == 0
        assert reserve_part(shard, writers[0], 0, [1], FIRST)["status"].tolist() == [EXISTS]


def test_readers_see_the_layers_that_all_parts_have_and_none_before_all_of_a_layer_has_a_writer() -> None:
    shard = shard_of()
    one, two = shard.open_session(), shard.open_session()
    first = refs(reserve_part(shard, one, 0, [1], FIRST))
    assert shard.publish(one, first, 2).tolist() == [1]
    assert watermark(shard, 1) == 0
    second = refs(reserve_part(shard, two, 0, [1], SECOND))
    assert watermark(shard, 1) == 0
    for layers, seen in [(1, 1), (0, 1), (2, 2)]:
        assert shard.publish(two, second, layers).tolist() == [layers >= seen]
        assert watermark(shard, 1) == seen
    assert shard.publish(two, second, 3).tolist() == [0]
    assert shard.publish(one, second, 2).tolist() == [0], "another one's part"


def test_bytes_that_somebody_writes_are_pending_for_others_and_the_rest_is_theirs() -> None:
    shard = shard_of()
    one, two = shard.open_session(), shard.open_session()
    reserve_part(shard, one, 0, [1], FIRST)
    for part in (FIRST, (0, 250), (499, 600), (0, 1000)):
        assert reserve_part(shard, two, 0, [1], part)["status"].tolist() == [PENDING]
    assert reserve(shard, two, 0, [1])["status"].tolist() == [PENDING], "a whole block"
    # Ranks of another split help to complete it.
    rows = [reserve_part(shard, two, 0, [1], part) for part in ((500, 750), (750, 1000))]
    assert [row["status"].tolist() for row in rows] == [[STORED], [STORED]]
    assert reserve_part(shard, two, 0, [1], SECOND)["status"].tolist() == [PENDING]


def test_no_part_joins_a_block_that_one_writer_writes_as_a_whole() -> None:
    shard = shard_of()
    one, two = shard.open_session(), shard.open_session()
    rows = reserve(shard, one, 0, [1])
    assert reserve_part(shard, two, 0, [1], SECOND)["status"].tolist() == [PENDING]
    shard.commit(one, refs(rows))
    assert reserve_part(shard, two, 0, [1], SECOND)["status"].tolist() == [EXISTS]


def test_of_a_key_that_is_named_twice_one_is_reserved_or_joined() -> None:
    shard = shard_of()
    one, two = shard.open_session(), shard.open_session()
    assert reserve_part(shard, one, 0, [1, 2, 1], FIRST)["status"].tolist() == [STORED, STORED, PENDING]
    assert reserve_part(shard, two, 0, [1, 1, 3], SECOND)["status"].tolist() == [STORED, PENDING, STORED]


@pytest.mark.parametrize("end", ["abort", "leave", "expire"])
def test_a_part_that_fails_fails_the_block_and_its_slot_waits_for_the_other_writers(end: str) -> None:
    shard = shard_of()
    failing, going_on, other = (shard.open_session() for _ in range(3))
    first = reserve_part(shard, failing, 0, [1], FIRST, ttl_ms=1000)
    second = reserve_part(shard, going_on, 0, [1], SECOND, ttl_ms=60_000)
    match end:
        case "abort":
            assert shard.abort(failing, refs(first)).tolist() == [1]
        case "leave":
            shard.close_session(failing)
        case _:
            shard.publish(going_on, refs(second), 1, 60_000, 0.9)
            shard.expire(1.0)
    assert states(shard, 0, [1]) == [ABSENT]
    assert shard.gauges()["quarantined_blocks"] == 1
    # All other slots can be had, but not that one, and the key can be written into another one.
    rows = reserve(shard, other, 0, range(1, 10), 1.0)
    assert rows["status"].tolist() == [STORED] * 7 + [NO_ROOM] * 2
    assert first["offset"][0] not in rows["offset"][:7]
    assert shard.publish(going_on, refs(second), 2).tolist() == [0]
    assert shard.commit(going_on, refs(second)).tolist() == [0], "it learns it at last"
    if end == "expire":
        assert reserve(shard, other, 0, [20])["status"].tolist() == [NO_ROOM], "the late one has not reported"
        assert shard.abort(failing, refs(first)).tolist() == [0]
    assert reserve(shard, other, 0, [20])["status"].tolist() == [STORED]
    assert shard.gauges()["quarantined_blocks"] == 0
    assert len(shard.parts) == 0


def test_a_block_whose_other_writer_never_comes_is_dropped_after_its_time_however_alive_the_first_one_is() -> None:
    shard = shard_of()
    alone, other = shard.open_session(), shard.open_session()
    rows = reserve_part(shard, alone, 0, [1], FIRST, 0.0, 10_000)
    shard.publish(alone, refs(rows), 1, 10_000, 9.0)
    assert shard.commit(alone, refs(rows)).tolist() == [1]
    shard.expire(9.9)
    assert states(shard, 0, [1]) == [RESERVED]
    shard.expire(10.0)
    assert states(shard, 0, [1]) == [ABSENT]
    assert shard.counters.expired_reservations == 1
    assert (reserved_bytes(shard), len(shard.parts)) == (0, 0), "its only writer has reported"
    assert store(shard, other, 0, [1]) == [STORED]


def test_who_has_committed_a_part_may_leave_and_who_publishes_has_more_time() -> None:
    shard = shard_of()
    quick, slow = shard.open_session(), shard.open_session()
    first = reserve_part(shard, quick, 0, [1], FIRST, 0.0, 1000)
    second = reserve_part(shard, slow, 0, [1], SECOND, 0.0, 1000)
    shard.commit(quick, refs(first))
    shard.close_session(quick)
    for now_s in (0.9, 1.8, 2.7):
        shard.expire(now_s)
        assert shard.publish(slow, refs(second), 1, 1000, now_s).tolist() == [1]
    assert shard.commit(slow, refs(second)).tolist() == [1]
    assert states(shard, 0, [1]) == [COMMITTED]


def test_a_reader_keeps_the_slot_of_a_dropped_block_beyond_its_writers() -> None:
    shard = shard_of()
    one, two, reader = (shard.open_session() for _ in range(3))
    first, second = (reserve_part(shard, s, 0, [1], part) for s, part in ((one, FIRST), (two, SECOND)))
    handle = shard.find(keys(1))
    found = first.copy()
    found["handle"], found["generation"] = handle, shard.blocks.generation[handle]
    lease, held = shard.lease(reader, refs(found), 60_000, 0.0)
    assert held.tolist() == [1]
    shard.abort(one, refs(first))
    shard.abort(two, refs(second))
    assert shard.gauges()["condemned_blocks"] == 1
    assert (reserve(shard, one, 0, range(10, 18))["status"] == STORED).sum() == 7
    shard.release(reader, np.array([lease], dtype=np.uint64), 0.0)
    assert reserve(shard, one, 0, [30])["status"].tolist() == [STORED]


def test_a_deleted_block_that_is_being_written_jointly_waits_for_its_writers() -> None:
    shard = shard_of()
    one, two = shard.open_session(), shard.open_session()
    first, second = (reserve_part(shard, s, 0, [1], part) for s, part in ((one, FIRST), (two, SECOND)))
    assert shard.delete(KeyRequest(0, keys(1))).tolist() == [1]
    assert shard.commit(one, refs(first)).tolist() == [0]
    assert shard.gauges()["quarantined_blocks"] == 1
    assert shard.commit(two, refs(second)).tolist() == [0]
    assert reserved_bytes(shard) == 0


def test_only_the_last_writer_is_told_that_it_is_the_last_and_then_its_commit_counts() -> None:
    shard = shard_of()
    one, two = shard.open_session(), shard.open_session()
    first = refs(reserve_part(shard, one, 0, [1, 2], FIRST))
    assert shard.finish(one, first[:1])["status"].tolist() == [Finish.DONE], "nobody has the rest yet"
    second = refs(reserve_part(shard, two, 0, [1, 2], SECOND))
    answers = shard.finish(two, second)
    assert answers["status"].tolist() == [Finish.LAST, Finish.DONE]
    assert answers["generation"][0] == shard.blocks.generation[shard.find(keys(1))[0]]
    assert states(shard, 0, [1, 2]) == [RESERVED, RESERVED]
    assert shard.commit(two, second[:1]).tolist() == [1]
    assert states(shard, 0, [1, 2]) == [COMMITTED, RESERVED]
    assert shard.finish(two, second)["status"].tolist() == [Finish.ENDED] * 2
    whole = refs(reserve(shard, two, 0, [3]))
    assert shard.finish(two, whole)["status"].tolist() == [Finish.DONE], "a block without parts"


@pytest.mark.parametrize("part", [(0, 0), (500, 1001), (1 << 40, (1 << 40) + 500), (0, 3), (1000, 1500)])
def test_a_part_that_is_no_part_is_refused_and_reserves_nothing(part: tuple[int, int]) -> None:
    shard = shard_of()
    with pytest.raises(UsageError, match=rf"bytes {part[0]} to {part[1]} of layers of 1000: allowed is"):
        reserve_part(shard, shard.open_session(), 0, [1], part)
    assert reserved_bytes(shard) == 0


def test_keys_of_another_namespace_and_blocks_of_another_size_are_refused() -> None:
    shard = shard_of()
    assert shard.open_namespace(namespace(2, 2, 1000)) == 1
    session = shard.open_session()
    reserve_part(shard, session, 0, [1], FIRST)
    with pytest.raises(NamespaceMismatch, match="model-1"):
        reserve_part(shard, session, 1, [1], SECOND)


def test_a_block_of_as_many_parts_as_there_can_be_and_more_blocks_than_the_tables_begin_with() -> None:
    shard = shard_of(400)
    layer = SPACE.layer_bytes
    ends = np.linspace(0, layer, PARTS_MAX // 2 + 1).astype(int).tolist()
    parts = list(itertools.pairwise(ends))
    session = shard.open_session()
    rows = [reserve_part(shard, session, 0, range(20), part) for part in parts]
    for row in rows:
        assert states(shard, 0, range(20)) == [RESERVED] * 20
        assert shard.commit(session, refs(row)).all()
    assert states(shard, 0, range(20)) == [COMMITTED] * 20
    halves = [reserve_part(shard, session, 0, range(100, 2900), part) for part in (FIRST, SECOND)]
    for row in halves:
        assert shard.commit(session, refs(row)).all()
    assert states(shard, 0, range(100, 2900)) == [COMMITTED] * 2800
    assert len(shard.parts) == 0
