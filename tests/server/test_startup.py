"""How a server starts, refuses to start, and ends: one line, exit code 2, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until

START_TIMEOUT_S = 60
NAMESPACE = kvstore.Namespace(
    model="startup",
    revision="1",
    dtype="uint8",
    block_tokens=4,
    layout=kvstore.OpaqueLayout(tag="t", layers=1, layer_bytes_per_block=64),
)
PORTS = ("--control-port", "--data-port", "--http-port")


def members(session: int) -> list[int]:
    """Processes of that session (a server started with `start_new_session` is one, with all its children)."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def refusal(folder: Path, *flags: str) -> str:
    """The one line with which a server refuses to start with these flags."""
    command = [sys.executable, "-m", "kvstore.server.cli", "--dram", "16MiB"]
    for flag in PORTS:
        command += [flag, "0"]
    command += ["--data-dir", str(folder / "data"), "--runtime-dir", str(folder / "run"), *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    out, err = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 2
    assert out == ""
    assert err.startswith("kvstore-server: ")
    assert err.count("\n") == 1, err
    until(lambda: not members(process.pid), what="the end of its processes")
    run = folder / "run"
    assert not run.exists() or not list(run.iterdir()), "a socket was left behind"
    return err


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name: the paths of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(("flag", "name"), [*zip(PORTS, ("control port", "data port", "HTTP port"), strict=True)])
def test_a_port_in_use_is_named(folder: Path, taken_port: int, flag: str, name: str) -> None:
    assert f"{name} 127.0.0.1:{taken_port}: Address already in use" in refusal(folder, flag, str(taken_port))


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_an_address_that_is_not_this_machines_is_named(folder: Path, host: str) -> None:
    assert f"{host}:0: " in refusal(folder, "--host", host)


@pytest.mark.parametrize("setting", ["data_dir", "runtime_dir"])
def test_a_folder_that_can_not_be_made_is_named(folder: Path, setting: str) -> None:
    file = folder / "file"
    file.touch()
    said = refusal(folder, f"--{setting.replace('_', '-')}", str(file / "below"))
    assert f"{setting}={str(file / 'below')!r}: Not a directory" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_named(folder: Path) -> None:
    locked = folder / "locked"
    locked.mkdir(mode=0o500)
    assert "Permission denied; name a folder that this user may write" in refusal(
        folder, "--data-dir", str(locked / "below")
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"epoch": "soon"}', '{"key_seed": -7}'])
def test_a_damaged_node_file_is_named_with_what_to_do(folder: Path, text: str) -> None:
    data = folder / "data"
    data.mkdir()
    (data / "node.json").write_text(text)
    said = refusal(folder)
    assert str(data / "node.json") in said
    assert "remove it to start as a new node" in said
    assert (data / "node.json").read_text() == text


def listening(pids: list[int]) -> set[str]:
    """Local addresses, as the kernel writes them, of the listening TCP sockets of these processes."""
    inodes: set[str] = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].rpartition(":")[0])
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


# --- one server, with two workers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with (
        tempfile.TemporaryDirectory(prefix="kvs-") as name,
        ServerProcess(dram="16MiB", folder=Path(name), data_workers=2) as server,
    ):
        yield server


def test_a_second_server_on_the_same_data_folder_is_refused_and_the_first_goes_on(
    running: ServerProcess, folder: Path
) -> None:
    assert "another kvstore-server uses it" in refusal(folder, "--data-dir", str(running.runtime_dir.parent / "data"))
    assert running.status()["healthy"]


def test_several_data_workers_share_the_port(running: ServerProcess) -> None:
    assert len(running.worker_pids()) == 2
    clients = [kvstore.connect(running.address, namespace=NAMESPACE, transport="tcp") for _ in range(4)]
    keys = clients[0].keys(np.arange(40, dtype=np.int32))
    clients[0].put(keys, np.ones((10, 64), dtype=np.uint8))
    for client in clients:
        assert client.get(keys).hit_blocks == 10
        client.close()


def test_only_loopback_listens_unless_told_otherwise(running: ServerProcess) -> None:
    assert listening(running.pids()) <= LOOPBACK
    assert len(listening(running.pids())) > 0


def test_an_ipv6_address_is_listened_on_and_written_in_brackets() -> None:
    with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
    with ServerProcess(dram="16MiB", host="::1") as server:
        assert server.address.startswith("[::1]:")
        assert server.status()["healthy"]
        for transport in ("shm", "tcp"):
            with kvstore.connect(server.address, namespace=NAMESPACE, transport=transport) as client:
                keys = client.keys(np.arange(40, dtype=np.int32))
                assert client.put(keys, np.zeros((10, 64), dtype=np.uint8)).present == 10
                assert client.get(keys).hit_blocks == 10


# --- one server with two lives: the first ends by SIGKILL to all its processes, the second by Ctrl-C ------------------


@dataclass(frozen=True, slots=True)
class Lives:
    """What was seen of it."""

    status: list[dict[str, Any]]  # in each life
    schemes: list[kvstore.KeyScheme]
    sockets: list[set[str]]  # in the first life, after it, in the second, after it
    shared_files: list[set[str]]  # of /dev/shm, before and after
    code: int


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    seen = Lives([], [], [], [names(SHARED_FILES)], 0)

    def look(server: ServerProcess) -> None:
        with kvstore.connect(server.address, namespace=NAMESPACE) as client:
            seen.status.append(server.status())
            seen.schemes.append(client.scheme)
            seen.sockets.append(names(server.runtime_dir))
            keys = client.keys(np.arange(40, dtype=np.int32))
            assert client.put(keys, np.zeros((10, 64), dtype=np.uint8)).stored == 10

    with tempfile.TemporaryDirectory(prefix="kvs-") as name, socket.socket(socket.AF_UNIX) as stranger:
        (Path(name) / "run").mkdir()
        stranger.bind(str(Path(name) / "run" / STRANGER))
        stranger.listen()
        server = ServerProcess(dram="16MiB", shards=2, folder=Path(name)).start()
        look(server)
        server.kill_all()
        seen.sockets.append(names(server.runtime_dir))
        server.start()
        look(server)
        session = server.pid
        os.kill(server.pid, signal.SIGINT)
        until(lambda: not members(session), what="the end of all processes")
        code = server.stop()
        seen.sockets.append(names(server.runtime_dir))
        seen.shared_files.append(names(SHARED_FILES))
        yield replace(seen, code=code)


SHARED_FILES = Path("/dev/shm")
STRANGER = "shard-0-1-alive.sock"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_restart_keeps_identity_and_key_scheme_and_counts_its_starts(lives: Lives) -> None:
    first, second = lives.status
    assert first["node_id"] == second["node_id"]
    assert first["boot_id"] != second["boot_id"]
    assert (first["epoch"], second["epoch"]) == (1, 2)
    assert lives.schemes[0] == lives.schemes[1]


def test_sockets_of_a_server_that_was_killed_are_removed_at_the_next_start_and_others_are_not(lives: Lives) -> None:
    in_first, after_kill, in_second, _ = lives.sockets
    assert len(in_first) == len(in_second) == 3
    assert after_kill == in_first
    assert in_first & in_second == {STRANGER}


def test_a_server_that_is_stopped_leaves_no_process_no_socket_and_no_shared_file(lives: Lives) -> None:
    assert lives.code == 0
    assert lives.sockets[3] == {STRANGER}
    fresh = lives.shared_files[1] - lives.shared_files[0]
    assert not [name for name in fresh if "kvs" in name]
