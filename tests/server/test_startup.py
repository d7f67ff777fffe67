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
from dataclasses import dataclass
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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpu", "cuda:99"), 'device "cuda:99" asked for, but '),
        (("--gpu", "gpu0"), 'device "gpu0": allowed is host, or cuda: and a number'),
        (("--gpu", "host", "--gpu-bytes", "1MiB"), "gpu_bytes=1MiB: at least 8MiB for 1 shards"),
    ],
)
def test_a_gpu_tier_that_can_not_be_had_is_named(folder: Path, flags: tuple[str, ...], said: str) -> None:
    assert said in refusal(folder, *flags)


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


# --- one server with two lives ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lives() -> Iterator[list[Life]]:
    """The first ends by Ctrl-C, the second too."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as name:
        server = ServerProcess(dram="16MiB", folder=Path(name))
        yield [life(server), life(server)]


@dataclass(frozen=True, slots=True)
class Life:
    """What was seen in it."""

    status: dict[str, Any]
    scheme: kvstore.KeyScheme
    code: int


def life(server: ServerProcess) -> Life:
    with server, kvstore.connect(server.address, namespace=NAMESPACE) as client:
        status, scheme, session = server.status(), client.scheme, server.pid
        os.kill(server.pid, signal.SIGINT)
        until(lambda: not members(session), what="the end of all its processes")
        return Life(status, scheme, server.stop())


def test_a_restart_keeps_identity_and_key_scheme_and_counts_its_starts(lives: list[Life]) -> None:
    first, second = lives
    assert first.status["node_id"] == second.status["node_id"]
    assert first.status["boot_id"] != second.status["boot_id"]
    assert (first.status["epoch"], second.status["epoch"]) == (1, 2)
    assert first.scheme == second.scheme


def test_ctrl_c_is_a_clean_end(lives: list[Life]) -> None:
    assert [one.code for one in lives] == [0, 0]
