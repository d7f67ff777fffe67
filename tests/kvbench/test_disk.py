"""`kvbench disk`: small runs against a real SSD tier are complete and checked, and nothing passes for a cold read."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from kvbench.cli import main
from kvbench.disk import DiskOp, DiskPlan, DiskRow, Ring, ring_of, run_disk
from kvbench.errors import BenchError
from kvstore.core.errors import UsageError

MIB = 1 << 20
SMALL = ["--footprint", "48MiB", "--seconds", "0.05"]
ROW_FIELDS = {
    "op",
    "transport",
    "block_bytes",
    "batch",
    "gib_s",
    "p50_us",
    "p99_us",
    "limit_gib_s",
    "ratio_to_limit",
    "checked",
}


def test_a_small_run_measures_every_operation_beside_its_limit_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, folder = tmp_path / "disk.json", tmp_path / "ssd"
    folder.mkdir()
    assert main(["disk", *SMALL, "--sizes", "64KiB,256KiB", "--dir", str(folder), "--json", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("read_cold 64KiB x 64: ")
    assert "[8/8]" in captured.err
    value = json.loads(out.read_text())
    assert value["command"] == "kvbench disk"
    assert value["checked"] is True
    assert [(row["op"], row["block_bytes"]) for row in value["rows"]] == [
        (op, size) for size in (64 << 10, 256 << 10) for op in DiskOp
    ]
    for row in value["rows"]:
        assert row.keys() >= ROW_FIELDS
        assert row["checked"] is True
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["ratio_to_limit"] == row["gib_s"] / row["limit_gib_s"] > 0
        assert (row["limit"] == "memcpy") == (row["op"] == "read_warm")
    assert list(folder.iterdir()) == []


def test_a_run_of_default_sizes_stays_below_four_gib_of_disk(tmp_path: Path) -> None:
    plan = DiskPlan(folder=tmp_path)
    assert plan.footprint_bytes + plan.disk_bytes < 4 << 30
    assert {MIB, 4 * MIB} == set(plan.sizes)


@pytest.mark.parametrize("size", [64 << 10, MIB, 4 * MIB])
def test_a_ring_is_whole_turns_of_write_and_its_far_side_is_outside_of_dram(tmp_path: Path, size: int) -> None:
    plan = DiskPlan(folder=tmp_path, sizes=(size,))
    ring = ring_of(size, plan.footprint_bytes)
    assert ring.blocks % (ring.batch * ring.calls) == 0
    assert plan.footprint_bytes * 3 // 4 < ring.blocks * size <= plan.footprint_bytes
    here, there = ring.batch_at(0), ring.across(0)
    assert (there.start - here.stop + ring.batch) * size >= plan.dram_bytes


def test_the_turns_of_write_cover_every_place_once_a_round() -> None:
    ring = Ring(block_bytes=MIB, batch=4, calls=2, blocks=32)
    places = [row for turn in range(4) for part in ring.write_at(turn) for row in range(part.start, part.stop)]
    assert sorted(places) == list(range(32))
    assert ring.write_at(4) == ring.write_at(0)


@pytest.mark.parametrize(
    ("argv", "culprit", "allowed"),
    [
        (["--sizes", "6KiB"], "--sizes: 6KiB", "from 64KiB to 4MiB"),
        (["--sizes", "32MiB"], "--sizes: 32MiB", "from 64KiB to 4MiB"),
        (["--footprint", "1MiB"], "--footprint: 1MiB", "multiples of 48MiB from 48MiB"),
        (["--footprint", "64TiB"], "--footprint: 64TiB", "to 48GiB"),
        (["--dir", "no/such/folder"], "--dir no/such/folder", "an existing folder"),
    ],
)
def test_a_bad_disk_flag_is_one_line_naming_culprit_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], argv: list[str], culprit: str, allowed: str
) -> None:
    assert main(["disk", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvbench disk: {culprit}")
    assert allowed in line


class RoomyPlan(DiskPlan):
    """A server whose DRAM has room for the whole ring, so that nothing ever comes from the SSD."""

    @property
    def dram_bytes(self) -> int:
        return 2 * self.footprint_bytes


def test_reads_from_dram_never_pass_for_cold_ones(tmp_path: Path) -> None:
    plan = RoomyPlan(folder=tmp_path, sizes=(256 << 10,), footprint_bytes=48 * MIB, seconds=0.02)
    with pytest.raises(BenchError, match=r"^0 of \d+ blocks were read from the SSD: the wrong tier was measured"):
        run_disk(plan, note=lambda _: None, step=lambda _: None)


class HugePlan(DiskPlan):
    """More than any disk has."""

    @property
    def disk_bytes(self) -> int:
        return 1 << 60


def test_a_folder_without_room_is_refused_before_the_run(tmp_path: Path) -> None:
    plan = HugePlan(folder=tmp_path, sizes=(256 << 10,), footprint_bytes=48 * MIB)
    with pytest.raises(UsageError, match=f"^--dir {tmp_path}: this run needs .*allowed: a folder with room"):
        run_disk(plan, note=lambda _: None, step=lambda _: None)


def test_rows_carry_what_the_issue_lists() -> None:
    assert {field.name for field in fields(DiskRow)} >= ROW_FIELDS


def test_a_restart_is_timed_and_every_block_compared_afterwards(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, folder = tmp_path / "restart.json", tmp_path / "ssd"
    folder.mkdir()
    assert main(["disk", "--restart-blocks", "5000", "--dir", str(folder), "--json", str(out)]) == 0
    assert capsys.readouterr().out.startswith("restart with 5000 blocks: ready in ")
    (row,) = json.loads(out.read_text())["rows"]
    assert row["checked"] is True
    assert 0 < row["ready_s"] <= row["served_s"]
    assert row["ready_s"] <= row["complete_s"]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("blocks", ["0", "-1", "10000001"])
def test_a_restart_of_no_or_too_many_blocks_is_refused(capsys: pytest.CaptureFixture[str], blocks: str) -> None:
    assert main(["disk", "--restart-blocks", blocks]) == 2
    assert f"--restart-blocks: {blocks} is out of range" in capsys.readouterr().err
