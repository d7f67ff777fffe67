"""The worker process and the link to it."""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import ProtocolError, Unavailable
from kvstore.core.keys import KEY_DTYPE
from kvstore.core.namespace import DEFAULT_TENANT
from kvstore.server.tiers.disk.client import DiskLink
from kvstore.server.tiers.disk.commits import GONE_MAX
from kvstore.server.tiers.disk.engine import DiskTier
from kvstore.server.tiers.disk.files import SystemFiles
from kvstore.server.tiers.disk.messages import (
    BLOCKS_MAX,
    BODY_BYTES_MAX,
    LOAD_ROW,
    NAMESPACES_MAX,
    SCANNED_BLOCK,
    SCANNED_NAMESPACE,
    STORE_ROW,
    Gone,
    Load,
    Loaded,
    LoadStatus,
    MessageReader,
    Namespace,
    Removed,
    Scanned,
    StatsAnswer,
    Store,
    Stored,
    StoreStatus,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)
from kvstore.server.tiers.disk.process import DiskWorker
from kvstore.server.tiers.disk.scan import SCAN_PIECE
from kvstore.testing.disk_faults import FaultyFiles
from kvstore.transport.memory import private_arena
from tests.server.tiers.disk.rig import DIGEST, keys_of
from tests.server.tiers.disk.shard_end import ShardEnd


def test_blocks_go_to_the_disk_and_come_back_in_another_worker(tmp_path: Path) -> None:
    end = ShardEnd(tmp_path)
    end.start()
    end.wait_scanned()
    assert end.scanned == []
    stored = end.wait(end.begin_store(range(20), 1), Stored)
    assert stored.statuses.tolist() == [StoreStatus.DURABLE] * 20
    assert end.wait(end.link.submit_remove(2, keys_of([3])), Removed).blocks == 1
    end.hang_up()
    end.start()
    end.wait_scanned()
    assert len(end.scanned) == 19
    loaded = end.wait(end.begin_load(range(20), base=30), Loaded)
    assert end.check(30, range(20), loaded) == [number for number in range(20) if number != 3]
    assert end.wait(end.link.submit_stats(), StatsAnswer).values["blocks"] == 19
    end.close()


def test_what_was_submitted_before_hanging_up_becomes_durable(tmp_path: Path) -> None:
    end = ShardEnd(tmp_path)
    end.start()
    end.wait_scanned()
    for start in range(0, 60, 20):
        end.begin_store(range(start, start + 20), 1, base=start)
    end.hang_up()
    end.start()
    end.wait_scanned()
    assert len(end.scanned) == 60
    end.close()


def test_a_worker_whose_folder_is_taken_ends_at_once_and_the_link_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = ShardEnd(tmp_path), ShardEnd(tmp_path)
    first.start()
    first.child.wait_ready(20.0)
    second.start()
    with pytest.raises(Unavailable):
        second.child.wait_ready(20.0)
    with pytest.raises(Unavailable):
        second.wait_scanned()
    assert capfd.readouterr().err.count("another server uses this folder") == 1
    second.close()
    first.close()


def test_a_full_queue_refuses_and_empties_again(tmp_path: Path) -> None:
    end = ShardEnd(tmp_path)
    end.start()
    end.wait_scanned()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = DiskLink(ours, store_bytes_max=3 * end.size, load_blocks_max=4)
        rows = np.zeros(2, STORE_ROW)
        first = link.submit_store(end.space, rows)
        assert first
        assert not link.submit_store(end.space, rows)
        assert link.submit_load(np.zeros(4, LOAD_ROW))
        assert not link.submit_load(np.zeros(1, LOAD_ROW))
        assert link.submit_remove(1, keys_of([1])), "removing is never refused"
        theirs.sendall(encode_answer(Stored(first, np.zeros(2, np.uint8))))
        assert [answer.request for answer in link.drain()] == [first]
        assert link.submit_store(end.space, rows)
        link.close()
    end.close()


