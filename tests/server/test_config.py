"""Settings: where they come from, which one wins, and one clear line about each that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.server.cli import main
from kvstore.server.config import POLICY_NAMES
from kvstore.server.eviction import POLICIES

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVSTORE_SHARDS", "KVSTORE_DRAM", "KVSTORE_CONFIG", "KVSTORE_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def shown(capsys: Capture, *flags: str) -> dict[str, object]:
    """What `config show` says with these flags."""
    assert main(["config", "show", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: Capture, *flags: str) -> str:
    """The one line with which the server refuses these flags."""
    try:
        code = main([*flags])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("kvstore-server: ")
    assert said.err.count("\n") == 1, said.err
    return said.err


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kvstore.toml"
    path.write_text(text)
    return str(path)


def test_a_flag_beats_a_variable_which_beats_the_file_which_beats_the_default(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(capsys)["shards"] == 1
    file = toml(tmp_path, 'shards = 2\ndram = "2GiB"\nhost = "10.0.0.5"\n')
    assert shown(capsys, "--config", file)["shards"] == 2
    monkeypatch.setenv("KVSTORE_SHARDS", "3")
    monkeypatch.setenv("KVSTORE_DRAM", "3GiB")
    assert shown(capsys, "--config", file)["shards"] == 3
    settings = shown(capsys, "--config", file, "--shards", "4")
    assert (settings["shards"], settings["dram"], settings["host"]) == (4, "3GiB", "10.0.0.5")


def test_a_variable_names_the_file_too(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_CONFIG", toml(tmp_path, "shards = 5"))
    assert shown(capsys)["shards"] == 5


def test_a_variable_that_is_no_setting_is_none_of_our_business(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_ADDRESS", "gpu7:7400")
    monkeypatch.setenv("KVSTORE_RACE_SECONDS", "1")
    assert "address" not in shown(capsys)


def test_every_eviction_policy_can_be_chosen_and_the_default_is_the_same_everywhere(capsys: Capture) -> None:
    assert tuple(POLICIES) == POLICY_NAMES
    assert shown(capsys)["policy"] == POLICY_NAMES[0]
    for name in POLICIES:
        assert shown(capsys, "--policy", name)["policy"] == name


@pytest.mark.parametrize(("text", "dram"), [('"8GiB"', "8GiB"), ('"80GB"', "80GB"), ("1073741824", "1GiB")])
def test_sizes_are_written_as_people_write_them(capsys: Capture, tmp_path: Path, text: str, dram: str) -> None:
    assert shown(capsys, "--config", toml(tmp_path, f"dram = {text}"))["dram"] == dram


def test_only_loopback_unless_told_otherwise_and_a_share_of_the_memory(capsys: Capture) -> None:
    settings = shown(capsys)
    assert settings["host"] == "127.0.0.1"
    assert (settings["control_port"], settings["data_port"], settings["http_port"]) == (7400, 7401, 7402)
    assert str(settings["dram"]).endswith("MiB") or str(settings["dram"]).endswith("GiB")


def test_secrets_are_never_shown(capsys: Capture) -> None:
    assert shown(capsys)["auth_token"] == ""
    assert main(["config", "show", "--auth-token", "hunter2"]) == 0
    text = capsys.readouterr().out
    assert "hunter2" not in text
    assert "auth_token     = (set)" in text
    assert shown(capsys, "--auth-token", "hunter2")["auth_token"] == "(set)"


@pytest.mark.parametrize(
    ("text", "culprit", "allowed"),
    [
        ("shrads = 2", "unknown key 'shrads'", "allowed are host, control_port"),
        ("shards = two", "is not TOML", "line 1"),
        ('shards = "two"', "shards: 'two' is not allowed", "a whole number"),
        ("shards = 1.5", "shards: 1.5", "neither text nor a number"),
        ("shards = true", "shards: True", "neither text nor a number"),
        ("shards = [1]", "shards: [1]", "neither text nor a number"),
        ("[shards]\nx = 1", "shards: {'x': 1}", "neither text nor a number"),
        ('dram = "8 GIGS"', "dram: size '8 GIGS'", "TiB, GiB, MiB"),
        ("dram = -5", "dram: size -5", "TiB, GiB, MiB"),
    ],
)
def test_a_wrong_key_or_value_in_the_file_is_named_with_file_and_what_is_allowed(
    capsys: Capture, tmp_path: Path, text: str, culprit: str, allowed: str
) -> None:
    file = toml(tmp_path, text)
    said = refusal(capsys, "--config", file)
    assert file in said
    assert culprit in said
    assert allowed in said


def test_a_file_that_is_not_there_is_named(capsys: Capture, tmp_path: Path) -> None:
    said = refusal(capsys, "--config", str(tmp_path / "nowhere.toml"))
    assert "nowhere.toml" in said
    assert "No such file" in said


def test_a_wrong_value_in_a_variable_is_named_by_the_variable(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_SHARDS", "many")
    assert "KVSTORE_SHARDS: 'many' is not allowed; a whole number is" in refusal(capsys)


@pytest.mark.parametrize(
    ("flags", "culprit"),
    [
        (["--shards", "two"], "--shards: 'two' is not allowed; a whole number is"),
        (["--shards", "0"], "shards=0: allowed is 1 to 64"),
        (["--data-workers", "65"], "data_workers=65: allowed is 1 to 64"),
        (["--http-port", "70000"], "http_port=70000: allowed is 0 to 65535"),
        (["--dram", "eight"], "--dram: size 'eight'"),
        (["--dram", "4MiB"], "dram=4MiB: at least 8MiB for 1 shards"),
        (["--chunk", "1000"], "chunk=1KB: allowed is a whole number of MiB, up to 2GiB"),
        (["--chunk", "1.5MiB"], "chunk=1536KiB: allowed is a whole number of MiB"),
        (
            ["--control-port", "9", "--http-port", "9"],
            "control_port, data_port and http_port must differ: [9, 7401, 9]",
        ),
        (["--fabric", "1"], "fabric='1': allowed is one of tcp, rdma, or empty for off"),
        (
            ["--fabric", "tcp", "--host", "0.0.0.0"],
            "fabric_host='': name the IPv4 address that clients reach; host='0.0.0.0' is none",
        ),
        (["--policy", "mru"], "policy='mru': allowed is one of reuse, lru, s3fifo"),
        (["--key-seed", "-2"], "key_seed=-2: allowed is -1 (random) or 0 to 2**64 - 1"),
        (["--key-algorithm", "md5"], "key_algorithm: algorithm='md5': allowed is one of xxh3-128, blake3"),
        (["--runtime-dir", "/" + "x" * 100], "too long for a socket path; at most 60 bytes"),
        (["--data-dir", "~nobody-at-all/x"], "--data-dir: '~nobody-at-all/x' is not allowed; a path is"),
        (["--shrads", "2"], "unknown flag '--shrads'; allowed are --help,"),
        (["--shard", "2"], "unknown flag '--shard'; allowed are --help,"),
        (["--shards"], "argument --shards: expected one argument"),
        (["serve"], "unknown action 'serve'; there is only `config show`"),
    ],
)
def test_a_wrong_flag_is_named_with_what_is_allowed(capsys: Capture, flags: list[str], culprit: str) -> None:
    assert culprit in refusal(capsys, *flags)


def test_help_names_every_setting_and_the_version_is_told(capsys: Capture) -> None:
    for flag in ("--help", "--version"):
        with pytest.raises(SystemExit) as ended:
            main([flag])
        assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "kvstore-server 0." in said
    for name in ("--dram", "--auth-token", "--runtime-dir", "KVSTORE_DRAM=8GiB kvstore-server config show"):
        assert name in said
