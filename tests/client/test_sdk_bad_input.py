"""Wrong input: one clear line that names the culprit and what is allowed, and nothing half-stored."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import kvstore
from kvstore import ConfigError, LayoutMismatch, Unavailable, UnregisteredBuffer, UsageError
from kvstore.testing.cluster import ServerProcess
from tests.client.conftest import Connect
from tests.client.sdk import fresh_keys, is_absent, one_line, space, stored

SIZE = space().block_bytes

Case = tuple[object, type[kvstore.KvStoreError], tuple[str, ...]]

SOURCES: dict[str, Case] = {
    "wrong dtype": (np.zeros((3, SIZE // 4), np.float32), LayoutMismatch, ("blocks", "float32", "uint8")),
    "wrong dtype in a list": ([bytes(SIZE), np.zeros(SIZE // 2, np.int16)], LayoutMismatch, ("blocks[1]", "int16")),
    "too many bytes": (np.zeros((3, SIZE + 1), np.uint8), LayoutMismatch, (str(3 * SIZE + 3), "3 keys", str(SIZE))),
    "too few bytes": (bytes(3 * SIZE - 1), LayoutMismatch, (str(3 * SIZE - 1), "3 keys", str(SIZE))),
    "no bytes": (b"", LayoutMismatch, ("blocks: 0 bytes", "3 keys")),
    "too few buffers": ([bytes(SIZE)] * 2, LayoutMismatch, ("2 buffers", "3 keys")),
    "too many buffers": ([bytes(SIZE)] * 4, LayoutMismatch, ("4 buffers", "3 keys")),
    "one buffer too short": ([bytes(SIZE), bytes(SIZE), bytes(9)], LayoutMismatch, ("blocks[2]", "9 bytes", str(SIZE))),
    "not contiguous": (np.zeros((3, 2 * SIZE), np.uint8)[:, ::2], LayoutMismatch, ("not C-contiguous", "strides")),
    "a transposed array": (np.zeros((SIZE, 3), np.uint8).T, LayoutMismatch, ("not C-contiguous",)),
    "a strided memoryview": (memoryview(bytes(6 * SIZE))[::2], UsageError, ("blocks", "memoryview", "contiguous")),
    "objects": (np.array([None, 1, "x"]), LayoutMismatch, ("blocks", "objects")),
    "text": ("abc", UsageError, ("blocks", "str", "bytes-like")),
    "a number": (5, UsageError, ("blocks", "int", "bytes-like")),
    "nothing": (None, UsageError, ("blocks", "NoneType", "bytes-like")),
    "numbers in a list": ([1, 2, 3], UsageError, ("blocks[0]", "int", "bytes-like")),
}

TARGETS: dict[str, Case] = {
    "wrong dtype": (np.zeros((3, SIZE // 2), np.float16), LayoutMismatch, ("into", "float16", "uint8")),
    "too few bytes": (np.zeros((2, SIZE), np.uint8), LayoutMismatch, (str(2 * SIZE), "3 keys", str(SIZE))),
    "one buffer too long": ([bytearray(SIZE), bytearray(SIZE + 1), bytearray(SIZE)], LayoutMismatch, ("into[1]",)),
    "not contiguous": (np.zeros((3, 2 * SIZE), np.uint8)[:, :SIZE], LayoutMismatch, ("not C-contiguous",)),
    "bytes": (bytes(3 * SIZE), UsageError, ("into", "read-only")),
    "bytes in a list": ([bytearray(SIZE), bytearray(SIZE), bytes(SIZE)], UsageError, ("into[2]", "read-only")),
    "a read-only view": (memoryview(bytearray(3 * SIZE)).toreadonly(), UsageError, ("into", "read-only")),
    "a number": (5, UsageError, ("into", "int", "bytes-like")),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_source_that_does_not_fit_is_refused_and_nothing_is_stored(case: str, client: kvstore.Client) -> None:
    blocks, kind, parts = SOURCES[case]
    keys = fresh_keys(client, 2 if case == "wrong dtype in a list" else 3)
    with one_line(kind, *parts):
        client.put(keys, blocks)
    assert is_absent(client, keys)


@pytest.mark.parametrize("case", TARGETS)
def test_a_target_that_does_not_fit_is_refused_and_nothing_is_copied(case: str, client: kvstore.Client) -> None:
    into, kind, parts = TARGETS[case]
    keys, _ = stored(client, 3)
    with one_line(kind, *parts):
        client.get_into(keys, into)
    targets: list[Any] = cast("list[Any]", into) if isinstance(into, list) else [into]
    for target in targets:
        assert isinstance(target, int) or not any(memoryview(target).tobytes())


def test_a_read_only_array_is_no_target_but_a_source(client: kvstore.Client) -> None:
    keys, data = stored(client, 2)
    frozen = np.zeros_like(data)
    frozen.flags.writeable = False
    with one_line(UsageError, "into", "read-only"):
        client.get_into(keys, frozen)
    with one_line(UsageError, "buffer", "read-only"):
        client.register(frozen)
    assert client.put(fresh_keys(client, 2), frozen).stored == 2


def test_tensors_that_do_not_fit_are_refused(client: kvstore.Client) -> None:
    torch = pytest.importorskip("torch", reason="tensors need torch")
    keys = fresh_keys(client, 4)
    with one_line(LayoutMismatch, "blocks", "bfloat16", "uint8"):
        client.put(keys, torch.zeros(4, SIZE // 2, dtype=torch.bfloat16))
    with one_line(LayoutMismatch, "blocks", "not contiguous", f"({SIZE}, 4)"):
        client.put(keys, torch.zeros(4, SIZE, dtype=torch.uint8).T)
    with one_line(UsageError, "into", "meta"):
        client.get_into(keys, torch.zeros(4, SIZE, dtype=torch.uint8, device="meta"))
    with one_line(LayoutMismatch, "into[1]", "8 bytes", str(SIZE)):
        client.get_into(keys, [torch.zeros(size, dtype=torch.uint8) for size in (SIZE, 8, SIZE, SIZE)])
    assert is_absent(client, keys)


# --- registered buffers

OFFSETS: dict[str, tuple[Any, type[kvstore.KvStoreError], tuple[str, ...]]] = {
    "too few": ([0, SIZE], UsageError, ("offsets of shape (2,)", "3 integers")),
    "too many": ([0, 0, 0, 0], UsageError, ("offsets of shape (4,)", "3 integers")),
    "a column": (np.zeros((3, 1), np.int64), UsageError, ("offsets of shape (3, 1)", "3 integers")),
    "one number": (0, UsageError, ("offsets of shape ()", "3 integers")),
    "fractions": (np.array([0.0, 1.0, 2.0]), UsageError, ("float64", "3 integers")),
    "truths": (np.array([True, False, True]), UsageError, ("bool", "3 integers")),
    "text": (["a", "b", "c"], UsageError, ("dtype <U1", "3 integers")),
    "ragged": ([[0], [1, 2], 3], UsageError, ("offsets", "3 integers")),
    "below zero": ([0, -1, SIZE], UnregisteredBuffer, ("-1", str(4 * SIZE))),
    "one byte beyond": ([0, SIZE, 3 * SIZE + 1], UnregisteredBuffer, (str(3 * SIZE + 1), str(SIZE), str(4 * SIZE))),
    "far beyond": (np.array([0, 1, 2**64 - 1], np.uint64), UnregisteredBuffer, ("offsets", str(4 * SIZE))),
    "at the end of the numbers": ([0, 1, 2**63 - 1], UnregisteredBuffer, (str(2**63 - 1), str(4 * SIZE))),
    "no number at all": ([0, 1, 2**70], UsageError, ("offsets", "3 integers")),
    "missing": (None, UsageError, ("offsets=", "one per key")),
}


@pytest.mark.parametrize("case", OFFSETS)
def test_offsets_that_do_not_fit_are_refused_both_ways(case: str, client: kvstore.Client) -> None:
    offsets, kind, parts = OFFSETS[case]
    memory = np.zeros(4 * SIZE, dtype=np.uint8)
    registered = client.register(memory)
    keys, fresh = stored(client, 3)[0], fresh_keys(client, 3)
    with one_line(kind, *parts):
        client.get_into(keys, registered, offsets=offsets)
    with one_line(kind, *parts):
        client.put(fresh, registered, offsets=offsets)
    assert not memory.any()
    assert is_absent(client, fresh)


def test_a_buffer_that_was_unregistered_is_refused(client: kvstore.Client) -> None:
    memory = np.zeros(SIZE, dtype=np.uint8)
    registered = client.register(memory)
    registered.close()
    keys = fresh_keys(client, 1)
    for call in (client.put, client.get_into):
        with one_line(UnregisteredBuffer, "unregistered", "register it again"):
            call(keys, registered, offsets=[0])
    assert is_absent(client, keys)


def test_offsets_go_with_a_registered_buffer_only(client: kvstore.Client) -> None:
    keys, memory = fresh_keys(client, 1), np.zeros((1, SIZE), dtype=np.uint8)
    with one_line(UsageError, "blocks", "offsets=", "register()"):
        client.put(keys, memory, offsets=[0])
    with one_line(UsageError, "into", "offsets=", "register()"):
        client.get_into(keys, memory, offsets=[0])
    assert is_absent(client, keys)


@pytest.mark.parametrize(
    "buffer", [5, "text", b"bytes", np.zeros(8, np.complex128)], ids=lambda value: type(value).__name__
)
def test_what_is_no_writable_buffer_of_the_right_kind_can_not_be_registered(
    buffer: object, client: kvstore.Client
) -> None:
    with pytest.raises(UsageError, match=r"^buffer: [^\n]+$"):
        client.register(buffer)


# --- other arguments


@pytest.mark.parametrize(
    "layers",
    [(0, 0), (1, 1), (1, 0), (-1, 1), (0, 3), (2, 3), (0, 1, 2), (0,), 1, "01", (0.5, 1.5), (None, 1)],
    ids=str,
)
def test_a_range_of_layers_that_is_none_is_refused(layers: Any, client: kvstore.Client) -> None:
    keys, data = stored(client, 2)
    into = np.zeros_like(data)
    with one_line(UsageError, f"layers={layers!r}", "0 to 2"):
        client.get_into(keys, into, layers=layers)
    assert not into.any()


def test_a_target_for_some_layers_has_the_bytes_of_these_layers(client: kvstore.Client) -> None:
    keys, data = stored(client, 2)
    with one_line(LayoutMismatch, str(2 * SIZE), "2 keys", str(SIZE // 2)):
        client.get_into(keys, np.zeros_like(data), layers=(0, 1))


@pytest.mark.parametrize("ttl_s", [0, -1, 0.001, 601, float("nan"), float("inf")])
def test_a_lease_of_no_or_too_much_time_is_refused(ttl_s: float, client: kvstore.Client) -> None:
    with one_line(UsageError, f"ttl_s={ttl_s}", "0.01 to 600 seconds"):
        client.view(fresh_keys(client, 1), ttl_s=ttl_s)


@pytest.mark.parametrize(
    "keys", [[1, 2], "keys", b"", None, np.zeros(3, np.int64)], ids=lambda value: type(value).__name__
)
def test_what_is_no_batch_of_keys_is_refused_by_every_call(keys: Any, client: kvstore.Client) -> None:
    calls: list[Callable[[], object]] = [
        lambda: client.lookup(keys),
        lambda: client.get(keys),
        lambda: client.get_into(keys, np.empty(2 * SIZE, np.uint8)),
        lambda: client.view(keys),
        lambda: client.put(keys, np.empty(2 * SIZE, np.uint8)),
        lambda: client.delete(keys),
        lambda: client.pin(keys),
        lambda: client.unpin(keys),
        lambda: client.prefetch(keys),
    ]
    for call in calls:
        with one_line(UsageError, "keys", type(keys).__name__, "BlockKeys"):
            call()


# --- connect


def test_an_unknown_transport_is_refused(store: ServerProcess) -> None:
    with one_line(ConfigError, "transport='rdma'", "auto, shm, mooncake, tcp"):
        kvstore.connect(store.address, namespace=space(), transport="rdma")


@pytest.mark.parametrize("timeout_s", [0, -1, 0.0001, 4000, float("nan"), float("inf")])
def test_a_timeout_out_of_range_is_refused(timeout_s: float, store: ServerProcess) -> None:
    with one_line(ConfigError, f"timeout_s={timeout_s}", "0.001 to 3600 seconds"):
        kvstore.connect(store.address, namespace=space(), timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("address", "culprit"),
    [
        ("host:port", "'host:port'"),
        ("host:0", "'host:0'"),
        ("host:65536", "'host:65536'"),
        ("host:-1", "'host:-1'"),
        (":7400", "':7400'"),
        ("", "''"),
        ("a:1,,b:2", "''"),
        (["a:1", "b:x"], "'b:x'"),
        ("a:1=0", "'a:1=0'"),
        ("a:1=-2", "'a:1=-2'"),
        ("a:1=heavy", "'a:1=heavy'"),
        ("a:1=inf", "'a:1=inf'"),
        ("a:1=nan", "'a:1=nan'"),
        ("a:1,a:1", "'a:1' is named twice"),
        ([], "no address"),
    ],
    ids=str,
)
def test_an_address_that_is_none_is_refused(address: Any, culprit: str) -> None:
    with one_line(UsageError, culprit):
        kvstore.connect(address, namespace=space())


def test_a_port_where_nobody_listens_is_unavailable_within_the_timeout(transport: str) -> None:
    with socket.socket() as unheard:  # bound but not listening: nobody else gets the port
        unheard.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unheard.getsockname()[1]}"
        begun_s = time.monotonic()
        with one_line(Unavailable, address, "is kvstore-server running?"):
            kvstore.connect(address, namespace=space(), transport=transport, timeout_s=3.0)
        assert time.monotonic() - begun_s < 5.0


def test_a_listener_that_never_answers_is_a_deadline(transport: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        begun_s = time.monotonic()
        with pytest.raises(Unavailable, match=rf"^{address}: [^\n]+$"):
            kvstore.connect(address, namespace=space(), transport=transport, timeout_s=0.3)
        assert time.monotonic() - begun_s < 3.0


def test_shared_memory_without_a_reachable_socket_is_unavailable(store: ServerProcess) -> None:
    sockets = list(Path(store.runtime_dir).rglob("*.sock"))
    assert sockets
    for path in sockets:
        path.rename(path.with_suffix(".away"))
    try:
        with one_line(Unavailable, "transport='shm'", store.address, "on this host"):
            kvstore.connect(store.address, namespace=space(), transport="shm")
    finally:
        for path in sockets:
            path.with_suffix(".away").rename(path)


def test_a_server_with_a_token_takes_nobody_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_AUTH_TOKEN", raising=False)
    with ServerProcess(dram="64MiB", auth_token="secret") as server:
        for token in (None, "", "wrong"):
            with one_line(UsageError, server.address, "KVSTORE_AUTH_TOKEN"):
                kvstore.connect(server.address, namespace=space(), auth_token=token)
        for transport in ("shm", "tcp"):
            with kvstore.connect(server.address, namespace=space(), transport=transport, auth_token="secret") as client:
                stored(client, 1)
        monkeypatch.setenv("KVSTORE_AUTH_TOKEN", "secret")
        with kvstore.connect(server.address, namespace=space()) as client:
            stored(client, 1)


def test_an_error_of_use_leaves_the_client_usable(client: kvstore.Client, connect: Connect) -> None:
    keys, data = stored(client, 2)
    with pytest.raises(UsageError):
        client.put(keys, b"short")
    np.testing.assert_array_equal(np.array(client.get(keys).blocks), data)
    assert all(link["up"] for link in client.stats()["links"])
