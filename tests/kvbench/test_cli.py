"""The command line: bad flags end in one line that names culprit and what is allowed; small runs write full results."""

import json
from pathlib import Path

import pytest

from kvbench.cli import main


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The single line that a wrong command line ends in."""
    try:
        status = main(argv)
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("argv", "culprit", "allowed"),
    [
        (["--ops", "put,steal"], "--ops: 'steal'", "put, get, get_into, view"),
        (["--transport", "rdma"], "--transport: 'rdma'", "shm, tcp"),
        (["--sizes", "1MiB,huge"], "--sizes: size 'huge'", "GiB"),
        (["--sizes", "6KiB"], "--sizes: 6KiB", "multiples of 4KiB"),
        (["--batch", "0"], "--batch: '0'", "a whole number from 1"),
        (["--batch", "9999"], "--batch: 9999", "1 to 4096"),
        (["--seconds", "-1"], "--seconds: '-1'", "more than 0"),
        (["--seed", "x"], "--seed: 'x'", "a whole number from 0"),
        (["--layers", "none"], "--layers: 'none'", "a whole number from 1"),
        (["--footprint", "1XB"], "--footprint: size '1XB'", "GiB"),
        (["--sizes", "1GiB", "--batch", "4096"], "this run needs", "lower --sizes, --batch or --footprint"),
        (["--json", "no/such/folder.json"], "--json no/such/folder.json", "an existing folder"),
    ],
)
def test_a_bad_transfer_flag_is_one_line_naming_culprit_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], argv: list[str], culprit: str, allowed: str
) -> None:
    line = complaint(capsys, "transfer", *argv)
    assert line.startswith("kvbench transfer: ")
    assert culprit in line
    assert allowed in line


@pytest.mark.parametrize(
    ("argv", "culprit", "allowed"),
    [
        (["--keys", "many"], "--keys: 'many'", "a whole number from 1"),
        (["--keys", "99999999999"], "--keys: 99999999999", "1 to 50000000"),
        (["--batch", "1,,2"], "--batch: ''", "a whole number from 1"),
        (["--what"], "--what", "--help"),
    ],
)
def test_a_bad_index_flag_is_one_line_naming_culprit_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], argv: list[str], culprit: str, allowed: str
) -> None:
    line = complaint(capsys, "index", *argv)
    assert culprit in line
    assert allowed in line


@pytest.mark.parametrize(
    ("argv", "culprit", "allowed"),
    [
        ([], "--trace", "required"),
        (["--trace", "no/such.jsonl"], "--trace no/such.jsonl", "a Mooncake trace"),
        (["--trace", "t", "--capacity-blocks", "0"], "--capacity-blocks: '0'", "a whole number from 1"),
        (["--trace", "t", "--capacity-fraction", "2"], "--capacity-fraction: '2'", "at most 1"),
        (["--trace", "t", "--capacity-fraction", "x"], "--capacity-fraction: 'x'", "more than 0"),
        (["--trace", "t", "--policy", "fifo"], "--policy: invalid choice: 'fifo'", "'lru'"),
        (["--trace", "t", "--admission", "twice"], "--admission: invalid choice: 'twice'", "'second'"),
    ],
)
def test_a_bad_replay_flag_is_one_line_naming_culprit_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], argv: list[str], culprit: str, allowed: str
) -> None:
    line = complaint(capsys, "replay", *argv)
    assert line.startswith("kvbench replay: ")
    assert culprit in line
    assert allowed in line


@pytest.mark.parametrize(
    ("argv", "culprit", "allowed"),
    [
        (["--compute", "sleep,dream"], "--compute: 'dream'", "sleep, matmul"),
        (["--transport", "pigeon"], "--transport: 'pigeon'", "shm, tcp"),
        (["--ratios", "1,x"], "--ratios: 'x'", "a number above 0"),
        (["--ratios", "0"], "--ratios: 0", "0.01 to 100"),
        (["--ratios", "nan"], "--ratios: nan", "0.01 to 100"),
        (["--layers", "257"], "--layers: 257", "1 to 256"),
        (["--layer-ms", "-1"], "--layer-ms: -1", "0.01 to 1000"),
        (["--rounds", "1001"], "--rounds: 1001", "1 to 1000"),
        (["--footprint", "1KiB"], "--footprint: 1KiB", "4KiB to 16GiB"),
        (["--layer-ms", "1000"], "this run needs", "lower --layer-ms, --ratios or --footprint"),
    ],
)
def test_a_bad_layers_flag_is_one_line_naming_culprit_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], argv: list[str], culprit: str, allowed: str
) -> None:
    line = complaint(capsys, "layers", *argv)
    assert line.startswith("kvbench layers: ")
    assert culprit in line
    assert allowed in line


@pytest.mark.parametrize("command", ["transfer", "index", "disk", "layers", "scale", "replay"])
def test_help_explains_and_gives_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert f"kvbench {command} --" in text
    assert "examples:" in text


def test_no_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in complaint(capsys)


def test_a_small_index_run_prints_a_table_and_writes_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "index.json"
    assert main(["index", "--keys", "2000", "--batch", "1,16", "--seconds", "0.02", "--json", str(out)]) == 0
    captured = capsys.readouterr()
    assert "bytes an entry" in captured.out
    assert "[2/2]" in captured.err
    value = json.loads(out.read_text())
    assert value["checked"] is True
    assert value["arguments"] == {
        "keys": 2000,
        "batch": [1, 16],
        "seconds": 0.02,
        "seed": 0,
        "json": str(out),
        "plot": None,
    }
    assert value["resident_keys"] == 2000
    assert [row["batch"] for row in value["rows"]] == [1, 16]