def test_the_link_never_waits_for_a_worker_that_does_not_read(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        link = DiskLink(ours)
        for _ in range(200):
            assert link.submit_remove(1, keys_of(range(4000)))
        assert link.events & selectors.EVENT_WRITE
        reader = MessageReader()
        received = 0
        theirs.setblocking(False)
        while received < 200:
            try:
                received += len(reader.feed(theirs.recv(1 << 16)))
            except BlockingIOError:
                link.drain()
        assert not link.events & selectors.EVENT_WRITE
        link.close()


def test_a_disk_that_hangs_stops_neither_other_requests_nor_the_end(tmp_path: Path) -> None:
    faults = FaultyFiles(SystemFiles(tmp_path))
    pool = private_arena(4 << 20)
    tier = DiskTier(tmp_path, 64 << 20, pool, b"b" * 16, faults)
    ours, theirs = socket.socketpair()
    control, stop = os.pipe()
    worker = DiskWorker(theirs, tier)
    thread = threading.Thread(target=worker.run, args=(control,))
    thread.start()
    link = DiskLink(ours)
    link.submit_scan()
    rows = np.zeros(8, STORE_ROW)
    rows["key"], rows["generation"], rows["offset"] = keys_of(range(8)), 1, np.arange(8) * 16384
    stored = link.submit_store(Namespace(DIGEST, 1, 8192, DEFAULT_TENANT, ""), rows)
    wait_for(link, stored)
    released = [faults.hang_next_read() for _ in range(5)]
    loads = np.zeros(1, LOAD_ROW)
    hung: list[int] = []
    for number in range(5):
        loads["key"], loads["offset"] = keys_of([number]), (100 + number) * 16384
        hung.append(link.submit_load(loads))
    loads["key"], loads["offset"] = keys_of([7]), 200 * 16384
    answer = wait_for(link, link.submit_load(loads))
    assert isinstance(answer, Loaded)
    assert answer.statuses.tolist() == [LoadStatus.OK]
    os.close(stop)
    thread.join(5.0)
    assert not thread.is_alive(), "it ends though reads hang"
    for event in released:
        event.set()
    worker.drain()
    until_s = time.monotonic() + 10
    while tier.stats()["stuck_reads"] and time.monotonic() < until_s:
        tier.poll()
    tier.close()
    link.close()
    theirs.close()
    os.close(control)


def wait_for(link: DiskLink, request: int) -> object:
    until_s = time.monotonic() + 20
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while time.monotonic() < until_s:
            selector.select(0.1)
            for answer in link.drain():
                if answer.request == request:
                    return answer
    raise AssertionError(f"no answer to {request}")


def test_the_worker_survives_its_shard_only_as_long_as_it_takes_to_finish(tmp_path: Path) -> None:
    end = ShardEnd(tmp_path)
    end.start()
    end.child.wait_ready(20.0)
    end.link.close()
    until_s = time.monotonic() + 10
    while end.child.alive:
        assert time.monotonic() < until_s
    end.close()


def test_nonsense_on_the_link_ends_the_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        end = ShardEnd(tmp_path)
        end.start()
        end.child.wait_ready(20.0)
        end.link._sock.sendall(b"\xff" * 64)  # pyright: ignore[reportPrivateUsage] -- no honest way to say it
        with pytest.raises(Unavailable):
            end.wait_for_the_end()
        end.close()


def test_messages_survive_any_chunking() -> None:
    rows = np.zeros(3, STORE_ROW)
    rows["key"] = keys_of([1, 2, 3])
    frames = encode_request(5, Store(DIGEST, 2, 64, rows)) + encode_request(6, Load(np.zeros(2, LOAD_ROW)))
    for size in (1, 7, 64, len(frames)):
        reader = MessageReader()
        messages = [message for at in range(0, len(frames), size) for message in reader.feed(frames[at : at + size])]
        assert [request for _, request, _ in messages] == [5, 6]
        store = decode_request(messages[0][0], messages[0][2])
        assert isinstance(store, Store)
        assert (store.digest, store.layers, store.layer_bytes) == (DIGEST, 2, 64)
        assert store.rows.tobytes() == rows.tobytes()


@pytest.mark.parametrize("op", range(9))
@pytest.mark.parametrize("body", [b"", b"x", b"x" * 31, b"x" * 64, b"\xff" * 100])
def test_ragged_bodies_are_protocol_errors_or_messages(op: int, body: bytes) -> None:
    for decode in (lambda: decode_request(op, body), lambda: decode_answer(op, 1, body)):
        with contextlib.suppress(ProtocolError):
            decode()


def test_a_body_over_the_limit_is_refused() -> None:
    frame = bytearray(encode_answer(Gone(keys_of([1]))))
    frame[8:12] = (BODY_BYTES_MAX + 1).to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="over the limit"):
        MessageReader().feed(bytes(frame))


def test_the_largest_messages_fit() -> None:
    encode_request(1, Load(np.zeros(BLOCKS_MAX, LOAD_ROW)))
    namespaces = np.zeros(NAMESPACES_MAX, SCANNED_NAMESPACE)
    encode_answer(Scanned(1, namespaces, np.zeros(SCAN_PIECE, SCANNED_BLOCK), complete=False))
    encode_answer(Gone(np.zeros(GONE_MAX, KEY_DTYPE)))
