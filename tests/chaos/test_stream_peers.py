"""A peer that is killed, frozen or restarted under streams, gets and puts: its callers lose the deadline at most, those
of another peer nothing, and what is vouched for is right.

`KVSTORE_TEST_PEER_ROUNDS` says how many rounds each transport has, `KVSTORE_TEST_PEER_SEED` which seed is the first
one's. What calls took at most is logged.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from tests.chaos.blocks import LAYERS, content, keys_of, namespace
from tests.chaos.processes import Puppet
from tests.chaos.sight import is_conserved

TRANSPORTS = ("shm", "tcp")
SPACE = namespace(16 << 10)
ROUNDS = int(os.environ.get("KVSTORE_TEST_PEER_ROUNDS", "7"))
SEED = int(os.environ.get("KVSTORE_TEST_PEER_SEED", "0"))
TIMEOUT_S = 0.5
HEALTHY_TIMEOUT_S = 10.0  # there every call must succeed, however busy the machine is; what they took is logged
OVER_S = 0.1  # what a call may take beyond its deadline, the machine's own delays apart
TTL_S = 0.2  # of the hold of a stream: over before a frozen peer is thawed
RECOVERY_S = 30.0
BLOCKS = 6
PROMPTS = 20_000  # one after another; the peer has room for some 40: slots go from block to block
PAUSE_S = 0.001  # between calls that found nobody there
UNUSED = 0xEE

log = logging.getLogger("tests.chaos.peers")
ResultT = TypeVar("ResultT")
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Call:
    """One call to the SDK."""

    name: str
    began_s: float
    ended_s: float
    timeout_s: float

    @property
    def over_s(self) -> float:
        """Seconds beyond the deadline; negative when it was in time."""
        return self.ended_s - self.began_s - self.timeout_s


class Course:
    """Which prompt a peer's writer is at."""

    def __init__(self) -> None:
        self.prompt = 0


class Caller:
    """A thread that calls until it is stopped, and checks every byte that it is told of."""

    def __init__(self, client: kvstore.Client, seed: int, act: Callable[[Caller], None]) -> None:
        self.client = client
        self.random = np.random.default_rng(seed)
        self.calls: list[Call] = []
        self.errors: list[str] = []
        self.wrong = 0  # slices
        self.right = 0
        self.before = 0  # of them, those before a moment that the test knows
        self.stored = 0  # blocks
        self._act = act
        self._stop = threading.Event()
        self._into = np.full((BLOCKS, SPACE.block_bytes), UNUSED, dtype=np.uint8)
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def timed(self, name: str, call: Callable[[], ResultT]) -> ResultT:
        began_s = time.monotonic()
        try:
            return call()
        finally:
            self.calls.append(Call(name, began_s, time.monotonic(), self.client.timeout_s))

    def keys(self, prompt: int) -> kvstore.BlockKeys:
        return keys_of(self.client, prompt, BLOCKS)

    def fail(self, what: str) -> None:
        """Note that a call brought less than it must, and how long the last ones took."""
        last = ", ".join(f"{call.name} {call.ended_s - call.began_s:.3f} s" for call in self.calls[-6:])
        self.errors.append(f"{what}, at {time.monotonic():.3f}, after {last}")

    def get_into(self, prompt: int) -> NDArray[np.bool_]:
        keys, into = self.keys(prompt), self._fresh()
        expected = _layers(content(keys, SPACE))
        ok = self.timed("get_into", lambda: self.client.get_into(keys, into)).ok
        self._compare(_layers(into), expected, np.broadcast_to(ok, (LAYERS, BLOCKS)))
        into[:] = UNUSED
        return ok

    def stream(self, prompt: int, *, give_up: float = 0.05) -> NDArray[np.bool_]:
        """Wait for each layer, or leave in the middle with this probability; which blocks have the last one."""
        keys, into = self.keys(prompt), self._fresh()
        layers, expected = _layers(into), _layers(content(keys, SPACE))
        stream = self.timed("layer_stream", lambda: self.client.layer_stream(keys, into, ttl_s=TTL_S))
        ok = np.ones(BLOCKS, dtype=np.bool_)
        for layer in stream.layers:
            ok = self.timed("wait", lambda layer=layer: stream.wait(layer))
            self._compare(layers[:, layer : layer + 1], expected[:, layer : layer + 1], ok[None])
            if self.random.random() < give_up / LAYERS:
                break
            if give_up and self.random.random() < 0.005:  # a long computation, which a fault may outlast
                self._stop.wait(self.random.random() * 2 * TIMEOUT_S)
        self.timed("cancel", stream.cancel)
        self._compare(layers, expected, stream.ok)
        into[:] = UNUSED
        return ok

    def put(self, prompt: int) -> int:
        """Blocks that are there afterwards."""
        keys = self.keys(prompt)
        blocks = content(keys, SPACE)
        result = self.timed("put", lambda: self.client.put(keys, blocks))
        self.stored += result.stored
        return result.present

    def delete(self, prompt: int) -> None:
        keys = self.keys(prompt)
        self.timed("delete", lambda: self.client.delete(keys))

    def publish(self, prompt: int) -> None:
        """Write layer by layer; in the end commit, abort, or leave."""
        keys = self.keys(prompt)
        layers = _layers(content(keys, SPACE))
        stream = self.timed("publish_stream", lambda: self.client.publish_stream(keys))
        for layer in range(LAYERS):
            part = np.ascontiguousarray(layers[:, layer])
            self.timed("write", lambda layer=layer, part=part: stream.write(layer, part))
            self._stop.wait(self.random.random() * 0.003)  # as if it computed
        if self.random.random() < 0.7:
            self.stored += self.timed("commit", stream.commit).stored
        else:
            self.timed("abort", stream.abort)

    def _fresh(self) -> U8:
        """Memory to read into. Nobody may have written to it since the last call that used it has ended."""
        if not (self._into == UNUSED).all():
            self.errors.append("memory was written to after the end of the call that it was lent to")
        return self._into

    def _compare(self, got: U8, expected: U8, told: NDArray[np.bool_]) -> None:
        """Compare what is vouched for: bytes of shape (blocks, layers, n), `told` of shape (layers, blocks)."""
        same = (got[told.T] == expected[told.T]).all(axis=1)
        self.wrong += int(np.count_nonzero(~same))
        self.right += int(np.count_nonzero(same))

    def _run(self) -> None:
        try:
            while not self._stop.wait(PAUSE_S):
                self._act(self)
        except Exception as error:  # noqa: BLE001 -- any exception at all is what this looks for
            self.errors.append(repr(error))


