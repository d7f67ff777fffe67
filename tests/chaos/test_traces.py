"""What a server shows to the world and leaves behind: ports, sockets, files, processes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.core.errors import UsageError
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.chaos.blocks import SMALL, has_all, keys_of, put_all
from tests.chaos.sight import hello

LISTENS = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="16MiB", shards=2, auth_token="open sesame") as server:
        yield server


def files_of(pid: int) -> set[str]:
    """What its descriptors and its mappings stand for."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        found |= {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
        found |= {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return found


def listening_addresses(pids: list[int]) -> dict[int, str]:
    """Address, in hex as the kernel has it, of each port that these processes listen on."""
    mine = {file for pid in pids for file in files_of(pid) if file.startswith("socket:")}
    found: dict[int, str] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else []:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in mine:
                found[int(port, 16)] = address
    return found


def test_a_server_that_was_told_nothing_listens_on_loopback_alone(server: ServerProcess) -> None:
    listening = listening_addresses(server.pids())
    told = {int(address.rpartition(":")[2]) for address in (server.address, server.data_address, server.http_address)}
    assert set(listening) == told
    assert set(listening.values()) <= LOOPBACK


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("token", ["", "open sesam", "open sesame ", "Bearer open sesame"])
def test_who_does_not_know_the_auth_token_is_refused_in_one_line(
    server: ServerProcess, transport: str, token: str
) -> None:
    with pytest.raises(UsageError, match=r"auth token is missing or wrong \(KVSTORE_AUTH_TOKEN\)") as refused:
        kvstore.connect(server.address, namespace=SMALL, transport=transport, auth_token=token)
    assert "\n" not in str(refused.value)
    assert "sesame" not in str(refused.value)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_knows_the_auth_token_is_served(server: ServerProcess, transport: str) -> None:
    with kvstore.connect(server.address, namespace=SMALL, transport=transport, auth_token="open sesame") as client:
        keys = keys_of(client, 1, 8)
        client.delete(keys)
        put_all(client, keys)
        assert has_all(client, keys)


def test_the_auth_token_is_shown_nowhere(server: ServerProcess) -> None:
    assert "sesame" not in server.http("/status") + server.http("/metrics") + server.http("/health")


def test_local_sockets_are_for_their_user_alone(server: ServerProcess) -> None:
    assert server.runtime_dir.stat().st_mode & 0o777 == 0o700
    sockets = list(server.runtime_dir.iterdir())
    assert len(sockets) == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in sockets)


def test_nothing_of_ours_is_ever_in_dev_shm(server: ServerProcess) -> None:
    assert not [file for pid in server.pids() for file in files_of(pid) if file.startswith(str(SHM))]
    if SHM.exists():
        assert not [path for path in SHM.iterdir() if "kvs" in path.name]


def test_sockets_that_a_killed_server_left_are_gone_after_the_next_start_and_only_those() -> None:
    with ServerProcess(dram="16MiB", shards=2) as server:
        left = set(server.runtime_dir.iterdir())
        assert len(left) == 2
        server.kill_all()
        assert set(server.runtime_dir.iterdir()) == left
        others = server.runtime_dir / "shard-9-1-other.sock"
        with socket.socket(socket.AF_UNIX) as other:  # of a server that runs
            other.bind(str(others))
            other.listen()
            server.start()
            now = set(server.runtime_dir.iterdir())
        assert not now & left
        assert others in now
        assert len(now) == 3
        others.unlink()
        pids = server.pids()
        assert server.stop() == 0
        assert list(server.runtime_dir.iterdir()) == []
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="the end of its processes")


def test_all_processes_end_when_the_node_is_killed_even_with_clients_connected() -> None:
    with (
        ServerProcess(dram="16MiB", shards=2) as server,
        contextlib.closing(kvstore.connect(server.address, namespace=SMALL, transport="tcp")) as client,
    ):
        put_all(client, keys_of(client, 1, 8))
        hello(server)
        pids = server.pids()
        assert len(pids) == 4
        server.kill()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="the end of its processes")
        assert not listening_addresses(pids)
