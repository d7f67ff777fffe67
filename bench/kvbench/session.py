"""One side of the transfer benchmark, inside its own process: a writer that puts, or a reader that reads what it put.

The same session serves both roles; the parent decides which commands it sends to which process. Every command names the
`Group` it belongs to, and block ids say what each place holds now (see `kvbench.content`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

import kvstore
from kvbench.content import Content
from kvbench.errors import BenchError
from kvbench.limits import MemcpyLimit, SocketLimit
from kvbench.memory import arena, open_shared
from kvbench.plan import Case, Group, Op, Transport
from kvbench.sampling import Samples, Timed, alternate
from kvstore.core.keys import BlockKeys
from kvstore.core.layout import OpaqueLayout
from kvstore.core.states import PutStatus

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]

BLOCK_TOKENS: Final = 16
_SETUP_BATCH: Final = 64
_WHOLE_EVERY: Final = (
    8  # turns: each page's stamp is checked on every turn, each byte on the first round and every 8th turn
)
_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What measuring one case gave."""

    samples: Samples
    damaged: int  # blocks that were read wrong
    compared: int  # blocks whose stamps or bytes were compared
    ids: I64  # the block id at each place afterwards, shape (blocks,)


@dataclass(frozen=True, slots=True)
class SessionSetup:
    """What a session needs; picklable.

    Args:
        address: the server's.
        run_id: sets the keys of this run apart from all others on the same server.
        far_path: the shared arena that memcpy limits copy from or to.
        arena_bytes: size of each arena.
        raw_port: the raw-socket peer's; None where no socket limit applies.
        connections: of the socket limit.
    """

    address: str
    run_id: str
    seed: int
    far_path: str
    arena_bytes: int
    raw_port: int | None
    connections: int

    @contextmanager
    def open(self) -> Iterator[Session]:
        """The session, its clients closed afterwards."""
        session = Session(self)
        try:
            yield session
        finally:
            session.leave()


class Session:
    """Clients, arenas and content of one process."""

    def __init__(self, setup: SessionSetup) -> None:
        self.setup = setup
        self.mine = arena(setup.arena_bytes)  # what the store reads from or writes into
        self.near = arena(setup.arena_bytes)  # the same for the limit, so that the two never warm each other's cache
        self.far = open_shared(setup.far_path, writable=True)
        self._scene: Scene | None = None

    def scene(self, group: Group) -> Scene:
        """The group's scene; the one before is left."""
        if self._scene is None or self._scene.group != group:
            self.leave()
            self._scene = Scene(self.setup, group, self.mine)
        return self._scene

    def leave(self) -> None:
        """Close the clients of the current group."""
        if self._scene is not None:
            self._scene.close()
        self._scene = None