def _layers(blocks: U8) -> U8:
    """Blocks as shape (blocks, layers, bytes of a layer)."""
    return blocks.reshape(BLOCKS, LAYERS, -1)


def reading(course: Course) -> Callable[[Caller], None]:
    """What a peer's callers read: what is being written, or was a short while ago."""

    def read(caller: Caller) -> None:
        prompt = (course.prompt + 1 - int(caller.random.geometric(0.6))) % PROMPTS
        (caller.get_into if caller.random.random() < 0.3 else caller.stream)(prompt)

    return read


def writing(course: Course) -> Callable[[Caller], None]:
    """What they write: prompt after prompt, whose blocks take the slots of others that were evicted or deleted."""

    def write(caller: Caller) -> None:
        course.prompt = (course.prompt + 1) % PROMPTS
        (caller.put if caller.random.random() < 0.25 else caller.publish)(course.prompt)
        if caller.random.random() < 0.25:
            caller.delete(course.prompt)

    return write


def rely(caller: Caller) -> None:
    """What callers of the healthy node do: here every call must succeed."""
    prompt = int(caller.random.integers(4))
    if not caller.get_into(prompt).all():
        caller.fail("a get from the healthy node missed")
    if not caller.stream(prompt, give_up=0).all():
        caller.fail("a stream from the healthy node missed")
    caller.delete(9)
    if caller.put(9) != BLOCKS:
        caller.fail("a put to the healthy node failed")


# --- what is done to the peer -----------------------------------------------------------------------------------------


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def frozen(peer: ServerProcess) -> Iterator[None]:
    peer.freeze()
    try:
        yield
    finally:
        peer.thaw()


@contextmanager
def killed(peer: ServerProcess) -> Iterator[None]:
    peer.kill_all()
    yield
    peer.start()


@contextmanager
def restarted(peer: ServerProcess) -> Iterator[None]:
    peer.stop()
    peer.start()
    yield


