"""Ports that are fed what no client sends: refused or disconnected, and the server goes on, with nothing leaked."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.core.errors import KvStoreError, NamespaceMismatch, Unavailable, UsageError
from kvstore.core.keys import KEY_DTYPE
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.transport.channel import Channel, Deadline, Stream
from kvstore.transport.shm import connect_local, describe
from kvstore.transport.tcp import connect_data_port
from kvstore.wire.control import NodeInfo
from kvstore.wire.frames import BODY_BYTES_MAX, HEADER, MAGIC, Op, encode
from kvstore.wire.messages import KEYS_MAX, RESERVE_ROW, KeyRequest, RefRequest, decode_rows, encode_json
from tests.chaos.blocks import SMALL, content, has_all, keys_of, put_all
from tests.chaos.sight import Holdings, descriptors, hello, is_conserved

DEADLINE_S = 10.0
FUZZ_ROUNDS = 60


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="16MiB") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[kvstore.Client]:
    with kvstore.connect(server.address, namespace=SMALL, transport="tcp") as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_is_lost(server: ServerProcess, client: kvstore.Client) -> Iterator[None]:
    """After each test the same processes run, hold what they held before, and serve."""
    keys = keys_of(client, 1, 8)
    client.put(keys, content(keys, SMALL))
    assert has_all(client, keys)
    held, pids = Holdings(server), server.pids()
    yield
    held.are_back()
    assert server.pids() == pids
    assert has_all(client, keys)
    assert is_conserved(server)


def data_port(info: NodeInfo) -> socket.socket:
    """A bare connection."""
    sock = socket.create_connection((info.data_host, info.data_port), timeout=DEADLINE_S)
    sock.settimeout(DEADLINE_S)
    return sock


def local_socket(info: NodeInfo) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(DEADLINE_S)
    sock.connect(info.shards[0].socket_path)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Whether the server ends this connection, having said what it had to say."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def ends_on(sock: socket.socket, sent: bytes) -> bool:
    """Whether the server ends the connection on this."""
    with contextlib.suppress(ConnectionError):  # it may be faster than we are
        sock.sendall(sent)
    return is_closed(sock)


def header(
    op: int = Op.LOOKUP, *, magic: bytes = MAGIC, status: int = 0, flags: int = 0, body: int = 0, payload: int = 0
) -> bytes:
    return HEADER.pack(magic, op, status, flags, 1, body, payload)


MALFORMED = {
    "nothing but zeros": bytes(64),
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a wrong magic": header(magic=b"KVS2"),
    "operation 0": header(0),
    "operation 255": header(255),
    "unknown flags": header(flags=0x8000),
    "a body over the limit": header(body=BODY_BYTES_MAX + 1) + bytes(100),
    "a body of 4 GiB": header(body=0xFFFFFFFF) + bytes(100),
    "a payload over the limit": header(Op.WRITE, payload=1 << 63),
    "payload where there is none": header(Op.LOOKUP, payload=1 << 20) + bytes(1 << 20),
}


@pytest.mark.parametrize("door", [data_port, local_socket])
@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_frame_ends_the_connection(
    server: ServerProcess, door: Callable[[NodeInfo], socket.socket], sent: bytes
) -> None:
    with door(hello(server)) as sock:
        assert ends_on(sock, sent)


@pytest.mark.parametrize("door", [data_port, local_socket])
def test_random_bytes_end_the_connection(server: ServerProcess, door: Callable[[NodeInfo], socket.socket]) -> None:
    info, random = hello(server), np.random.default_rng(1)
    for _ in range(FUZZ_ROUNDS):
        with door(info) as sock:
            assert ends_on(sock, random.bytes(int(random.integers(24, 4096))))


def test_connections_that_say_nothing_or_stop_in_the_middle_of_hello_are_ended_after_a_while(
    server: ServerProcess, client: kvstore.Client
) -> None:
    info = hello(server)
    whole = encode(Op.HELLO, 1, encode_json({"version": 1, "token": info.token, "shard": 0}))
    with ExitStack() as stack:
        silent = [stack.enter_context(data_port(info)) for _ in range(20)]
        for place, sock in enumerate(silent[5:]):
            sock.sendall(whole[: 3 * place + 1])
        assert has_all(client, keys_of(client, 1, 8)), "others are served meanwhile"
        with ThreadPoolExecutor(len(silent)) as threads:
            assert all(threads.map(is_closed, silent))


def tampered(token: str) -> dict[str, object]:
    raw = bytes.fromhex(token)
    longer = struct.pack("<Q", int(time.time()) + 10**6) + raw[8:]
    return {
        "none": None,
        "empty": "",
        "a number": 7,
        "no hex": "zz" * 56,
        "another script": "٣" * 112,
        "too short": token[:-2],
        "one bit off": (raw[:-1] + bytes([raw[-1] ^ 1])).hex(),
        "prolonged by its owner": longer.hex(),
        "made up": os.urandom(len(raw)).hex(),
    }


def test_no_token_but_one_of_this_server_is_accepted(server: ServerProcess) -> None:
    info = hello(server)
    for name, token in tampered(info.token).items():
        with data_port(info) as sock:
            sock.sendall(encode(Op.HELLO, 1, encode_json({"version": 1, "token": token, "shard": 0})))
            answer = sock.recv(4096)
            assert b"the session token is missing, wrong or has run out" in answer, name
            assert is_closed(sock), name
    for body in (b"", b"[]", b"null", b"\xff\xfe", b"[" * 4000, b'{"version": 1', b"{}" + bytes(4096)):
        with data_port(info) as sock:
            sock.sendall(encode(Op.HELLO, 1, body))
            assert is_closed(sock), body[:20]


@pytest.mark.parametrize("shard", [1, -1, 10**30, "0", None, 0.0, [0]])
def test_hello_to_a_shard_that_does_not_exist_is_refused_with_a_reason(server: ServerProcess, shard: object) -> None:
    info = hello(server)
    with data_port(info) as sock:
        sock.sendall(encode(Op.HELLO, 1, encode_json({"version": 1, "token": info.token, "shard": shard})))
        assert b"this node has no shard" in sock.recv(4096)
        assert is_closed(sock)


def test_hello_of_another_protocol_version_is_refused_with_a_reason(server: ServerProcess) -> None:
    info = hello(server)
    with data_port(info) as sock:
        sock.sendall(encode(Op.HELLO, 1, encode_json({"version": 99, "token": info.token, "shard": 0})))
        assert b"protocol version 99; this server speaks 1" in sock.recv(4096)
        assert is_closed(sock)


class Session:
    """An honest session at either door, with the namespace open, from where on anything may be sent."""

    def __init__(self, server: ServerProcess, door: str) -> None:
        info = hello(server)
        if door == "data port":
            self.channel, _ = connect_data_port(info.data_host, info.data_port, info.token, 0, self.deadline)
        else:
            self.channel = connect_local(info.shards[0].socket_path, self.deadline)
        self.number = int.from_bytes(self.call(Op.OPEN, encode_json(describe(SMALL))), "little")

    @property
    def deadline(self) -> Deadline:
        return Deadline(DEADLINE_S)

    def call(self, op: Op, body: bytes) -> bytes:
        return self.channel.call(op, body, self.deadline)

    def reserve(self, keys: kvstore.BlockKeys) -> NDArray[np.void]:
        request = KeyRequest(self.number, keys.array, ttl_ms=60_000, size_bytes=SMALL.block_bytes)
        return decode_rows(self.call(Op.RESERVE, request.encode()), RESERVE_ROW, len(keys))

    def send(self, op: Op, body: bytes, payload: bytes) -> None:
        self.channel.stream.send([encode(op, 1, body, len(payload)), payload], self.deadline)

    def close(self) -> None:
        self.channel.close()


DOORS = pytest.mark.parametrize("door", ["data port", "local socket"])


def test_a_write_of_what_was_never_reserved_or_of_another_size_ends_the_connection(
    server: ServerProcess, client: kvstore.Client
) -> None:
    keys = keys_of(client, 50, 2)
    one = SMALL.block_bytes + SMALL.layers * 8
    made_up = RefRequest.of(np.array([0, 1]), np.array([1, 2]))
    with closing(Session(server, "data port")) as session:
        session.send(Op.WRITE, made_up.encode(), bytes(2 * one))
        assert is_closed(session.channel.stream.sock)
    for payload in (bytes(0), bytes(one), bytes(2 * one - 1), bytes(3 * one)):
        with closing(Session(server, "data port")) as session:
            rows = session.reserve(keys)
            assert (rows["status"] == kvstore.PutStatus.STORED).all()
            request = RefRequest.of(rows["handle"], rows["generation"], session.number)
            session.send(Op.WRITE, request.encode(), payload)
            assert is_closed(session.channel.stream.sock)
        until(lambda: not client.lookup(keys).states.any(), what="the end of the reservation")
    with closing(Session(server, "data port")) as session:  # right, but the sums don't match
        rows = session.reserve(keys)
        session.send(
            Op.WRITE, RefRequest.of(rows["handle"], rows["generation"], session.number).encode(), bytes(2 * one)
        )
        until(lambda: not client.lookup(keys).states.any(), what="the end of the reservation")
    with closing(Session(server, "data port")) as session:  # half a payload, then nothing more
        rows = session.reserve(keys)
        request = RefRequest.of(rows["handle"], rows["generation"], session.number).encode()
        session.channel.stream.send([encode(Op.WRITE, 1, request, 2 * one), bytes(one)], session.deadline)
    until(lambda: not client.lookup(keys).states.any(), what="the end of the reservation")
    put_all(client, keys)


def test_one_clients_reservation_can_not_be_written_or_committed_by_another(
    server: ServerProcess, client: kvstore.Client
) -> None:
    keys = keys_of(client, 60, 2)
    with closing(Session(server, "data port")) as owner, closing(Session(server, "data port")) as thief:
        rows = owner.reserve(keys)
        refs = RefRequest.of(rows["handle"], rows["generation"], owner.number)
        for op in (Op.COMMIT, Op.ABORT, Op.PUBLISH):
            assert thief.call(op, refs.encode()) == bytes(2)
        thief.send(Op.WRITE, refs.encode(), bytes(2 * (SMALL.block_bytes + SMALL.layers * 8)))
        assert is_closed(thief.channel.stream.sock)
        assert (client.lookup(keys).states == kvstore.BlockState.RESERVED).all()
        assert owner.call(Op.ABORT, refs.encode()) == b"\1\1"


@pytest.mark.parametrize("layers", [(0, 5), (3, 3), (4, 4), (3, 1), (0, 0xFFFF), (0xFFFF, 0xFFFF)])
def test_a_fetch_of_layers_that_a_block_does_not_have_is_refused_and_the_connection_stays(
    server: ServerProcess, client: kvstore.Client, layers: tuple[int, int]
) -> None:
    keys = keys_of(client, 1, 8).array
    with closing(Session(server, "data port")) as session:
        with pytest.raises(UsageError, match=f"layers {layers[0]}:{layers[1]} of a block that has 4"):
            session.call(Op.FETCH, KeyRequest(session.number, keys, layers=layers).encode())
        assert len(session.call(Op.LOOKUP, KeyRequest(session.number, keys).encode())) == 64


@DOORS
def test_namespaces_that_nobody_opened_are_refused(server: ServerProcess, client: kvstore.Client, door: str) -> None:
    keys = keys_of(client, 1, 2).array
    with closing(Session(server, door)) as session:
        with pytest.raises(NamespaceMismatch, match="777"):
            session.call(Op.RESERVE, KeyRequest(777, keys, size_bytes=SMALL.block_bytes, ttl_ms=1000).encode())
        with pytest.raises(NamespaceMismatch, match=r"blocks of 12 bytes"):
            session.call(Op.RESERVE, KeyRequest(session.number, keys, size_bytes=12, ttl_ms=1000).encode())
        if door == "data port":
            with pytest.raises(NamespaceMismatch, match="777"):
                session.call(Op.FETCH, KeyRequest(777, keys, layers=(0, 1)).encode())


DIGEST = "0" * 31 + "1"
DESCRIPTIONS = {
    "nothing": b"",
    "no object": b"[1]",
    "no fields": b"{}",
    "no hex": b'{"digest": "xx", "layers": 1, "layer_bytes": 1}',
    "a short digest": b'{"digest": "00", "layers": 1, "layer_bytes": 1}',
    "a number for a digest": b'{"digest": 5, "layers": 1, "layer_bytes": 1}',
    "no layers": f'{{"digest": "{DIGEST}", "layers": 0, "layer_bytes": 1}}'.encode(),
    "infinitely many layers": f'{{"digest": "{DIGEST}", "layers": Infinity, "layer_bytes": 1}}'.encode(),
    "infinite layers": f'{{"digest": "{DIGEST}", "layers": 1, "layer_bytes": 1e999}}'.encode(),
    "layers that are no number": f'{{"digest": "{DIGEST}", "layers": NaN, "layer_bytes": 1}}'.encode(),
    "huge layers": f'{{"digest": "{DIGEST}", "layers": 4096, "layer_bytes": {10**40}}}'.encode(),
    "negative layers": f'{{"digest": "{DIGEST}", "layers": 2, "layer_bytes": -4096}}'.encode(),
    "a list of layers": f'{{"digest": "{DIGEST}", "layers": [4], "layer_bytes": 4}}'.encode(),
    "known with other layers": encode_json({**describe(SMALL), "layers": 2}),
}


@DOORS
@pytest.mark.parametrize("description", DESCRIPTIONS.values(), ids=DESCRIPTIONS.keys())
def test_a_namespace_that_can_not_be_is_refused(server: ServerProcess, door: str, description: bytes) -> None:
    with closing(Session(server, door)) as session, pytest.raises(KvStoreError):
        session.call(Op.OPEN, description)


REQUESTS = {
    "an empty body": b"",
    "fewer keys than announced": KeyRequest(0, np.zeros(3, KEY_DTYPE)).encode()[:-1],
    "more keys than announced": KeyRequest(0, np.zeros(3, KEY_DTYPE)).encode() + b"\0",
    "too many keys": KeyRequest(0, np.zeros(KEYS_MAX + 1, KEY_DTYPE)).encode(),
    "a count beyond the body": struct.pack("<HHHHIIQ", 0, 0, 1, 0, 0, 0xFFFFFFFF, 0),
}


@DOORS
@pytest.mark.parametrize("body", REQUESTS.values(), ids=REQUESTS.keys())
def test_a_body_that_is_not_what_it_announces_ends_the_connection(
    server: ServerProcess, door: str, body: bytes
) -> None:
    for op in (Op.LOOKUP, Op.RESERVE, Op.COMMIT, Op.LEASE, Op.DELETE, Op.TOUCH):
        with closing(Session(server, door)) as session, pytest.raises(Unavailable):
            session.call(op, body)


@DOORS
def test_made_up_handles_generations_and_leases_name_nothing(server: ServerProcess, door: str) -> None:
    edge = np.array([0, 1, 1023, 1024, 4095, 4096, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1], dtype=np.uint64)
    handles, generations = (part.reshape(-1) for part in np.meshgrid(edge, edge[3:]))
    with closing(Session(server, door)) as session:
        refs = RefRequest.of(handles, generations, ttl_ms=0xFFFFFFFF).encode()
        for op in (Op.COMMIT, Op.ABORT, Op.PUBLISH):
            assert not any(session.call(op, refs)), op
        assert not any(session.call(Op.LEASE, refs)[8:])
        for op in (Op.RENEW, Op.RELEASE):
            assert not any(session.call(op, struct.pack("<II", 1, len(edge)) + edge.tobytes()))


@DOORS
def test_a_block_can_not_be_given_back_twice_under_a_second_name(
    server: ServerProcess, client: kvstore.Client, door: str
) -> None:
    keys = keys_of(client, 65, 1)
    with closing(Session(server, door)) as session:
        row = session.reserve(keys)
        handle, generation = int(row["handle"][0]), int(row["generation"][0])
        for length in (1024, 2048, 4096):  # what an array of handles may have room for
            handles = np.array([handle, 2**64 - length + handle], dtype=np.uint64)
            refs = RefRequest.of(handles, np.full(2, generation, dtype=np.uint64)).encode()
            assert session.call(Op.PUBLISH, refs) == b"\1\0"
        assert session.call(Op.ABORT, refs) == b"\1\0"


def test_a_server_out_of_descriptors_serves_who_is_there_and_later_new_clients_again(
    server: ServerProcess, client: kvstore.Client
) -> None:
    info, keys = hello(server), keys_of(client, 1, 8)
    processes = [server.shard_pid(), *server.worker_pids()]
    limits = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in processes]
    with ExitStack() as stack:
        for pid, limit in zip(processes, limits, strict=True):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid) + 6, limit[1]))
            stack.callback(resource.prlimit, pid, resource.RLIMIT_NOFILE, limit)
        for door in (data_port, local_socket):
            for _ in range(30):
                stack.enter_context(door(info))
        assert has_all(client, keys)
        for transport in ("shm", "tcp"):
            with contextlib.suppress(Unavailable), closing(connect(server, transport)) as late:
                late.get(keys)  # may be refused or read misses, but not hang
    for transport in ("shm", "tcp"):
        with closing(connect(server, transport)) as later:
            until(lambda later=later: has_all(later, keys), what="a new client that is served")


def connect(server: ServerProcess, transport: str) -> kvstore.Client:
    return kvstore.connect(server.address, namespace=SMALL, transport=transport, timeout_s=1.0)


OPERATIONS = {
    "data port": [op for op in Op if op not in {Op.HELLO, Op.WRITE}],
    "local socket": [op for op in Op if op not in {Op.FLUSH, Op.STATS}],
}


@DOORS
def test_no_body_of_any_operation_ends_the_server(server: ServerProcess, client: kvstore.Client, door: str) -> None:
    random = np.random.default_rng(2)
    keys = keys_of(client, 70, 4).array
    good = KeyRequest(0, keys, layers=(0, 4), ttl_ms=1000, size_bytes=SMALL.block_bytes).encode()
    for _ in range(FUZZ_ROUNDS // 4):
        for op in OPERATIONS[door]:
            body = bytearray(good if random.random() < 0.5 else random.bytes(int(random.integers(1, 400))))
            for place in random.integers(0, min(len(body), 24), size=3).tolist():
                body[place] = int(random.integers(256))
            with closing(Session(server, door)) as session, contextlib.suppress(KvStoreError):  # refused, disconnected
                session.channel.call(op, bytes(body), session.deadline)


@DOORS
def test_a_client_that_asks_and_asks_and_never_reads_is_disconnected_or_made_to_wait(
    server: ServerProcess, client: kvstore.Client, door: str
) -> None:
    keys = keys_of(client, 1, 8)
    frame = encode(Op.LOOKUP, 1, KeyRequest(0, np.tile(keys.array, 1000)).encode())
    with closing(Session(server, door)) as session:
        sock = session.channel.stream.sock
        sock.settimeout(0.3)
        with contextlib.suppress(OSError):  # timed out, reset or broken pipe
            for _ in range(1000):
                sock.sendall(frame)
            pytest.fail("the server took in 200 MB of questions and kept the answers")
        assert has_all(client, keys), "others are served meanwhile"


def test_a_local_client_that_attaches_again_and_again_without_reading_is_disconnected(server: ServerProcess) -> None:
    with local_socket(hello(server)) as sock:
        sock.settimeout(0.3)
        with contextlib.suppress(OSError):  # disconnected or made to wait
            for _ in range(5000):
                sock.sendall(encode(Op.ATTACH, 1, encode_json({"version": 1})))


def test_an_empty_stream_is_no_client(server: ServerProcess) -> None:
    info = hello(server)
    for door in (data_port, local_socket):
        for _ in range(FUZZ_ROUNDS):
            door(info).close()
    channel = Channel(Stream(local_socket(info), "the shard"))
    channel.close()
    assert not channel.usable
