"""The SSD tier keeps what it says it keeps, and says when it doesn't."""

import errno
import logging
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import ConfigError, ProtocolError
from kvstore.server.tiers.disk.catalog import Batch, Catalog, CatalogDamagedError
from kvstore.server.tiers.disk.engine import SCRATCH_BYTES
from kvstore.server.tiers.disk.files import SystemFiles
from kvstore.server.tiers.disk.messages import LOAD_ROW, Load, Loaded, LoadStatus, Removed, Stored, StoreStatus
from kvstore.testing.disk_faults import FaultyFiles
from kvstore.transport.trailer import read_trailers, sums_of
from tests.server.tiers.disk.rig import (
    DIGEST,
    OTHER_DIGEST,
    Rig,
    content_of,
    copy_as_it_is,
    disk_usage,
    key_of,
    keys_of,
)

DURABLE, EXISTS, STALE, NO_ROOM, FAILED = (
    StoreStatus.DURABLE,
    StoreStatus.EXISTS,
    StoreStatus.STALE,
    StoreStatus.NO_ROOM,
    StoreStatus.FAILED,
)
OK, MISS, LOST = LoadStatus.OK, LoadStatus.MISS, LoadStatus.FAILED


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "page cache"])
@pytest.mark.parametrize("layer_bytes", [1, 100, 4095, 4096, 5000, 16 << 10])
def test_blocks_of_any_size_come_back_whole_and_by_layer_range(tmp_path: Path, layer_bytes: int, direct: bool) -> None:
    rig = Rig(tmp_path, layers=5, layer_bytes=layer_bytes, files=SystemFiles(tmp_path, direct=direct))
    assert rig.store(range(7)) == [DURABLE] * 7
    assert rig.load([6, 2, 2, 0]) == [OK] * 4
    for first in range(5):
        for end in range(first + 1, 6):
            assert rig.load([3, 5], (first, end)) == [OK, OK]
    assert rig.load([3], (2, 6)) == [MISS]
    rig.close()
    again = Rig(tmp_path, layers=5, layer_bytes=layer_bytes)
    assert again.load(range(8)) == [OK] * 7 + [MISS]
    again.close()


