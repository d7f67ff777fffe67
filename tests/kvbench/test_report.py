"""The JSON value, the table, and the lines to remember."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from kvbench import report
from kvbench.transfer import TransferRow
from kvstore.core.errors import UsageError
from tests.kvbench.rows import DISK_ROWS, INDEX_RESULT, REPLAY_ROWS, TRANSFER_ROWS, disk_row, replay_row, transfer_row

PROVENANCE = {"command", "arguments", "versions", "machine", "seed", "date", "commit", "checked"}
TRANSFER_FIELDS = {
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


def test_transfer_json_says_what_was_measured_where_and_with_what() -> None:
    value = json.loads(json.dumps(report.transfer_json(TRANSFER_ROWS, {"seconds": 1.0, "ops": ("put",)}, seed=3)))
    assert value.keys() >= PROVENANCE | {"rows"}
    assert value["command"] == "kvbench transfer"
    assert value["arguments"] == {"seconds": 1.0, "ops": ["put"]}
    assert value["versions"].keys() == {"python", "numpy", "kvstore-llm", "kernel"}
    assert value["machine"].keys() == {"cpu", "cores", "memory_bytes", "l3_bytes"}
    assert value["seed"] == 3
    assert all(row.keys() >= TRANSFER_FIELDS for row in value["rows"])


def test_index_json_has_the_rows_and_what_the_table_costs() -> None:
    value = json.loads(json.dumps(report.index_json(INDEX_RESULT, {}, seed=0)))
    assert value.keys() >= PROVENANCE | {"rows", "resident_keys", "bytes_per_entry"}
    assert all(row.keys() >= {"batch", "keys_per_s", "p50_us"} for row in value["rows"])


def test_one_wrong_row_makes_the_whole_run_unchecked() -> None:
    assert report.transfer_json(TRANSFER_ROWS, {}, seed=0)["checked"] is True
    assert report.transfer_json([*TRANSFER_ROWS, transfer_row(checked=False)], {}, seed=0)["checked"] is False
    assert report.transfer_json([], {}, seed=0)["checked"] is False


def test_disk_and_replay_json_say_what_was_measured_with_what_and_name_each_limit() -> None:
    disk = json.loads(json.dumps(report.disk_json(DISK_ROWS, {"dir": "/d"}, seed=4)))
    replay = json.loads(json.dumps(report.replay_json(REPLAY_ROWS, {"trace": "t"}, seed=5)))
    for value, command, seed in ((disk, "kvbench disk", 4), (replay, "kvbench replay", 5)):
        assert value.keys() >= PROVENANCE | {"rows", "limits"}
        assert (value["command"], value["seed"], value["checked"]) == (command, seed, True)
    assert {row["limit"] for row in disk["rows"]} <= disk["limits"].keys()
    assert replay["limits"].keys() <= replay["rows"][0].keys()


def test_one_wrong_disk_or_replay_row_makes_the_whole_run_unchecked() -> None:
    assert report.disk_json([*DISK_ROWS, disk_row("write", checked=False)], {}, seed=0)["checked"] is False
    wrong = replay_row("lru", 20, 0.1, checked=False)
    assert report.replay_json([*REPLAY_ROWS, wrong], {}, seed=0)["checked"] is False
    assert report.disk_json([], {}, seed=0)["checked"] is report.replay_json([], {}, seed=0)["checked"] is False


def test_the_disk_table_ends_with_writes_and_cold_reads_of_the_smallest_blocks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report.print_disk(DISK_ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(DISK_ROWS) + 2
    assert lines[-2:] == [
        "write 1MiB x 64: 1.60 GiB/s, 0.80 of direct I/O",
        "read_cold 1MiB x 64: 1.60 GiB/s, 0.80 of direct I/O",
    ]


def test_the_replay_table_ends_with_the_mean_of_each_policy_and_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_replay(REPLAY_ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(REPLAY_ROWS) + 3
    assert lines[-3:] == [
        "made-up, lru: 0.1500 of blocks hit, mean of 2 capacities",
        "made-up, reuse: 0.2000 of blocks hit, mean of 2 capacities",
        "made-up: 0.5000 with a cache that forgets nothing",
    ]


def test_the_table_has_a_line_for_each_row_and_the_headlines_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_transfer(TRANSFER_ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "op transport block batch GiB/s p50 us p99 us limit GiB/s of limit content"
    assert len(lines) == 2 + len(TRANSFER_ROWS) + 2
    assert lines[-2] == "shm get_into 1MiB x 64: 8.00 GiB/s, 0.80 of memcpy"
    assert lines[-1] == "tcp get_into 1MiB x 64: 4.00 GiB/s, 0.80 of a raw socket"


def test_a_view_shows_no_rate_and_no_limit(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_transfer([transfer_row("view", gib_s=1e6, limit_gib_s=None)])
    line = capsys.readouterr().out.splitlines()[2]
    assert " ".join(line.split()) == "view shm 1MiB 64 no copy 7,000 9,000 - - checked"


def test_wrong_content_stands_out_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_transfer([transfer_row(checked=False)])
    assert capsys.readouterr().out.splitlines()[2].endswith("WRONG")


def test_the_index_table_ends_with_its_two_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_index(INDEX_RESULT)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "index of 1,000,000 keys, batch 1,024: 6.0 M keys/s",
        "82.5 bytes an entry",
    ]


def test_numbers_are_aligned_right_and_words_left() -> None:
    assert report.plain_table(("op", "GiB/s"), [("put", "7.00"), ("get_into", "10.00")]) == (
        "op        GiB/s\n--------  -----\nput        7.00\nget_into  10.00"
    )


@pytest.mark.parametrize("place", ["missing/result.json", "."])
def test_a_result_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, place: str) -> None:
    with pytest.raises(UsageError, match=r"^--json .*allowed: a file "):
        report.require_writable("--json", tmp_path / place)


def test_rows_carry_what_the_issue_lists() -> None:
    assert {field.name for field in fields(TransferRow)} >= TRANSFER_FIELDS