class Scene:
    """One group of cases: its namespace, keys, content, rows of the arena, and a client per transport."""

    def __init__(self, setup: SessionSetup, group: Group, mine: U8) -> None:
        self.group = group
        self.content = Content(setup.seed, group.block_bytes, group.blocks)
        self.rows = mine[: group.blocks * group.block_bytes].reshape(group.blocks, group.block_bytes)
        self._address = setup.address
        self._namespace = kvstore.Namespace(
            model="kvbench",
            revision=f"seed-{setup.seed}",
            dtype="uint8",
            block_tokens=BLOCK_TOKENS,
            layout=OpaqueLayout("kvbench", group.layers, group.block_bytes // group.layers),
            tenant=setup.run_id.encode(),
        )
        self._clients: dict[Transport, kvstore.Client] = {}
        self._keys: BlockKeys | None = None

    def client(self, transport: Transport) -> kvstore.Client:
        """A connected client that uses this transport only."""
        if transport not in self._clients:
            self._clients[transport] = kvstore.connect(
                self._address, namespace=self._namespace, timeout_s=_TIMEOUT_S, transport=transport.value
            )
        return self._clients[transport]

    def keys(self, ids: I64, transport: Transport) -> BlockKeys:
        """Keys of these block ids: two versions of every place, chained like two prompts' would be."""
        keys = self._keys
        if keys is None:
            tokens = np.arange(2 * self.group.blocks * BLOCK_TOKENS, dtype=np.int32)
            self._keys = keys = self.client(transport).keys(tokens)
        return BlockKeys(keys.array[ids])

    def places(self, batch: int, turn: int) -> slice:
        """The batch of places that this turn uses."""
        first = turn % (self.group.blocks // batch) * batch
        return slice(first, first + batch)

    def close(self) -> None:
        """Close the clients."""
        for client in self._clients.values():
            client.close()


@dataclass(frozen=True, slots=True)
class Fill:
    """Write version 0 of every place, untimed. Answers the block ids."""

    group: Group
    transport: Transport

    def run(self, session: Session, /) -> I64:
        scene = session.scene(self.group)
        ids = np.arange(self.group.blocks, dtype=np.int64)
        scene.content.fill(scene.rows, ids)
        for part in _parts(self.group.blocks):
            _put(scene, self.transport, ids[part], scene.rows[part])
        return ids


@dataclass(frozen=True, slots=True)
class Clear:
    """Delete these blocks."""

    group: Group
    transport: Transport
    ids: I64

    def run(self, session: Session, /) -> None:
        scene = session.scene(self.group)
        client = scene.client(self.transport)
        for part in _parts(len(self.ids)):
            client.delete(scene.keys(self.ids[part], self.transport))


@dataclass(frozen=True, slots=True)
class Verify:
    """Read every place back and compare every byte. Answers how many blocks are wrong."""

    group: Group
    transport: Transport
    ids: I64

    def run(self, session: Session, /) -> int:
        scene = session.scene(self.group)
        client = scene.client(self.transport)
        damaged = 0
        for part in _parts(self.group.blocks):
            rows = scene.rows[part]
            scene.content.blot(rows)
            _require_all(Op.GET_INTO, client.get_into(scene.keys(self.ids[part], self.transport), rows).ok)
            damaged += len(scene.content.damaged(rows, self.ids[part], whole=True))
        return damaged


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure one case beside its limit. `ids` says what each place holds before."""

    group: Group
    case: Case
    ids: I64
    seconds: float

    def run(self, session: Session, /) -> Measured:
        scene = session.scene(self.group)
        task = _TASKS[self.case.op](scene, self.case, self.ids)
        with _limit(session, self.group, self.case) as limit:
            samples = alternate(task, limit, seconds=self.seconds)
        return Measured(samples, task.damaged, task.compared, task.ids)


class Task(ABC):
    """One operation, callable with the turn; only what is between the two clock readings is timed."""

    def __init__(self, scene: Scene, case: Case, ids: I64) -> None:
        self.scene = scene
        self.case = case
        self.client = scene.client(case.transport)
        self.ids = ids.copy()
        self.damaged = 0
        self.compared = 0

    @abstractmethod
    def __call__(self, turn: int) -> float:
        """Do it once; seconds of the timed part. Each operation is a class of its own below."""

    def check(self, rows: U8 | Sequence[U8], ids: I64, turn: int) -> None:
        """Compare what was read: every page's stamp, and every byte in the first round and every 8th turn."""
        first_round = turn < self.scene.group.blocks // self.case.batch
        self.damaged += len(self.scene.content.damaged(rows, ids, whole=first_round or turn % _WHOLE_EVERY == 0))
        self.compared += len(ids)


class PutTask(Task):
    """Puts keys that are absent, so that each put really writes; the reader process compares the bytes afterwards.

    Places alternate between two versions: the old version's keys are deleted and the source is stamped, both untimed.
    """

    def __init__(self, scene: Scene, case: Case, ids: I64) -> None:
        super().__init__(scene, case, ids)
        # The bodies are there since `Fill`. Stamped one round ahead: the timed put must not find the stamps in a cache.
        scene.content.stamp(scene.rows, self._other(self.ids))

    def __call__(self, turn: int) -> float:
        scene = self.scene
        places = scene.places(self.case.batch, turn)
        old = self.ids[places].copy()
        new = self._other(old)
        keys = scene.keys(new, self.case.transport)
        rows = scene.rows[places]
        self.client.delete(scene.keys(old, self.case.transport))
        begin = time.perf_counter()
        result = self.client.put(keys, rows)
        took = time.perf_counter() - begin
        _require_stored(result.statuses)
        self.ids[places] = new
        scene.content.stamp(rows, old)
        return took

    def _other(self, ids: I64) -> I64:
        """The other version of each id's place."""
        blocks = self.scene.group.blocks
        return np.where(ids < blocks, ids + blocks, ids - blocks)


class GetIntoTask(Task):
    """Reads into rows of this process's arena."""

    def __call__(self, turn: int) -> float:
        scene = self.scene
        places = scene.places(self.case.batch, turn)
        keys = scene.keys(self.ids[places], self.case.transport)
        rows = scene.rows[places]
        begin = time.perf_counter()
        result = self.client.get_into(keys, rows)
        took = time.perf_counter() - begin
        _require_all(self.case.op, result.ok)
        self.check(rows, self.ids[places], turn)
        scene.content.blot(rows)
        return took


class GetTask(Task):
    """Reads into memory that the client allocates."""

    def __call__(self, turn: int) -> float:
        places = self.scene.places(self.case.batch, turn)
        keys = self.scene.keys(self.ids[places], self.case.transport)
        begin = time.perf_counter()
        result = self.client.get(keys)
        took = time.perf_counter() - begin
        _require_all(self.case.op, result.ok)
        self.check([block for block in result.blocks if block is not None], self.ids[places], turn)
        return took


class ViewTask(Task):
    """Takes a lease, touches every block's array, and gives the lease back; comparing happens in between, untimed."""

    def __call__(self, turn: int) -> float:
        places = self.scene.places(self.case.batch, turn)
        keys = self.scene.keys(self.ids[places], self.case.transport)
        begin = time.perf_counter()
        view = self.client.view(keys)
        with view:
            blocks = [view[row] for row in range(len(view))]
            taken = time.perf_counter()
            present = [block for block in blocks if block is not None]
            _require_all(self.case.op, np.array([block is not None for block in blocks]))
            self.check(present, self.ids[places], turn)
            view.check()
            del blocks, present
            release = time.perf_counter()
        return taken - begin + time.perf_counter() - release


_TASKS: Final[dict[Op, type[Task]]] = {Op.PUT: PutTask, Op.GET: GetTask, Op.GET_INTO: GetIntoTask, Op.VIEW: ViewTask}


@contextmanager
def _limit(session: Session, group: Group, case: Case) -> Iterator[Timed | None]:
    """What the case is compared with: nothing for a view, which moves no bytes."""
    if case.op is Op.VIEW:
        yield None
    elif case.transport is Transport.SHM:
        near, far = session.near, session.far
        source, destination = (near, far) if case.op is Op.PUT else (far, near)
        yield MemcpyLimit(source, destination, block_bytes=group.block_bytes, blocks=group.blocks, batch=case.batch)
    elif session.setup.raw_port is None:
        yield None
    else:
        limit = SocketLimit(
            session.setup.raw_port,
            session.near,
            block_bytes=group.block_bytes,
            blocks=group.blocks,
            batch=case.batch,
            connections=session.setup.connections,
            upload=case.op is Op.PUT,
        )
        try:
            yield limit
        finally:
            limit.close()


def _put(scene: Scene, transport: Transport, ids: I64, rows: U8) -> None:
    _require_stored(scene.client(transport).put(scene.keys(ids, transport), rows).statuses)


def _require_stored(statuses: NDArray[np.uint8]) -> None:
    if not (statuses == PutStatus.STORED).all():
        names = sorted({PutStatus(int(status)).name for status in statuses} - {PutStatus.STORED.name})
        stored = int((statuses == PutStatus.STORED).sum())
        raise BenchError(
            f"a put stored {stored} of {len(statuses)} blocks ({', '.join(names)}): give the server more --dram"
        )


def _require_all(op: Op, ok: NDArray[np.bool_]) -> None:
    if not ok.all():
        raise BenchError(f"{op} found {int(ok.sum())} of {len(ok)} blocks: give the server more --dram")


def _parts(count: int) -> list[slice]:
    return [slice(first, min(first + _SETUP_BATCH, count)) for first in range(0, count, _SETUP_BATCH)]
