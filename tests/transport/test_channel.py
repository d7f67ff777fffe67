"""Requests over a socket: whatever the chunks, never longer than the deadline, and one error kind for each fault."""

from __future__ import annotations

import array
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import (
    BlockTooLarge,
    DeadlineExceeded,
    KvStoreError,
    NamespaceMismatch,
    ProtocolError,
    Unavailable,
    UsageError,
)
from kvstore.transport.channel import Channel, Deadline, Stream
from kvstore.transport.shm import connect_local
from kvstore.wire.frames import HEADER_BYTES, FrameReader, Op, Status, encode

SHORT_S = 0.3
LONG_S = 20.0
SLACK_S = 1.0  # for a machine with few cores and much to do
Peer = Callable[[socket.socket], None]


@contextmanager
def channel_to(peer: Peer) -> Iterator[Channel]:
    """A channel whose other end is served by `peer` in a thread."""
    near, far = socket.socketpair()

    def serve() -> None:
        with far:
            peer(far)

    thread = threading.Thread(target=serve)
    thread.start()
    with closing(Channel(Stream(near, "the peer"))) as channel:
        yield channel
    thread.join()


def requests(sock: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """Operation, request number and body of each request until the other side leaves."""
    reader = FrameReader()
    while data := sock.recv(1 << 16):
        for frame, body in reader.feed(data):
            yield frame.op, frame.request, body


def until_it_leaves(sock: socket.socket) -> None:
    while sock.recv(1 << 16):
        pass


def echo(sock: socket.socket) -> None:
    for op, request, body in requests(sock):
        sock.sendall(encode(op, request, body))


def answer_with(data: Callable[[int, int], bytes]) -> Peer:
    """A peer that answers one request with these bytes and waits for the end."""

    def peer(sock: socket.socket) -> None:
        op, request, _ = next(requests(sock))
        sock.sendall(data(op, request))
        until_it_leaves(sock)

    return peer


def took(call: Callable[[], object], kind: type[KvStoreError]) -> float:
    """Seconds until the call raised that."""
    started_s = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return time.monotonic() - started_s


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=8), cuts=st.lists(st.integers(1, 4000), max_size=12))
def test_a_stream_delivers_what_was_sent_whatever_the_chunks(sizes: list[int], cuts: list[int]) -> None:
    parts = [os.urandom(size) for size in sizes]
    stream = b"".join(parts)
    near, far = socket.socketpair()
    with closing(Stream(near, "near")) as sender, closing(Stream(far, "far")) as receiver:
        sender.send(parts, Deadline(LONG_S))
        received = b""
        for cut in [*cuts, len(stream)]:
            received += receiver.receive(min(cut, len(stream) - len(received)), Deadline(LONG_S))
        assert received == stream


def test_more_than_any_buffer_holds_goes_through_while_the_other_side_reads_slowly() -> None:
    sent = os.urandom(5 << 20)
    received = bytearray()

    def read_slowly(sock: socket.socket) -> None:
        while data := sock.recv(30_000):
            received.extend(data)

    with channel_to(read_slowly) as channel:
        channel.stream.send([sent[:100], memoryview(sent)[100:]], Deadline(LONG_S))
    assert received == sent


def test_a_reply_that_comes_byte_by_byte_is_put_together() -> None:
    def drip(sock: socket.socket) -> None:
        op, request, body = next(requests(sock))
        for byte in encode(op, request, body * 20):
            sock.sendall(bytes([byte]))
        until_it_leaves(sock)

    with channel_to(drip) as channel:
        assert channel.call(Op.LOOKUP, b"abc", Deadline(LONG_S)) == b"abc" * 20


def test_a_silent_peer_costs_the_deadline_and_the_channel() -> None:
    with channel_to(until_it_leaves) as channel:
        assert (
            SHORT_S
            <= took(lambda: channel.call(Op.STATS, b"", Deadline(SHORT_S)), DeadlineExceeded)
            < SHORT_S + SLACK_S
        )
        assert not channel.usable
        assert took(lambda: channel.call(Op.STATS, b"", Deadline(LONG_S)), Unavailable) < SLACK_S


def test_a_peer_that_keeps_sending_a_little_can_not_stretch_the_deadline() -> None:
    def drip(sock: socket.socket) -> None:
        op, request, _ = next(requests(sock))
        data = encode(op, request, bytes(1000))
        sock.settimeout(0.02)
        for byte in data:
            try:
                sock.sendall(bytes([byte]))
                if not sock.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return

    with channel_to(drip) as channel:
        assert took(lambda: channel.call(Op.STATS, b"", Deadline(SHORT_S)), DeadlineExceeded) < SHORT_S + SLACK_S


def test_a_peer_that_does_not_read_costs_the_deadline() -> None:
    done = threading.Event()

    def read_nothing(_: socket.socket) -> None:
        done.wait(LONG_S)

    with channel_to(read_nothing) as channel:
        spent_s = took(lambda: channel.stream.send([bytes(64 << 20)], Deadline(SHORT_S)), DeadlineExceeded)
        assert spent_s < SHORT_S + SLACK_S
        done.set()


def test_a_deadline_that_has_passed_is_noticed_before_anything_is_sent() -> None:
    with channel_to(echo) as channel, pytest.raises(DeadlineExceeded):
        channel.call(Op.STATS, b"", Deadline(0))


