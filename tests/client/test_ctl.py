"""`kvstorectl`: transcripts against a real server, one clear line for each mistake, exit codes that scripts can use."""

import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client.ctl import main, status_lines
from kvstore.testing.cluster import ServerProcess

PAIR_TEST = (
    r"1MiB put in \d+\.\d ms and got in \d+\.\d ms \(\d+\.\d GiB/s\), asked in \d+\.\d\d ms, "
    "content verified, deleted again"
)
COMMANDS = ["status", "ping", "query", "pin", "unpin", "flush", "quota", "doctor"]
NAMESPACE = kvstore.Namespace(
    model="acme/story", revision="4f1c", dtype="float16", block_tokens=16, layout=kvstore.CanonicalLayout(4, 2, 64)
)
BLOCKS = 10
ABSENT = f"{'0' * 32}:{'0' * 16}"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="64MiB", shards=2) as server:
        yield server


@pytest.fixture
def keys(server: ServerProcess) -> Iterator[list[str]]:
    """The store holds exactly these blocks; their keys as text."""
    with kvstore.connect(server.address, namespace=NAMESPACE) as client:
        keys = client.keys(range(BLOCKS * 16))
        assert client.put(keys, np.ones((BLOCKS, NAMESPACE.block_bytes), np.uint8)).stored == BLOCKS
        yield keys.hex()
        client.delete(keys)


class Session:
    """A shell in which KVSTORE_ADDRESS is set."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, address: str) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("KVSTORE_ADDRESS", address)
        monkeypatch.delenv("KVSTORE_AUTH_TOKEN", raising=False)

    def run(self, *argv: str, stdin: str = "", terminal: bool = False) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        self._monkeypatch.setattr(sys, "stdin", Terminal(stdin) if terminal else io.StringIO(stdin))
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else -1
        out, err = self._capsys.readouterr()
        return code, out, err

    def json(self, *argv: str, code: int = 0) -> Any:
        """The answer as a value; the exit code must be as said."""
        got, out, err = self.run(*argv, "--json")
        assert (got, err) == (code, "")
        return json.loads(out)

    def complaint(self, *argv: str, stdin: str = "") -> str:
        """The one line of a command that ends with exit code 2 and prints nothing else."""
        code, out, err = self.run(*argv, stdin=stdin)
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        return line


class Terminal(io.StringIO):
    """Standard input where somebody sits."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: ServerProcess) -> Session:
    return Session(capsys, monkeypatch, server.address)


@pytest.fixture
def nobody() -> str:
    """An address where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


# --- status ----------------------------------------------------------------------------------------------------------


def shard_status(number: int, **counters: int) -> dict[str, Any]:
    zero = dict.fromkeys(("evicted_blocks", "refused_puts", "client_lookup_blocks", "client_hit_blocks"), 0)
    return {
        "shard": number,
        "pool_bytes": 64 << 30,
        "bytes": {"free": 58 << 30, "reserved": 1 << 30, "committed": 5 << 30, "capacity": 64 << 30},
        "gauges": {"resident_blocks": 5120, "pinned_blocks": 12, "sessions": 9},
        "counters": {**zero, **counters},
        "namespaces": [
            {"digest": "7053cdfe" + 24 * "0", "label": "acme/story@4f1c", "blocks": 5000, "bytes": 5000 << 20},
            {"digest": "7053cdff" + 24 * "0", "label": "acme/tale@77ab", "blocks": 120, "bytes": 120 << 20},
        ],
    }


def test_a_table_of_a_node_lines_up_and_sums_its_shards() -> None:
    status = {
        "version": "0.1.0",
        "node_id": "09fe282a-1def-4555-98fd-c395569747b0",
        "epoch": 3,
        "uptime_s": 93784.2,
        "healthy": False,
        "key_algorithm": "xxh3-128",
        "endpoints": {"control": "10.0.0.5:7400", "data": "10.0.0.5:7401", "http": "http://10.0.0.5:7402"},
        "shards": [
            shard_status(0, evicted_blocks=1234567, client_lookup_blocks=1000, client_hit_blocks=873),
            shard_status(1, refused_puts=2),
        ],
        "shards_down": [2],
    }
    assert "\n".join(status_lines(status)) == (
        """\
