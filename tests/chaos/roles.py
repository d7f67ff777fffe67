"""What the processes of `tests.chaos.processes.Puppet` do."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np

import kvstore
from kvstore.transport.channel import Deadline
from kvstore.transport.shm import LocalSession, SharedShard, connect_local, describe
from kvstore.wire.frames import Op
from kvstore.wire.messages import KeyRequest
from tests.chaos.blocks import HEADED, HEADS, SMALL, content, has_all, keys_of

TIMEOUT_S = 10.0
TICK_S = 0.005
LATE_S = 0.005


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def wait() -> str:
    """For the test's word. Without one the process ends: the test is gone."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return line.strip()


def local_session(socket_path: str) -> LocalSession:
    """A session with a shard, below the SDK."""
    channel = connect_local(socket_path, Deadline(TIMEOUT_S))
    return LocalSession(channel, SharedShard(channel, Deadline(TIMEOUT_S)))


def writer(socket_path: str, keys: list[str], ttl_ms: int) -> None:
    """Reserve; when told, write something wrong into the slots and commit."""
    session = local_session(socket_path)
    number = session.open(describe(SMALL), Deadline(TIMEOUT_S))
    size = SMALL.block_bytes
    request = KeyRequest(number, kvstore.BlockKeys.from_hex(keys).array, ttl_ms=ttl_ms, size_bytes=size)
    rows = session.reserve(request, Deadline(TIMEOUT_S))
    say({"statuses": rows["status"].tolist(), "offsets": rows["offset"].tolist()})
    while wait():
        for offset in rows["offset"].tolist():
            session.shared.pool[offset : offset + size] = 0xEE
        say(session.settle(Op.COMMIT, rows, Deadline(TIMEOUT_S)).tolist())


def rank(address: str, transport: str, prompt: int, blocks: int, heads: list[int], ttl_s: float) -> None:
    """One of the ranks that write blocks of `HEADED` together: for each word one layer, then the commit."""
    with kvstore.connect(address, namespace=HEADED, transport=transport, timeout_s=TIMEOUT_S) as client:
        keys = keys_of(client, prompt, blocks)
        layers = content(keys, HEADED).reshape(blocks, HEADED.layers, HEADS, -1)[:, :, heads[0] : heads[1]]
        with client.publish_stream(keys, heads=(heads[0], heads[1]), ttl_s=ttl_s) as stream:
            say(stream.statuses.tolist())
            for layer in range(HEADED.layers):
                wait()
                stream.write(layer, np.ascontiguousarray(layers[:, layer]))
                say(layer)
            wait()
            say(stream.commit().stored)
        wait()


def viewer(address: str, prompt: int, blocks: int, ttl_s: float) -> None:
    """Look at blocks under a lease; when told, say whether the lease has held all the time."""
    with kvstore.connect(address, namespace=SMALL, transport="shm") as client:
        keys = keys_of(client, prompt, blocks)
        try:
            with client.view(keys, ttl_s=ttl_s) as view:
                say(view.hit_blocks)
                wait()
        except kvstore.LeaseExpired as error:
            say(str(error))
        else:
            say("valid")
        wait()


def crowd(address: str, transport: str, threads: int, first_author: int) -> None:
    """For each word, a number, all threads put the block of that prompt at once, each with content of its own."""
    with kvstore.connect(address, namespace=SMALL, transport=transport, timeout_s=TIMEOUT_S) as client:
        say("ready")
        while True:
            keys = keys_of(client, int(wait()), 1)
            blocks = [content(keys, SMALL, first_author + thread) for thread in range(threads)]
            statuses = [-1] * threads
            start = threading.Barrier(threads)

            def put(
                thread: int,
                start: threading.Barrier = start,
                statuses: list[int] = statuses,
                keys: kvstore.BlockKeys = keys,
                blocks: list[Any] = blocks,
            ) -> None:
                start.wait()
                statuses[thread] = int(client.put(keys, blocks[thread]).statuses[0])

            running = [threading.Thread(target=put, args=(thread,)) for thread in range(threads)]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
            say(statuses)


def parent(address: str, transport: str) -> None:
    """Fork with a client open: the child uses it and closes it, the parent goes on with it."""
    with kvstore.connect(address, namespace=SMALL, transport=transport, timeout_s=TIMEOUT_S) as client:
        mine, childs, later = (keys_of(client, prompt, 4) for prompt in (1, 2, 3))
        client.put(mine, content(mine, SMALL))
        links = [link for node in client._nodes for link in node.links]  # pyright: ignore[reportPrivateUsage]
        pid = os.fork()
        if pid == 0:
            good = has_all(client, mine) and client.put(childs, content(childs, SMALL)).stored == 4
            client.close()
            os._exit(0 if good else 1)
        _, status = os.waitpid(pid, 0)
        idle = os.fork()
        if idle == 0:
            client.close()  # never used here: these connections are the parent's
            os._exit(0)
        os.waitpid(idle, 0)
        say(
            {
                "child": os.waitstatus_to_exitcode(status),
                "parent_reads": has_all(client, mine) and has_all(client, childs),
                "parent_writes": client.put(later, content(later, SMALL)).stored,
                "same_links": links == [link for node in client._nodes for link in node.links],  # pyright: ignore[reportPrivateUsage]
            }
        )
        wait()


def forker(address: str, transport: str) -> None:
    """Fork when told (the server may be down then); the child says whether it got blocks, as often as it is asked."""
    with kvstore.connect(address, namespace=SMALL, transport=transport, timeout_s=0.5) as client:
        keys = keys_of(client, 1, 4)
        say("ready")
        wait()
        if os.fork() == 0:
            say(bool(client.get(keys).ok.any()))
            while wait():
                client.put(keys, content(keys, SMALL))
                say(has_all(client, keys))
        os.wait()


def metronome() -> None:
    """Sleep for a moment again and again; when told, say when and by how much the machine woke us up too late."""
    late: list[tuple[float, float]] = []

    def tick() -> None:
        due_s = time.monotonic()
        while True:
            due_s += TICK_S
            time.sleep(max(0.0, due_s - time.monotonic()))
            now_s = time.monotonic()
            if now_s - due_s > LATE_S:
                late.append((due_s, now_s))
                due_s = now_s

    threading.Thread(target=tick, daemon=True).start()
    say("ticking")
    while wait():
        told = len(late)
        say(late[:told])
        del late[:told]


ROLES = {
    "writer": writer,
    "rank": rank,
    "viewer": viewer,
    "crowd": crowd,
    "parent": parent,
    "forker": forker,
    "metronome": metronome,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