@pytest.mark.parametrize("layer_bytes", [SCRATCH_BYTES // 3, SCRATCH_BYTES - 1, SCRATCH_BYTES + 5000])
def test_layers_may_be_cut_by_the_memory_that_they_go_through(tmp_path: Path, layer_bytes: int) -> None:
    rig = Rig(tmp_path, capacity=512 << 20, layers=3, layer_bytes=layer_bytes)
    assert rig.store([1, 2]) == [DURABLE] * 2
    assert rig.load([2, 1]) == [OK, OK]
    for layers in [(0, 1), (1, 2), (2, 3), (1, 3)]:
        assert rig.load([1], layers) == [OK]
    rig.close()


def test_neighbours_of_different_namespaces_are_read_together(tmp_path: Path) -> None:
    rig = Rig(tmp_path, layers=4, layer_bytes=1024)
    rig.store([1, 3])
    rig.layers, rig.layer_bytes = 2, 2048
    rig.store([2, 4], digest=OTHER_DIGEST)
    assert rig.load([1, 2, 3, 4]) == [OK] * 4
    rig.close()


@pytest.mark.parametrize("layers", [(0, 0), (2, 4)], ids=["whole", "the last layers of"])
def test_a_block_gets_its_trailer_with_its_last_layer(tmp_path: Path, layers: tuple[int, int]) -> None:
    rig = Rig(tmp_path)
    rig.store([1])
    rig.wait(rig.begin_load([1], layers, generation=1234), Loaded)
    trailer = read_trailers(rig.pool, np.array([0]), rig.size, rig.layers)[0].tolist()
    assert trailer == [1234, *sums_of(memoryview(content_of(1, rig.size)), rig.layer_bytes)]
    rig.close()


def test_a_block_is_stored_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert rig.store([1, 2, 1]) == [DURABLE, DURABLE, StoreStatus.BUSY]
    assert rig.store([2, 3]) == [EXISTS, DURABLE]
    assert rig.stats()["stored_blocks"] == 3
    rig.close()


def test_a_removed_key_stays_removed_though_its_write_behind_comes_late(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store([1], generation=5)
    rig.generation = 10
    assert rig.remove([1, 2]) == 1
    assert rig.store([1, 2], generation=9) == [STALE, STALE]
    rig.close()
    # The worker is started again while the shard lives on: the same boot.
    again = Rig(tmp_path)
    assert again.scanned == []
    assert again.store([1, 2], generation=9) == [STALE, STALE]
    assert again.store([1, 2], generation=10) == [DURABLE, DURABLE]
    again.close()
    # Another boot counts generations from 1 again.
    other = Rig(tmp_path, boot=b"o" * 16)
    other.remove([2])
    assert other.store([3], generation=1) == [DURABLE]
    other.close()


def test_a_remove_beats_a_store_that_is_under_way(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for number in range(20):
        stored = rig.begin_store([number])
        removed = rig.begin_remove([number])
        assert rig.wait(removed, Removed).blocks == 1
        assert rig.wait(stored, Stored).statuses.tolist() in ([STALE], [StoreStatus.BUSY])
        assert rig.load([number]) == [MISS]
    rig.close()
    again = Rig(tmp_path)
    assert again.scanned == []
    assert again.stats()["disk_bytes"] == disk_usage(tmp_path) == 0
    again.close()


def test_a_flush_takes_one_namespace_and_survives_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store([1, 2, 3])
    rig.store([4, 5], digest=OTHER_DIGEST)
    late = rig.generation
    rig.generation += 1
    assert rig.flush(DIGEST) == 3
    assert rig.store([1], generation=late) == [STALE]
    assert rig.store([6], digest=OTHER_DIGEST, generation=late) == [DURABLE]
    rig.close()
    again = Rig(tmp_path, boot=b"o" * 16)
    assert sorted(again.scanned) == sorted(map(key_of, [4, 5, 6]))
    assert again.flush() == 3
    assert again.load([4, 5, 6]) == [MISS] * 3
    assert again.stats()["disk_bytes"] == disk_usage(tmp_path) == 0
    again.close()


def test_the_capacity_holds_on_disk_and_the_oldest_go_first(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=8 << 20)
    for start in range(0, 400, 20):
        assert rig.store(range(start, start + 20)) == [DURABLE] * 20
        stats = rig.stats()
        assert stats["disk_bytes"] == disk_usage(tmp_path) <= 8 << 20
    assert rig.gone
    assert rig.gone.index(key_of(19)) < rig.gone.index(key_of(0)), "the end of a prefix goes before its start"
    assert key_of(399) not in rig.gone
    kept = [number for number in range(400) if key_of(number) not in rig.gone]
    assert len(kept) > 100
    assert rig.load(kept) == [OK] * len(kept)
    rig.close()


def test_after_a_restart_the_oldest_still_go_first(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=8 << 20)
    for start in range(0, 80, 20):
        rig.store(range(start, start + 20))
    rig.close()
    again = Rig(tmp_path, capacity=8 << 20)
    assert again.scanned == [key_of(start + depth) for start in range(60, -1, -20) for depth in range(20)]
    for start in range(80, 160, 20):
        again.store(range(start, start + 20))
    oldest = [key_of(number) for number in range(19, -1, -1)]
    assert again.gone[: len(oldest)] == oldest[: len(again.gone)]
    assert key_of(79) not in again.gone
    again.close()


def test_a_used_block_is_kept_longer(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=8 << 20)
    rig.store(range(20))
    for start in range(20, 160, 20):
        assert rig.load([7]) == [OK]
        rig.store(range(start, start + 20))
    assert key_of(7) not in rig.gone
    assert key_of(8) in rig.gone
    rig.close()


def test_another_block_size_takes_over_whole_slabs(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=8 << 20)
    for start in range(0, 160, 20):
        rig.store(range(start, start + 20))
    rig.layers, rig.size = 2, 2 * rig.layer_bytes
    for start in range(1000, 1300, 20):
        assert rig.store(range(start, start + 20), digest=OTHER_DIGEST) == [DURABLE] * 20
    assert rig.load(range(1280, 1300)) == [OK] * 20
    assert rig.stats()["disk_bytes"] == disk_usage(tmp_path) <= 8 << 20
    rig.close()


def test_a_block_larger_than_a_slab_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=32 << 20, layers=1, layer_bytes=2 << 20)
    assert rig.store([1]) == [NO_ROOM]
    rig.close()


def test_a_smaller_capacity_after_a_restart_holds_too(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=8 << 20)
    for start in range(0, 100, 20):
        rig.store(range(start, start + 20))
    rig.close()
    again = Rig(tmp_path, capacity=4 << 20)
    assert again.stats()["disk_bytes"] == disk_usage(tmp_path) <= 4 << 20
    assert 40 <= len(again.scanned) < 100
    assert again.store(range(200, 220)) == [DURABLE] * 20
    again.close()


def test_two_engines_on_one_folder_the_second_refuses(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with pytest.raises(ConfigError, match="another server uses this folder"):
        Rig(tmp_path)
    rig.close()
    Rig(tmp_path).close()


def test_a_request_outside_the_pool_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store([1])
    rows = np.zeros(1, LOAD_ROW)
    rows["key"] = keys_of([1])
    for offset in (len(rig.pool) - 4096, 100):
        rows["offset"] = offset
        with pytest.raises(ProtocolError, match="outside the pool"):
            rig.submit(Load(rows))
    rig.close()


def test_a_namespace_has_one_geometry(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store([1])
    rig.layers, rig.size = 2, 2 * rig.layer_bytes
    assert rig.store([2]) == [FAILED]
    rig.close()


# --- faults -------------------------------------------------------------------------------------------------------


def test_a_full_disk_refuses_stores_and_loses_nothing(tmp_path: Path) -> None:
    faults = FaultyFiles(SystemFiles(tmp_path))
    rig = Rig(tmp_path, files=faults)
    assert rig.store(range(20)) == [DURABLE] * 20
    faults.full = True
    assert set(rig.store(range(20, 60))) == {DURABLE, NO_ROOM}, "what there is is used"
    assert rig.stats()["disk_bytes"] == disk_usage(tmp_path) == 2 << 20
    there = [number for number, status in enumerate(rig.load(range(60))) if status == OK]
    assert len(there) == 32
    faults.full = False
    until_s = time.monotonic() + 20
    while rig.store(range(100, 120)) != [DURABLE] * 20:
        rig.step()
        assert time.monotonic() < until_s
    rig.close()


def test_a_file_system_without_room_for_more_slabs_evicts_within_those_it_has(tmp_path: Path) -> None:
    class Small(FaultyFiles):
        def free_bytes(self) -> int:
            return 0 if len(list(tmp_path.glob("slab-*.kv"))) >= 2 else 1 << 40

    rig = Rig(tmp_path, files=Small(SystemFiles(tmp_path)))
    for start in range(0, 200, 20):
        assert DURABLE in rig.store(range(start, start + 20))
    assert rig.stats()["disk_bytes"] == disk_usage(tmp_path) == 2 * (2 << 20)
    assert rig.stats()["refused_growth"] > 0
    assert rig.load([199]) == [OK]
    rig.close()


def test_a_write_error_fails_the_store_and_nothing_else(tmp_path: Path) -> None:
    faults = FaultyFiles(SystemFiles(tmp_path))
    rig = Rig(tmp_path, files=faults)
    rig.store([1])
    faults.broken = True
    assert rig.store([2, 3]) == [FAILED, FAILED]
    faults.broken = False
    assert rig.load([1, 2, 3]) == [OK, MISS, MISS]
    assert rig.store([2, 3]) == [DURABLE, DURABLE]
    assert rig.load([1, 2, 3]) == [OK] * 3
    rig.close()


def test_a_read_error_costs_one_block(tmp_path: Path) -> None:
    faults = FaultyFiles(SystemFiles(tmp_path))
    rig = Rig(tmp_path, files=faults)
    rig.store(range(10))
    faults.fail_next_read()  # of all ten together
    assert rig.load(range(10)) == [OK] * 10
    faults.fail_next_read()
    faults.fail_next_read()  # and of one alone
    statuses = rig.load(range(10))
    assert sorted(statuses) == [OK] * 9 + [LOST]
    lost = statuses.index(LOST)
    assert rig.gone == [key_of(lost)]
    assert rig.load([lost]) == [MISS]
    assert rig.store([lost]) == [DURABLE]
    rig.close()


@pytest.mark.parametrize("size", [4096, 5000, 100_000, 300_000])
def test_a_short_read_is_continued(tmp_path: Path, size: int) -> None:
    faults = FaultyFiles(SystemFiles(tmp_path))
    rig = Rig(tmp_path, files=faults)
    rig.store(range(10))
    faults.shorten_next_read(size)
    assert rig.load(range(10)) == [OK] * 10
    rig.close()


def test_a_read_that_brings_nothing_is_a_failure(tmp_path: Path) -> None:
    faults = FaultyFiles(SystemFiles(tmp_path))
    rig = Rig(tmp_path, files=faults)
    rig.store([1])
    faults.shorten_next_read(0)
    assert rig.load([1]) == [LOST]
    assert rig.load([1]) == [MISS]
    rig.close()


@pytest.mark.parametrize("layers", [(0, 0), (1, 3)])
def test_a_flipped_byte_on_the_way_is_a_miss(tmp_path: Path, layers: tuple[int, int]) -> None:
    faults = FaultyFiles(SystemFiles(tmp_path))
    rig = Rig(tmp_path, files=faults, layer_bytes=8192)
    for position in (0, 1, 8191, 8192, 16383):
        rig.store([position])
        faults.flip_in_next_read(position)
        assert rig.load([position], layers) == [LOST]
        assert rig.load([position], layers) == [MISS]
    assert rig.stats()["failed_reads"] == 5
    rig.close()


def test_a_flipped_byte_anywhere_in_a_slab_is_never_served(tmp_path: Path) -> None:
    rig = Rig(tmp_path, layers=4, layer_bytes=2048)
    rig.store(range(100))
    rig.close()
    random = np.random.default_rng(1)
    lost = 0
    for _ in range(20):
        path = tmp_path / "slab-00000.kv"
        with path.open("r+b") as file:
            at = int(random.integers(0, 100 * 8192))
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << int(random.integers(0, 8)))]))
        again = Rig(tmp_path, layers=4, layer_bytes=2048)
        there = again.load(range(100))  # checks the content of every OK
        assert there.count(LOST) <= 1
        lost += there.count(LOST)
        numbers = [number for number in range(100) if there[number] != OK]
        again.store(numbers)
        again.close()
    assert lost >= 10, "the others hit free slots"


def test_a_read_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    faults = FaultyFiles(SystemFiles(tmp_path))
    rig = Rig(tmp_path, files=faults)
    rig.store(range(10))
    released = [faults.hang_next_read() for _ in range(6)]  # more than there are threads
    hung = [rig.begin_load([number], base=20 + number) for number in range(6)]
    assert rig.load([7, 8]) == [OK, OK]
    assert rig.store([20, 21]) == [DURABLE, DURABLE]
    assert rig.remove([0, 7]) == 2
    assert not any(rig.answered(request) for request in hung)
    for event in released:
        event.set()
    answers = [rig.wait(request, Loaded).statuses.tolist()[0] for request in hung]
    assert answers == [MISS] + [OK] * 5, "what was removed meanwhile is not served"
    for number in range(1, 6):
        rig.check(20 + number, number)
    rig.close()


def test_a_slot_is_not_reused_while_a_hung_read_may_still_read_it(tmp_path: Path) -> None:
    faults = FaultyFiles(SystemFiles(tmp_path))
    rig = Rig(tmp_path, capacity=4 << 20, files=faults)
    rig.store(range(20))
    released = faults.hang_next_read()
    hung = rig.begin_load([3])
    rig.remove([3])
    for start in range(20, 200, 20):
        rig.store(range(start, start + 20))
    assert rig.stats()["dying_blocks"] == 1
    released.set()
    assert rig.wait(hung, Loaded).statuses.tolist() == [MISS]
    rig.settle()
    assert rig.stats()["dying_blocks"] == 0
    rig.close()


def test_a_missing_catalog_starts_empty(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store(range(10))
    rig.close()
    shutil.rmtree(tmp_path / "catalog")
    again = Rig(tmp_path)
    assert again.scanned == []
    assert again.load(range(10)) == [MISS] * 10
    assert again.stats()["disk_bytes"] == disk_usage(tmp_path) == 0
    assert again.store(range(10)) == [DURABLE] * 10
    again.close()


@pytest.mark.parametrize("damage", ["CURRENT", "MANIFEST", "sst", "log"])
def test_a_damaged_catalog_is_set_aside_and_nothing_wrong_is_served(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "tier"
    rig = Rig(folder)
    for start in range(0, 60, 20):
        rig.store(range(start, start + 20))
    rig.settle()
    if damage == "sst":  # a closed and opened database has its rows in a table
        rig.close()
        rig = Rig(folder)
    crashed = tmp_path / "crashed"
    copy_as_it_is(folder, crashed)
    rig.close()
    for path in (crashed / "catalog").iterdir():
        if damage in path.name and path.stat().st_size:
            raw = bytearray(path.read_bytes())
            middle = len(raw) // 3
            raw[middle : middle + 64] = bytes(byte ^ 0xFF for byte in raw[middle : middle + 64])
            path.write_bytes(raw)
    with caplog.at_level(logging.ERROR):
        again = Rig(crashed)
        statuses = again.load(range(60))  # checks the content of every OK
    assert again.store(range(100, 110)) == [DURABLE] * 10
    if OK not in statuses:
        assert "damaged" in caplog.text
        assert (crashed / "catalog.damaged").is_dir()
    again.close()
    last = Rig(crashed)
    assert last.load(range(100, 110)) == [OK] * 10
    last.close()


def test_a_catalog_that_can_not_be_opened_at_the_moment_is_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store(range(10))
    rig.close()
    in_use = Catalog(tmp_path / "catalog")
    with pytest.raises(ConfigError, match="lock"):
        Rig(tmp_path)
    in_use.close()
    again = Rig(tmp_path)
    assert again.load(range(10)) == [OK] * 10
    again.close()


def test_damage_found_while_serving_drops_everything_and_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    rig.store(range(20))

    def fail(self: Catalog, sequences: object) -> list[bytes | None]:
        raise CatalogDamagedError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(Catalog, "sums", fail)
        assert rig.load(range(20)) == [MISS] * 20
    assert sorted(rig.gone) == sorted(map(key_of, range(20)))
    assert rig.load([1]) == [MISS]
    assert rig.store(range(10)) == [DURABLE] * 10
    rig.close()
    again = Rig(tmp_path)
    assert sorted(again.scanned) == sorted(map(key_of, range(10)))
    assert again.load(range(20)) == [OK] * 10 + [MISS] * 10
    assert again.stats()["disk_bytes"] == disk_usage(tmp_path)
    again.close()


def test_a_catalog_that_can_not_be_written_fails_stores_and_forgets_no_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    rig.store(range(10))
    failing = True
    write = Catalog.sync

    def sync(self: Catalog) -> None:
        if failing:
            raise OSError(errno.ENOSPC, "injected")
        write(self)

    monkeypatch.setattr(Catalog, "sync", sync)
    removed = rig.begin_remove([1])
    assert rig.store([50]) == [FAILED]
    assert rig.load([1, 2]) == [MISS, OK]
    assert not rig.answered(removed)
    failing = False
    assert rig.wait(removed, Removed).blocks == 1
    assert rig.store([50]) == [DURABLE]
    rig.close()
    again = Rig(tmp_path)
    assert again.load([1, 2, 50]) == [MISS, OK, OK]
    again.close()


def test_the_unclean_tail_of_a_lying_disk_is_found_and_dropped(tmp_path: Path) -> None:
    folder, crashed = tmp_path / "tier", tmp_path / "crashed"
    folder.mkdir()
    faults = FaultyFiles(SystemFiles(folder))
    rig = Rig(folder, files=faults)
    rig.store(range(20))
    faults.lose_writes = True
    assert rig.store(range(20, 30)) == [DURABLE] * 10
    rig.settle()
    copy_as_it_is(folder, crashed)
    rig.close()
    again = Rig(crashed)
    assert sorted(again.scanned) == sorted(map(key_of, range(20))), "not even offered"
    assert again.load(range(30)) == [OK] * 20 + [MISS] * 10
    assert again.stats()["dropped_tail_blocks"] == 10
    again.close()


def test_a_row_beyond_the_end_of_its_slab_is_dropped(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for start in range(0, 60, 20):
        rig.store(range(start, start + 20))
    rig.close()
    with (tmp_path / "slab-00001.kv").open("r+b") as file:
        file.truncate(1 << 20)
    again = Rig(tmp_path)
    assert 0 < len(again.scanned) < 60
    assert again.stats()["disk_bytes"] == disk_usage(tmp_path)
    again.close()


def test_stores_go_on_before_the_scan_is_complete(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store(range(20))
    rig.close()
    again = Rig(tmp_path, scan=False)
    assert again.store([5, 30]) == [DURABLE, DURABLE], "what isn't known yet is written anew, into a new slab"
    assert again.remove([6]) == 0
    again.scan()
    assert sorted(again.scanned) == sorted(map(key_of, set(range(20)) - {5, 6}))
    assert again.load([*range(20), 30]) == [OK] * 6 + [MISS] + [OK] * 14
    again.close()
    last = Rig(tmp_path)
    assert len(last.scanned) == 20
    last.close()


def test_a_flush_before_the_scan_is_complete_leaves_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store(range(20))
    rig.close()
    again = Rig(tmp_path, scan=False)
    again.flush(DIGEST)
    again.scan()
    assert again.scanned == []
    again.settle()
    assert again.stats()["disk_bytes"] == disk_usage(tmp_path) == 0
    again.close()


def test_without_o_direct_plain_io_is_used_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> bool:
        return False

    monkeypatch.setattr("kvstore.server.tiers.disk.files._direct_works", refuse)
    with caplog.at_level(logging.WARNING):
        rig = Rig(tmp_path)
        assert rig.store(range(20)) == [DURABLE] * 20
        assert rig.load(range(20)) == [OK] * 20
        assert rig.load(range(20), (1, 3)) == [OK] * 20
        rig.close()
    assert caplog.text.count("has no O_DIRECT") == 1


def test_it_works_on_a_memory_file_system() -> None:
    if not Path("/dev/shm").is_dir() or SystemFiles(Path("/dev/shm")).free_bytes() < 256 << 20:
        pytest.skip("no /dev/shm with 256 MiB to spare")
    folder = Path("/dev/shm") / f"kvstore-test-{time.monotonic_ns()}"
    try:
        rig = Rig(folder)
        assert rig.store(range(20)) == [DURABLE] * 20
        assert rig.load(range(20)) == [OK] * 20
        assert rig.stats()["disk_bytes"] == disk_usage(folder)
        rig.close()
    finally:
        shutil.rmtree(folder)


def test_du_itself_agrees_with_the_gauge(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store(range(40))
    told = subprocess.run(["du", "-B1", *map(str, tmp_path.glob("slab-*"))], capture_output=True, text=True, check=True)
    assert sum(int(line.split()[0]) for line in told.stdout.splitlines()) == rig.stats()["disk_bytes"]
    rig.close()


def test_barriers_of_many_keys_are_folded_and_still_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.server.tiers.disk.barriers.KEY_BARRIERS_MAX", 10)
    rig = Rig(tmp_path)
    rig.generation = 100
    for number in range(30):
        rig.remove([number])
        rig.generation += 1
    assert rig.store(range(30), generation=99) == [STALE] * 30
    assert rig.store(range(30)) == [DURABLE] * 30
    rig.close()
    again = Rig(tmp_path)
    assert again.store(range(100, 102), generation=99) == [STALE] * 2
    again.close()


def test_an_empty_batch_changes_nothing(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog")
    catalog.write(Batch())
    catalog.sync()
    assert catalog.meta() is None
    catalog.close()
