"""A link of limited bandwidth in front of a node, without privileges: a TCP relay with a token bucket.

    python -m kvstore.testing.relay HOST:PORT BYTES_PER_S

prints the address to connect to, and carries on until it is terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc

from kvstore.wire._pb import control_pb2 as pb
from kvstore.wire.control import AUTHORIZATION

TURN_S = 0.001  # a chunk is what the link carries in so long
CHUNK_BYTES_MIN = 4 * 1024
CHUNK_BYTES_MAX = 256 * 1024
BURST_S = 0.002  # what a link that was idle sends at once
CALL_TIMEOUT_S = 5.0


class Relay:
    """Stands between clients and one node. A context manager.

    What the node's data port sends is limited, all connections together; what clients send is not. Connect to `address`
    with `transport="tcp"`: on the same host a client would take shared memory.

    Args:
        address: of the node's control port, `"host:port"`.
        bytes_per_s: the limit; it may be changed at any time.
    """

    def __init__(self, address: str, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.carried_bytes = 0
        self._changed = threading.Condition()
        self._free_s = 0.0  # when the link has sent what it was given
        self._left: int | None = None  # bytes until it stalls
        self._sockets: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._control = _Control(address, self._listener.getsockname()[1])
        self._grpc = grpc.server(ThreadPoolExecutor(2, thread_name_prefix="relay-control"))
        self._grpc.add_generic_rpc_handlers((self._control,))
        self.address = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"

    def stall_after(self, size_bytes: int) -> None:
        """Carry so many bytes more, then nothing, until `resume`."""
        with self._changed:
            self._left = size_bytes

    def resume(self) -> None:
        """Carry on."""
        with self._changed:
            self._left = None
            self._changed.notify_all()

    @property
    def stalled(self) -> bool:
        """Whether it has carried all that it may."""
        return self._left == 0

    def cut(self) -> None:
        """Reset all connections, as when the node's machine is gone; new ones are taken."""
        with self._changed:
            sockets, self._sockets = self._sockets, set()
        for connection in sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End. Idempotent."""
        self._closed = True
        self._grpc.stop(None).wait()
        self._control.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        self.cut()
        self.resume()

    def __enter__(self) -> Relay:
        self._grpc.start()
        threading.Thread(target=self._accept, name="relay", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="relay", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One connection, until either side ends it."""
        with client, contextlib.suppress(OSError):
            assert self._control.data_address is not None, "a client says HELLO first"
            with socket.create_connection(self._control.data_address, CALL_TIMEOUT_S) as node:
                node.settimeout(None)
                for connection in (client, node):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._changed:
                    self._sockets |= {client, node}
                upwards = threading.Thread(target=self._carry, args=(client, node, False), name="relay", daemon=True)
                upwards.start()
                self._carry(node, client, True)
                upwards.join()
                with self._changed:
                    self._sockets -= {client, node}

    def _carry(self, source: socket.socket, sink: socket.socket, limited: bool) -> None:
        chunk = memoryview(bytearray(CHUNK_BYTES_MAX))
        with contextlib.suppress(OSError):
            while size := source.recv_into(chunk, self._turn_bytes() if limited else CHUNK_BYTES_MAX):
                if not limited:
                    sink.sendall(chunk[:size])
                elif not self._pass(chunk[:size], sink):
                    break
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _turn_bytes(self) -> int:
        return min(max(int(self.bytes_per_s * TURN_S), CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)

    def _pass(self, chunk: memoryview, sink: socket.socket) -> bool:
        """Send a chunk when its time has come; False when the relay was closed meanwhile."""
        while chunk:
            allowed = self._allowed(len(chunk))
            if not allowed:
                return False
            self._wait_turn(allowed)
            sink.sendall(chunk[:allowed])
            chunk = chunk[allowed:]
        return True

    def _allowed(self, size: int) -> int:
        """How much of it may go before the link stalls; waits while that is nothing. 0 when the relay is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._left != 0)
            if self._closed:
                return 0
            allowed = size if self._left is None else min(size, self._left)
            self._left = None if self._left is None else self._left - allowed
            return allowed

    def _wait_turn(self, size: int) -> None:
        with self._changed:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s - BURST_S) + size / self.bytes_per_s
            wait_s = self._free_s - now_s
            self.carried_bytes += size
        if wait_s > 0:
            time.sleep(wait_s)


class _Control(grpc.GenericRpcHandler):
    """Passes every call on to the node; HELLO's answer names the relay's port in place of the node's data port."""

    def __init__(self, address: str, port: int) -> None:
        self._host = address.rpartition(":")[0].strip("[]")
        self._port = port
        self._channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self.data_address: tuple[str, int] | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        """One call, its messages as bytes."""
        method = handler_call_details.method
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(method)

        def forward(request: bytes, context: grpc.ServicerContext) -> bytes:
            shown = tuple((name, value) for name, value in context.invocation_metadata() if name == AUTHORIZATION)
            try:
                answer = call(request, timeout=CALL_TIMEOUT_S, metadata=shown)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details() or "")
            return self._renamed(answer) if method.endswith("/Hello") else answer

        return grpc.unary_unary_rpc_method_handler(forward)

    def close(self) -> None:
        """Let go of the node."""
        self._channel.close()

    def _renamed(self, answer: bytes) -> bytes:
        reply = pb.HelloReply.FromString(answer)
        self.data_address = (reply.data_host or self._host, reply.data_port)
        reply.data_host, reply.data_port = "127.0.0.1", self._port
        return reply.SerializeToString()


def main() -> None:
    """One relay, until the process is terminated."""
    parser = argparse.ArgumentParser(prog="relay", description="A link of limited bandwidth in front of a node.")
    parser.add_argument("address", help="of the node's control port, host:port")
    parser.add_argument("bytes_per_s", type=float, help="what its data port may send")
    arguments = parser.parse_args()
    if not arguments.bytes_per_s > 0:
        parser.error(f"bytes_per_s {arguments.bytes_per_s}: allowed is above 0")
    with Relay(arguments.address, arguments.bytes_per_s) as relay:
        sys.stdout.write(f"{relay.address}\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main()
