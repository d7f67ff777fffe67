"""Reading the block index from any process: vectorised, lock-free, without a call to the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ProtocolError
from kvstore.core.states import BlockState, Tier
from kvstore.index.layout import (
    CHECK_FACTOR_INTS,
    I64,
    MAGIC,
    POOL_UNIT_BYTES,
    SLOTS_PER_BUCKET,
    U64,
    VERSION,
    Header,
    Table,
    Word,
    checksum,
    home_buckets,
    tags_of,
)

_COMMITTED = int(BlockState.COMMITTED)
_RESERVED = int(BlockState.RESERVED)
_TORN_RETRIES = 8  # an entry is half written for well under a microsecond; after this many looks it reads as a miss
_MASK64 = (1 << 64) - 1
_MASK32 = np.uint64(0xFFFFFFFF)
_SHIFT8 = np.uint64(8)
_SHIFT16 = np.uint64(16)
_SHIFT32 = np.uint64(32)
_SHIFT48 = np.uint64(48)
_STATE_MASK = np.uint64(0xFF)
_PLACE_MASK = np.uint64(0xFFFF)  # state and tier
_ON_DISK = _COMMITTED | int(Tier.DISK) << 8
_LOADING = _COMMITTED | int(Tier.LOADING) << 8
_LAYERS_MASK = np.uint64(0xFFFF)


@dataclass(frozen=True, slots=True)
class Probe:
    """What the index said about n keys. Rows of absent keys are zero, and their position is -1."""

    entries: U64  # (n, 8), `Word` names the columns
    positions: I64  # (n,), place in the table, for `IndexReader.unchanged`

    def take(self, rows: I64) -> Probe:
        """Some of the keys."""
        return Probe(self.entries[rows], self.positions[rows])

    @property
    def states(self) -> NDArray[np.uint8]:
        """`BlockState` of each key, shape (n,)."""
        return (self.entries[:, Word.STATUS] & _STATE_MASK).astype(np.uint8)

    @property
    def tiers(self) -> NDArray[np.uint8]:
        """`Tier` of each key, shape (n,); DRAM for those that are absent."""
        return ((self.entries[:, Word.STATUS] & _PLACE_MASK) >> _SHIFT8).astype(np.uint8)

    @property
    def layers_ready(self) -> NDArray[np.uint16]:
        """Layers that may be read already, shape (n,)."""
        return ((self.entries[:, Word.STATUS] >> _SHIFT16) & _LAYERS_MASK).astype(np.uint16)

    @property
    def generations(self) -> U64:
        """Generation of each entry, shape (n,)."""
        return self.entries[:, Word.GENERATION]

    @property
    def offsets(self) -> I64:
        """Byte offset of each block in the pool, shape (n,)."""
        return ((self.entries[:, Word.LOCATION] & _MASK32) * np.uint64(POOL_UNIT_BYTES)).astype(np.int64)

    @property
    def sizes(self) -> I64:
        """Payload bytes of each block, shape (n,)."""
        return (self.entries[:, Word.LOCATION] >> _SHIFT32).astype(np.int64)

    @property
    def handles(self) -> I64:
        """The shard's dense number of each block, shape (n,)."""
        return (self.entries[:, Word.META] & _MASK32).astype(np.int64)

    @property
    def layers(self) -> NDArray[np.uint16]:
        """Layers of each block, shape (n,)."""
        return (self.entries[:, Word.META] >> _SHIFT48).astype(np.uint16)

    @property
    def namespaces(self) -> NDArray[np.uint16]:
        """Number of the namespace that each block was stored in, shape (n,)."""
        return ((self.entries[:, Word.META] >> _SHIFT32) & _LAYERS_MASK).astype(np.uint16)

    def states_in(self, namespace: int) -> NDArray[np.uint8]:
        """`BlockState` of each key as that namespace sees it: what another one stored under the key is absent here."""
        return np.where(self.namespaces == namespace, self.states, np.uint8(BlockState.ABSENT))

    def readable(self, namespace: int, layers_end: int, size_bytes: int) -> NDArray[np.bool_]:
        """Which blocks of that namespace and size hold their first `layers_end` layers in the pool: the committed ones,
        and those that a writer or the SSD has brought that far.
        """
        entries = self.entries
        place = entries[:, Word.STATUS] & _PLACE_MASK
        ready = place == _COMMITTED  # in DRAM, whose number is 0
        if not ready.all():
            ready |= ((place == _RESERVED) | (place == _LOADING)) & (self.layers_ready >= layers_end)
        ready &= (entries[:, Word.LOCATION] >> _SHIFT32) == size_bytes
        ready &= ((entries[:, Word.META] >> _SHIFT32) & _LAYERS_MASK) == namespace
        return ready

    def on_disk(self, namespace: int, size_bytes: int) -> NDArray[np.bool_]:
        """Which blocks of that namespace and size are on the SSD, and not yet back as a whole."""
        entries = self.entries
        place = entries[:, Word.STATUS] & _PLACE_MASK
        cold = (place == _ON_DISK) | (place == _LOADING)
        cold &= (entries[:, Word.LOCATION] >> _SHIFT32) == size_bytes
        cold &= ((entries[:, Word.META] >> _SHIFT32) & _LAYERS_MASK) == namespace
        return cold

    @property
    def loading(self) -> NDArray[np.bool_]:
        """Which blocks are on their way from the SSD, into a place in the pool that they already have. Shape (n,)."""
        return (self.entries[:, Word.STATUS] & _PLACE_MASK) == _LOADING