@contextmanager
def without_shard(peer: ServerProcess) -> Iterator[None]:
    peer.kill_shard()  # the node starts another one by itself
    yield


@contextmanager
def without_workers(peer: ServerProcess) -> Iterator[None]:
    for pid in peer.worker_pids():
        os.kill(pid, signal.SIGKILL)  # and here, too
    yield


HURTS: dict[str, Callable[[ServerProcess], AbstractContextManager[None]]] = {
    "the shard is frozen": lambda peer: stopped([peer.shard_pid()]),
    "the workers of the data port are frozen": lambda peer: stopped(peer.worker_pids()),
    "the whole node is frozen": frozen,
    "all of it is killed": killed,
    "the shard is killed": without_shard,
    "the workers of the data port are killed": without_workers,
    "it is stopped and started again": restarted,
}


@dataclass(slots=True)
class Sum:
    """Of all rounds of a transport."""

    calls: int = 0
    right: int = 0
    over_s: float = -TIMEOUT_S
    longest: str = ""
    healthy_s: float = 0.0

    def add(self, hurt: str, seed: int, callers: Sequence[Caller], healthy: Caller) -> None:
        for caller in callers:
            self.calls += len(caller.calls)
            self.right += caller.right
            for call in caller.calls:
                if call.over_s > self.over_s:
                    self.over_s, self.longest = call.over_s, f"{call.name} when {hurt}, seed {seed}"
        self.healthy_s = max(self.healthy_s, *(call.ended_s - call.began_s for call in healthy.calls))


@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * ROUNDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_callers_of_a_hurt_peer_lose_the_deadline_at_most_those_of_another_nothing_and_no_byte_is_wrong(
    transport: str,
) -> None:
    total, course = Sum(), Course()
    with ExitStack() as stack:
        peer = stack.enter_context(ServerProcess(dram="16MiB"))
        healthy = stack.enter_context(ServerProcess(dram="64MiB"))
        metronome = stack.enter_context(Puppet("metronome"))
        assert metronome.hear() == "ticking"

        def connect(server: ServerProcess, timeout_s: float) -> kvstore.Client:
            client = kvstore.connect(server.address, namespace=SPACE, transport=transport, timeout_s=timeout_s)
            return stack.enter_context(client)

        for server in (peer, healthy):
            server.wait_warm()  # else pages are made while the first calls are timed
        suspicious, relied_on = connect(peer, TIMEOUT_S), connect(healthy, HEALTHY_TIMEOUT_S)
        for prompt in range(4):
            keys = keys_of(relied_on, prompt, BLOCKS)
            blocks = content(keys, SPACE)
            until(lambda keys=keys, blocks=blocks: relied_on.put(keys, blocks).present == BLOCKS, what="a put")
        for number in range(ROUNDS):
            name = list(HURTS)[number % len(HURTS)]
            seed = SEED + number
            callers = [
                Caller(suspicious, 3 * seed, reading(course)),
                Caller(suspicious, 3 * seed + 1, writing(course)),
                Caller(relied_on, 3 * seed + 2, rely),
            ]
            one_round(peer, HURTS[name], callers, seed)
            total.add(name, seed, callers, callers[2])
            metronome.tell()
            judge(f"{transport}, {name}, seed {seed}", callers, metronome.hear())
        until(lambda: is_conserved(peer), RECOVERY_S, "an account that adds up")
    log.info(
        "%s: %d rounds, %d calls, %d slices right; longest call %.3f s beyond its deadline of %g s (%s); "
        "longest call to the healthy node %.3f s",
        transport,
        ROUNDS,
        total.calls,
        total.right,
        total.over_s,
        TIMEOUT_S,
        total.longest,
        total.healthy_s,
    )