@pytest.mark.parametrize("cut", [0, 10, HEADER_BYTES, HEADER_BYTES + 3])
def test_a_peer_that_leaves_in_the_middle_of_a_reply_is_unavailable(cut: int) -> None:
    def leave(sock: socket.socket) -> None:
        op, request, _ = next(requests(sock))
        sock.sendall(encode(op, request, bytes(10))[:cut])

    with channel_to(leave) as channel:
        assert took(lambda: channel.call(Op.STATS, b"", Deadline(LONG_S)), Unavailable) < SLACK_S
        assert not channel.usable


def test_a_channel_notices_that_its_peer_has_left_without_asking() -> None:
    with channel_to(lambda _: None) as channel:
        deadline = Deadline(LONG_S)
        while channel.usable:
            deadline.check("the end")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (Status.BAD_REQUEST, UsageError),
        (Status.NAMESPACE_MISMATCH, NamespaceMismatch),
        (Status.TOO_LARGE, BlockTooLarge),
    ],
)
def test_a_refusal_is_the_callers_error_with_the_peers_words_and_the_channel_goes_on(
    status: Status, kind: type[KvStoreError]
) -> None:
    def refuse_once(sock: socket.socket) -> None:
        for number, (op, request, body) in enumerate(requests(sock)):
            sock.sendall(encode(op, request, body if number else b"because", status=0 if number else status))

    with channel_to(refuse_once) as channel:
        with pytest.raises(kind, match="because"):
            channel.call(Op.OPEN, b"", Deadline(LONG_S))
        assert channel.call(Op.OPEN, b"x", Deadline(LONG_S)) == b"x"


@pytest.mark.parametrize("status", [Status.UNAUTHENTICATED, Status.BUSY])
def test_a_peer_that_takes_nobody_now_is_unavailable(status: Status) -> None:
    peer = answer_with(lambda op, request: encode(op, request, b"later", status=status))
    with channel_to(peer) as channel, pytest.raises(Unavailable, match="later"):
        channel.call(Op.HELLO, b"", Deadline(LONG_S))


BROKEN: dict[str, Callable[[int, int], bytes]] = {
    "another request": lambda op, request: encode(op, request + 1, b""),
    "another operation": lambda op, request: encode(op + 1, request, b""),
    "more than a reply": lambda op, request: encode(op, request, b"") + b"more",
    "payload": lambda op, request: encode(op, request, b"", payload_bytes=5),
    "no frame": lambda op, request: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "unknown status": lambda op, request: encode(op, request, b"?", status=99),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_reply_that_breaks_the_rules_ends_the_channel(case: str) -> None:
    with channel_to(answer_with(BROKEN[case])) as channel:
        with pytest.raises(ProtocolError):
            channel.call(Op.STATS, b"", Deadline(LONG_S))
        assert not channel.usable


def test_requests_of_many_threads_each_get_their_own_reply() -> None:
    with channel_to(echo) as channel:

        def work(number: int) -> bool:
            text = str(number).encode() * (number % 50)
            return channel.usable and channel.call(Op.LOOKUP, text, Deadline(LONG_S)) == text

        with ThreadPoolExecutor(16) as threads:
            assert all(threads.map(work, range(800)))


def test_a_request_that_waits_for_others_is_bounded_and_costs_them_nothing() -> None:
    proceed = threading.Event()

    def slow(sock: socket.socket) -> None:
        for op, request, body in requests(sock):
            proceed.wait(LONG_S)
            sock.sendall(encode(op, request, body))

    with channel_to(slow) as channel, ThreadPoolExecutor(1) as threads:
        first = threads.submit(channel.call, Op.STATS, b"first", Deadline(LONG_S))
        waiting_s = took(
            lambda: [channel.call(Op.STATS, b"second", Deadline(SHORT_S)) for _ in range(2)], DeadlineExceeded
        )
        assert waiting_s < 2 * SHORT_S + SLACK_S
        proceed.set()
        assert first.result() == b"first"


def test_a_request_without_a_reply_leaves_the_channel_in_order() -> None:
    def count(sock: socket.socket) -> None:
        quiet = 0
        for op, request, _ in requests(sock):
            if op == Op.RELEASE:
                quiet += 1
            else:
                sock.sendall(encode(op, request, bytes([quiet])))

    with channel_to(count) as channel:
        for _ in range(3):
            channel.post(Op.RELEASE, b"", Deadline(LONG_S))
        assert channel.call(Op.STATS, b"", Deadline(LONG_S)) == b"\x03"


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_that_come_with_a_broken_reply_are_closed() -> None:
    def send_fds(sock: socket.socket) -> None:
        op, request, _ = next(requests(sock))
        with open(os.devnull) as file:  # noqa: PTH123 -- a descriptor is what is wanted
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 3))]
            sock.sendmsg([encode(op, request + 1, b"")], rights)
        until_it_leaves(sock)

    def attach(channel: Channel) -> None:
        with channel.exchange(Deadline(LONG_S)) as exchange:
            exchange.send(Op.ATTACH, b"")
            exchange.reply_with_fds(4)

    before = open_descriptors()
    with channel_to(send_fds) as channel, pytest.raises(ProtocolError):
        attach(channel)
    assert open_descriptors() == before


def test_a_local_socket_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"local shard /nowhere/s.sock: No such file"):
        connect_local("/nowhere/s.sock", Deadline(LONG_S))