class Entry(NamedTuple):
    """One block as the index has it, in plain integers; `IndexReader.find` gives it."""

    position: int
    words: list[int]

    @property
    def offset(self) -> int:
        """Byte offset of the block in the pool."""
        return (self.words[Word.LOCATION] & 0xFFFFFFFF) * POOL_UNIT_BYTES

    @property
    def handle(self) -> int:
        """The shard's dense number of the block."""
        return self.words[Word.META] & 0xFFFFFFFF

    @property
    def on_disk(self) -> bool:
        """As `Probe.on_disk`."""
        return self.words[Word.STATUS] & 0xFFFF in (_ON_DISK, _LOADING)

    def readable(self, namespace: int, layers_end: int, size_bytes: int) -> bool:
        """As `Probe.readable`."""
        _, _, _, _, location, meta, status, _ = self.words
        place = status & 0xFFFF
        ready = place == _COMMITTED or (place in (_RESERVED, _LOADING) and (status >> 16) & 0xFFFF >= layers_end)
        return ready and location >> 32 == size_bytes and (meta >> 32) & 0xFFFF == namespace


class IndexReader:
    """A view of the index in shared memory. Any number of readers, in any process; none of them ever waits.

    Args:
        memory: the index segment, mapped read-only or read-write, uint8.

    Raises:
        ProtocolError: the memory is no index, or one of another version.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        header = memory[:64].view(np.uint64)
        if int(header[Header.MAGIC]) != MAGIC:
            raise ProtocolError("the shared index has a wrong magic number: not a kvstore index")
        if int(header[Header.VERSION]) != VERSION:
            raise ProtocolError(
                f"the shared index has version {int(header[Header.VERSION])}; this client reads {VERSION}"
            )
        self._table = Table(memory, int(header[Header.BUCKETS]))

    @property
    def retired(self) -> bool:
        """True once a larger table has taken over: attach again, every probe here would be out of date."""
        return bool(self._table.header[Header.RETIRED])

    @property
    def resident(self) -> int:
        """Entries in use."""
        return int(self._table.header[Header.RESIDENT])

    @property
    def warm_bytes(self) -> int:
        """Bytes of the pool, from its start, whose pages are present."""
        return int(self._table.header[Header.WARM])

    def probe(self, keys: NDArray[np.void]) -> Probe:
        """Look up n keys (`KEY_DTYPE`, shape (n,)). Key and fingerprint must both match."""
        if len(keys) == 1:
            entry = self.find(*keys.item(0))
            if entry is None:
                return Probe(np.zeros((1, 8), dtype=np.uint64), np.full(1, -1, dtype=np.int64))
            return Probe(np.array([entry.words], dtype=np.uint64), np.array([entry.position], dtype=np.int64))
        moves = self._table.header[Header.MOVES]
        found = self._probe_many(keys)
        if self._table.header[Header.MOVES] != moves:
            # An entry that changed place while we looked can be missed in both buckets. Once more is enough: a key is
            # moved only when its bucket is full, so the same key moving again within microseconds reads as a miss.
            missing = np.flatnonzero(found.positions < 0)
            again = self._probe_many(keys[missing])
            found.entries[missing] = again.entries
            found.positions[missing] = again.positions
        return found

    def unchanged(self, probe: Probe, rows: I64) -> NDArray[np.bool_]:
        """Whether the entries of these rows still stand. Ask after copying: True means the bytes copied were theirs."""
        now = np.take(self._table.entries, probe.positions[rows], axis=0)
        generations = probe.generations[rows]
        status = now[:, Word.STATUS]
        return (
            (now[:, Word.GENERATION] == generations)
            & ((status >> _SHIFT32) == (generations & _MASK32))
            & ((status & _STATE_MASK) != 0)
        )

    def _probe_many(self, keys: NDArray[np.void]) -> Probe:
        table = self._table
        count = len(keys)
        words = keys.view(np.uint64).reshape(count, 3)
        homes = home_buckets(words, table.buckets).reshape(-1)
        lines = np.take(table.tag_lines, homes).view(np.uint16).reshape(count, 2 * SLOTS_PER_BUCKET)
        candidates = np.flatnonzero(lines == tags_of(words[:, 1])[:, None])
        rows = candidates >> 4
        places = (homes[candidates >> 3] << 3) + (candidates & 7)
        found: Probe | None = None
        for _ in range(_TORN_RETRIES):
            seen = np.take(table.entries, places, axis=0)
            wanted = words[rows]
            status = seen[:, Word.STATUS]
            whole = checksum(seen) == seen[:, Word.CHECK]
            whole &= (status >> _SHIFT32) == (seen[:, Word.GENERATION] & _MASK32)
            good = whole & (seen[:, Word.KEY_HI] == wanted[:, 0]) & (seen[:, Word.KEY_LO] == wanted[:, 1])
            good &= seen[:, Word.FINGERPRINT] == wanted[:, 2]
            good &= (status & _STATE_MASK) != 0
            if found is None:
                if len(rows) == count and good.all() and (rows[1:] != rows[:-1]).all():
                    return Probe(seen, places)  # the usual case: every key is here once, and no tag matched by chance
                found = Probe(np.zeros((count, 8), dtype=np.uint64), np.full(count, -1, dtype=np.int64))
            found.entries[rows[good]] = seen[good]
            found.positions[rows[good]] = places[good]
            # A torn entry may be one whose key has not arrived yet, so every torn candidate is looked at again.
            if whole.all():
                break
            rows, places = rows[~whole], places[~whole]
        assert found is not None
        return found

    def find(self, hi: int, lo: int, fingerprint: int) -> Entry | None:
        """One key, in plain integers: numpy's fixed cost per step would be most of the time."""
        table = self._table
        tag = lo >> 48 | 1
        words = table.words
        for _ in range(_TORN_RETRIES):
            torn = False
            moves = table.header[Header.MOVES]
            for half in (lo, hi):
                bucket = ((half & 0xFFFFFFFF) * table.buckets) >> 32
                line: list[int] = table.tags[bucket].tolist()
                if tag not in line:
                    continue
                for slot in range(SLOTS_PER_BUCKET):
                    if line[slot] != tag:
                        continue
                    position = bucket * SLOTS_PER_BUCKET + slot
                    entry = words[position * 8 : position * 8 + 8].tolist()
                    if not _is_whole(entry):
                        torn = True
                    elif entry[0] == hi and entry[1] == lo and entry[2] == fingerprint and entry[6] & 0xFF:
                        return Entry(position, entry)
            if not torn and moves == table.header[Header.MOVES]:
                break
        return None

    def stands(self, entry: Entry) -> bool:
        """As `unchanged`, for an entry of `find`."""
        words = self._table.words
        at = entry.position * 8
        generation = entry.words[Word.GENERATION]
        status = words[at + Word.STATUS]
        return (
            words[at + Word.GENERATION] == generation
            and status >> 32 == generation & 0xFFFFFFFF
            and status & 0xFF != BlockState.ABSENT
        )


def _is_whole(entry: list[int]) -> bool:
    total = 0
    for word, factor in zip(entry[:6], CHECK_FACTOR_INTS, strict=True):
        total += word * factor
    return total & _MASK64 == entry[7] and entry[6] >> 32 == entry[3] & 0xFFFFFFFF