@pytest.fixture(params=[0, 1], ids=["named first", "named second"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[list[ServerProcess], int]]:
    """Two nodes that make the same keys, and which of them is to be frozen."""
    with ServerProcess(dram="16MiB", key_seed=7) as first, ServerProcess(dram="16MiB", key_seed=7) as second:
        yield [first, second], request.param


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_call_over_two_nodes_loses_what_the_frozen_one_has_and_nothing_else(
    pair: tuple[list[ServerProcess], int], transport: str
) -> None:
    nodes, victim = pair
    with ExitStack() as stack:

        def connect(*servers: ServerProcess) -> kvstore.Client:
            addresses = [server.address for server in servers]
            client = kvstore.connect(addresses, namespace=SPACE, transport=transport, timeout_s=TIMEOUT_S)
            return stack.enter_context(client)

        getter, putter, healthy = connect(*nodes), connect(*nodes), connect(nodes[1 - victim])
        stored, fresh = keys_of(getter, 1, 32), keys_of(getter, 2, 32)
        for keys in (stored, fresh):
            assert putter.put(keys, content(keys, SPACE)).stored == 32
        kept, theirs = (healthy.lookup(keys).states > 0 for keys in (stored, fresh))
        assert 0 < kept.sum() < 32
        assert putter.delete(fresh) == 32
        into = np.zeros((32, SPACE.block_bytes), dtype=np.uint8)
        with frozen(nodes[victim]):
            ok = getter.get_into(stored, into).ok
            statuses = putter.put(fresh, content(fresh, SPACE)).statuses
        assert ok[kept].all()
        np.testing.assert_array_equal(into[ok], content(stored, SPACE)[ok])
        assert (statuses == np.where(theirs, kvstore.PutStatus.STORED, kvstore.PutStatus.FAILED)).all()


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stream_over_two_nodes_of_which_one_does_not_answer_speaks_of_all_its_blocks(
    pair: tuple[list[ServerProcess], int], transport: str
) -> None:
    nodes, victim = pair
    with ExitStack() as stack:

        def connect(*servers: ServerProcess) -> kvstore.Client:
            addresses = [server.address for server in servers]
            client = kvstore.connect(addresses, namespace=SPACE, transport=transport, timeout_s=TIMEOUT_S)
            return stack.enter_context(client)

        both, healthy = connect(*nodes), connect(nodes[1 - victim])
        keys = keys_of(both, 1, 32)
        blocks = content(keys, SPACE)
        assert both.put(keys, blocks).stored == 32
        kept = healthy.lookup(keys).states > 0
        into = np.zeros_like(blocks)
        with frozen(nodes[victim]), both.layer_stream(keys, into) as stream:
            for layer in stream.layers:
                ok = stream.wait(layer)
                assert ok.shape == (32,)
                assert ok[kept].all()
            assert stream.ok.shape == (LAYERS, 32)
        np.testing.assert_array_equal(into[kept], blocks[kept])


def one_round(
    peer: ServerProcess,
    hurt: Callable[[ServerProcess], AbstractContextManager[None]],
    callers: Sequence[Caller],
    seed: int,
) -> None:
    """Callers at work, the peer hurt for longer than their deadline, and callers at work again."""
    random = np.random.default_rng(seed)
    for caller in callers:
        caller.start()
    try:
        until(lambda: at_work(callers), RECOVERY_S, f"callers at work, seed {seed}")
        begin_s = time.monotonic() + random.random() * 0.02
        until(lambda: time.monotonic() >= begin_s, what="the moment")
        with hurt(peer):
            end_s = time.monotonic() + TIMEOUT_S * (1.2 + random.random())
            until(lambda: time.monotonic() >= end_s, what="the end of the fault")
        for caller in callers:
            caller.before = caller.right + caller.stored
        until(lambda: at_work(callers), RECOVERY_S, f"recovery, seed {seed}")
    finally:
        for caller in callers:
            caller.stop()


def at_work(callers: Sequence[Caller]) -> bool:
    """Whether all of them have read or stored something since `before`; one that met an error never will."""
    return all(caller.errors or caller.right + caller.stored > caller.before for caller in callers)


def judge(what: str, callers: Sequence[Caller], late: Sequence[tuple[float, float]]) -> None:
    """No error, no wrong byte, and no call longer than it may be."""
    for caller in callers:
        assert caller.errors[:3] == [], what
        assert caller.wrong == 0, what
        for call in caller.calls:
            allowed_s = OVER_S + machine_s(call, late)
            assert call.over_s <= allowed_s, f"{what}: {call.name} took {call.over_s:.3f} s beyond its deadline"


def machine_s(call: Call, late: Sequence[tuple[float, float]]) -> float:
    """How long the machine let another process wait that only wanted to wake up, during a call."""
    return sum(max(0.0, min(to, call.ended_s) - max(since, call.began_s)) for since, to in late)