node 09fe282a: NOT HEALTHY
version 0.1.0, up 1 d 2 h, started 3 times, xxh3-128 keys
control 10.0.0.5:7400   data 10.0.0.5:7401   http http://10.0.0.5:7402

shard    pool  in use      blocks  pinned    evicted  refused   hits  sessions
0       64GiB    6GiB  9%   5,120      12  1,234,567        0  87.3%         9
1       64GiB    6GiB  9%   5,120      12          0        2      -         9
all    128GiB   12GiB  9%  10,240      24  1,234,567        2  87.3%        18
2      does not answer

namespace  blocks   bytes  of
7053cdfe   10,000  9.8GiB  acme/story@4f1c
7053cdff      240  240MiB  acme/tale@77ab"""
    )


def test_the_status_of_a_running_node_names_its_endpoints_and_what_it_holds(
    shell: Session, server: ServerProcess, keys: list[str]
) -> None:
    code, out, err = shell.run("status")
    assert (code, err) == (0, "")
    assert f"control {server.address}   data {server.data_address}   http {server.http_address}" in out
    assert re.search(rf"^{NAMESPACE.digest.hex()[:8]} +{len(keys)} +320KiB  acme/story@4f1c float16", out, re.MULTILINE)


def test_status_as_json_is_what_the_http_port_says(shell: Session, server: ServerProcess) -> None:
    told, served = shell.json("status"), server.status()
    assert told.keys() == served.keys()
    assert told["node_id"] == served["node_id"]


# --- ping ------------------------------------------------------------------------------------------------------------


def test_ping_times_control_shared_memory_and_tcp_of_every_shard(shell: Session) -> None:
    told = shell.json("ping", "--count", "2")
    assert told["reached"]
    assert [(way["way"], way["shard"]) for way in told["ways"]] == [
        ("control", None),
        ("shm", 0),
        ("tcp", 0),
        ("shm", 1),
        ("tcp", 1),
    ]
    for way in told["ways"]:
        assert not way["error"]
        assert way["connect_ms"] > 0
        assert way["round_trip_ms"] > 0


def test_ping_prints_a_line_for_every_way(shell: Session, server: ServerProcess) -> None:
    code, out, err = shell.run("ping", "--count", "1")
    assert (code, err) == (0, "")
    head, control, shm, *_ = out.splitlines()
    assert head.split() == ["way", "shard", "to", "connect", "round", "trip"]
    assert re.fullmatch(rf"control  -      {server.address} +\d+\.\d\d ms +\d+\.\d{{3}} ms", control)
    assert re.fullmatch(r"shm      0      shard-0-\S+ +\d+\.\d\d ms +\d+\.\d{3} ms", shm)


# --- query, pin, unpin -----------------------------------------------------------------------------------------------


def test_a_query_tells_committed_blocks_from_absent_ones(shell: Session, keys: list[str]) -> None:
    code, out, _ = shell.run("query", keys[0], ABSENT)
    assert code == 1
    head, there, absent, total = out.splitlines()
    assert head.split() == ["key", "state", "shard", "layers", "size"]
    assert re.fullmatch(rf"{keys[0]}  committed  +[01]  +4  32KiB", there)
    assert re.fullmatch(rf"{ABSENT}  absent  +-  +-  +-", absent)
    assert total == "1 of 2 committed"


def test_keys_are_read_from_standard_input_whatever_the_blanks_between_them(shell: Session, keys: list[str]) -> None:
    for argv in (("query",), ("query", "-")):
        code, out, _ = shell.run(*argv, stdin="\n".join(keys[:5]) + "  " + "\t".join(keys[5:]) + "\n")
        assert code == 0
        assert out.endswith("10 of 10 committed\n")


def test_more_keys_than_one_call_takes_are_asked_in_parts(shell: Session, keys: list[str]) -> None:
    code, out, _ = shell.run("query", "--json", stdin=" ".join(keys * 500))
    told = json.loads(out)
    assert (code, told["asked"], told["committed"]) == (0, 5000, 5000)
    assert [block["key"] for block in told["blocks"][:BLOCKS]] == keys


def test_pins_are_counted_and_taken_off_one_by_one(shell: Session, keys: list[str]) -> None:
    def pinned() -> int:
        return sum(shard["gauges"]["pinned_blocks"] for shard in shell.json("status")["shards"])

    assert shell.run("pin", *keys[:3]) == (0, "3 of 3 are there and pinned\n", "")
    assert shell.json("pin", keys[0]) == {"asked": 1, "there": 1}
    assert shell.run("unpin", *keys[:3]) == (0, "3 of 3 are there and unpinned\n", "")
    assert pinned() == 1
    assert shell.json("unpin", keys[0]) == {"asked": 1, "there": 1}
    assert pinned() == 0


def test_pinning_a_block_that_is_not_there_is_a_no(shell: Session, keys: list[str]) -> None:
    assert shell.run("pin", keys[0], ABSENT) == (1, "1 of 2 are there and pinned\n", "")
    shell.run("unpin", keys[0])


@pytest.mark.parametrize("bad", ["beef", ABSENT.replace(":", ""), ABSENT[:-1], ABSENT.replace("0", "g"), "--"])
def test_a_bad_key_is_one_line_that_shows_it_and_the_form(shell: Session, bad: str) -> None:
    line = shell.complaint("query", stdin=bad)
    assert line == (
        f"kvstorectl query: block key {bad!r}: allowed is 'key:fingerprint' with 32 and 16 hexadecimal digits"
    )


def test_no_keys_at_all_is_a_mistake_not_a_success(shell: Session) -> None:
    assert shell.complaint("pin") == "kvstorectl pin: no keys on standard input"
    code, _, err = shell.run("pin", terminal=True)
    assert (code, err) == (2, "kvstorectl pin: no keys: name some as key:fingerprint, or pipe them in\n")


# --- flush -----------------------------------------------------------------------------------------------------------


def test_a_flush_by_the_start_of_a_digest_removes_that_namespace_only(
    shell: Session, server: ServerProcess, keys: list[str]
) -> None:
    other = kvstore.Namespace(
        model="acme/tale", revision="1", dtype="float16", block_tokens=16, layout=NAMESPACE.layout
    )
    with kvstore.connect(server.address, namespace=other) as client:
        others = client.keys(range(32))
        client.put(others, np.ones((2, other.block_bytes), np.uint8))
        code, out, _ = shell.run("flush", NAMESPACE.digest.hex()[:8], "--yes")
        label = "acme/story@4f1c float16 16 tokens"
        assert (code, out) == (0, f"10 blocks of namespace {NAMESPACE.digest.hex()[:8]} ({label}) removed\n")
        assert shell.json("query", *keys, code=1)["committed"] == 0
        assert client.lookup(others).hit_blocks == 2
        assert shell.json("flush", "--all", "--yes") == {"namespace": None, "removed": 2}


def test_a_flush_that_nobody_confirmed_removes_nothing(shell: Session, keys: list[str]) -> None:
    wanted = "this would remove 10 blocks, 320KiB, of all namespaces; add --yes to do it"
    assert shell.complaint("flush", "--all") == f"kvstorectl flush: {wanted}"
    assert shell.complaint("flush", "--all", "--json") == f"kvstorectl flush: {wanted}"
    assert shell.run("flush", "--all", stdin="n\n", terminal=True) == (
        1,
        "Remove 10 blocks, 320KiB, of all namespaces? [y/N] ",
        "nothing was removed\n",
    )
    assert shell.json("query", *keys)["committed"] == BLOCKS


def test_a_terminal_may_say_yes(shell: Session, keys: list[str]) -> None:
    code, out, _ = shell.run("flush", "--all", stdin="y\n", terminal=True)
    assert code == 0
    assert out.endswith("[y/N] 10 blocks of all namespaces removed\n")
    assert shell.json("query", *keys, code=1)["committed"] == 0


def test_a_full_digest_without_blocks_is_no_mistake(shell: Session) -> None:
    assert shell.json("flush", "ab" * 16, "--yes") == {"namespace": "ab" * 16, "removed": 0}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "name one namespace by its digest, or --all"),
        (["7053", "--all"], "name one namespace by its digest, or --all"),
        (["xyzw"], "namespace 'xyzw': allowed is a digest of 32 hexadecimal digits, or its start"),
        (["a" * 33], "allowed is a digest of 32 hexadecimal digits, or its start"),
        (["705"], "namespace '705': at least 4 digits, so that nothing is met by accident"),
        (["00000"], "namespace '00000': no namespace with blocks begins like this; `kvstorectl status` lists them"),
    ],
)
def test_a_namespace_that_nothing_can_be_meant_by_is_refused(shell: Session, argv: list[str], said: str) -> None:
    assert shell.complaint("flush", *argv, "--yes").endswith(said)


# --- quota -----------------------------------------------------------------------------------------------------------


def test_a_quota_is_set_in_part_shown_and_taken_away(shell: Session, keys: list[str]) -> None:
    assert len(keys) == BLOCKS
    (row,) = shell.json("quota", "default", "--dram", "16MiB", "--dram-share", "1MiB")["tenants"]
    assert (row["dram"]["limit"], row["dram"]["share"], row["disk"]["limit"]) == (16 << 20, 1 << 20, 0)
    assert row["dram"]["used"] > BLOCKS * NAMESPACE.block_bytes
    (row,) = shell.json("quota", "default", "--dram-share", "2MiB")["tenants"]
    assert (row["dram"]["limit"], row["dram"]["share"]) == (16 << 20, 2 << 20)
    code, out, err = shell.run("quota")
    assert (code, err) == (0, "")
    assert re.search(r"^default +360KiB  16MiB   2MiB +0 +0B +- +- +0$", out, re.MULTILINE)
    (row,) = shell.json("quota", "default", "--none")["tenants"]
    assert (row["dram"]["limit"], row["dram"]["share"]) == (0, 0)
    assert shell.json("quota", "nobody-yet") == {"tenants": []}


def test_a_quota_that_makes_no_sense_is_one_line(shell: Session) -> None:
    assert "name the tenant" in shell.complaint("quota", "--dram", "1GiB")
    assert "goes with no amount" in shell.complaint("quota", "default", "--none", "--dram", "1GiB")
    assert "more than the limit" in shell.complaint("quota", "default", "--dram", "1MiB", "--dram-share", "2MiB")
    assert "there are 64MiB in this tier" in shell.complaint("quota", "default", "--dram-share", "1GiB")
    assert "--dram" in shell.complaint("quota", "default", "--dram", "much")
    assert "allowed is [0-9a-z-]" in shell.complaint("quota", "Not A Name", "--dram", "1GiB")


# --- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_finds_a_running_server_well_and_leaves_nothing_behind(shell: Session, server: ServerProcess) -> None:
    told = shell.json("doctor")
    assert told["ok"]
    found = {check["name"]: check["finding"] for check in told["checks"]}
    for name in ("control", "versions", "shards", "exposure", "integrity", "clock"):
        assert found[name] == "ok"
    texts = {check["name"]: check["text"] for check in told["checks"]}
    for name in ("shm shard 0", "tcp shard 0", "shm shard 1", "tcp shard 1"):
        assert re.fullmatch(PAIR_TEST, texts[name])
    assert all(not shard["namespaces"] for shard in server.status()["shards"])


def test_each_check_is_one_line_and_whatever_is_not_well_comes_with_advice(shell: Session) -> None:
    code, out, err = shell.run("doctor")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == len(shell.json("doctor")["checks"])
    for line in lines:
        assert re.match(r"(ok  |skip|warn)  \w", line)
        assert line.startswith("warn") == (" -> " in line)


def test_doctor_without_a_server_says_so_and_still_looks_at_the_host(shell: Session, nobody: str) -> None:
    code, out, _ = shell.run("doctor", "--address", nobody)
    first, *rest = out.splitlines()
    assert code == 2
    assert re.match(rf"fail  control +{nobody}: nobody answers there.* -> start kvstore-server there", first)
    assert any(" checksums " in line for line in rest)


# --- reaching a node, and not ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "ping", "query", "pin", "unpin", "flush"])
def test_a_node_that_is_not_there_is_one_line_and_exit_code_two(shell: Session, nobody: str, command: str) -> None:
    argv = {"flush": ["--all", "--yes"], "query": [ABSENT], "pin": [ABSENT], "unpin": [ABSENT]}.get(command, [])
    line = shell.complaint(command, *argv, "--address", nobody)
    assert line == f"kvstorectl {command}: {nobody}: nobody answers there; is kvstore-server running?"


def test_a_frozen_node_costs_the_timeout_and_no_more(shell: Session) -> None:
    with ServerProcess(dram="16MiB") as frozen:
        frozen.freeze()
        line = shell.complaint("status", "--address", frozen.address, "--timeout", "0.2")
        assert line == f"kvstorectl status: {frozen.address}: no answer within 0.2 s"


def test_a_node_with_an_auth_token_wants_it_from_the_flag_or_the_environment(
    shell: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServerProcess(dram="16MiB", auth_token="swordfish") as locked:
        refused = "the auth token is missing or wrong (KVSTORE_AUTH_TOKEN)"
        assert shell.complaint("status", "--address", locked.address).endswith(refused)
        assert shell.complaint("ping", "--address", locked.address, "--auth-token", "no").endswith(refused)
        assert shell.run("status", "--address", locked.address, "--auth-token", "swordfish")[0] == 0
        monkeypatch.setenv("KVSTORE_AUTH_TOKEN", "swordfish")
        assert shell.json("ping", "--address", locked.address)["reached"]
        assert shell.json("doctor", "--address", locked.address)["ok"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["steal"], "invalid choice: 'steal'"),
        (["status", "--address", "10.0.0.5:0"], "address '10.0.0.5:0': allowed is 'local' or 'host:port'"),
        (["status", "--address", "a:1,b:1"], "--address 'a:1,b:1': one node at a time is asked here"),
        (["status", "--timeout", "0"], "--timeout: '0' is not allowed; allowed: 0.001 to 3600 seconds"),
        (["status", "--timeout", "soon"], "--timeout: 'soon' is not allowed; allowed: 0.001 to 3600 seconds"),
        (["ping", "--count", "0"], "--count: '0' is not allowed; allowed: a whole number from 1 to 100000"),
        (["status", "--verbose"], "unrecognized arguments: --verbose"),
    ],
)
def test_a_bad_flag_is_one_line_that_names_it_and_what_is_allowed(shell: Session, argv: list[str], said: str) -> None:
    assert said in shell.complaint(*argv)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_examples(shell: Session, command: str) -> None:
    code, out, _ = shell.run(command, "--help")
    assert code == 0
    assert "examples:\n  kvstorectl " in out
    for flag in ("--json", "--address", "--timeout", "--auth-token"):
        assert flag in out


def test_a_reader_that_has_seen_enough_is_no_error(server: ServerProcess) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.client.ctl", "status", "--address", server.address],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
