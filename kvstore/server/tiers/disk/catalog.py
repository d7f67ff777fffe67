"""The durable index, in RocksDB: which block lies where, its checksums, the namespaces, and what was deleted.

```
m                      JSON: format version, slab bytes, whether the last owner closed it
n ‖ digest             namespace: number u32, incarnation u32, layers u32, layer bytes u64, JSON: tenant, label
b ‖ ~sequence (BE)     block: key, location u64, size, namespace, incarnation, layers u32, layers x sum u64
t ‖ what               barrier: boot 16, generation u64, sequence u64; `what` is a key, a digest, or empty for all
```

Blocks are sorted newest first, which is the order of the scan after a restart. A row counts only while its incarnation
is the namespace's: one small write makes a whole namespace disappear for good.

RocksDB appends without syncing, and `sync` makes the log durable itself: `rocksdict` holds the GIL in every call, and
would stop all threads of the process for the whole of a disk flush (docs/adr/0007-ssd-tier.md).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    WriteBatch,
)

from kvstore.core.errors import ConfigError
from kvstore.core.keys import KEY_DTYPE
from kvstore.server.tiers.disk.files import sync_folder

log = logging.getLogger("kvstore")

U64 = NDArray[np.uint64]
FORMAT: Final = 2
ROW = np.dtype(
    [
        ("key", KEY_DTYPE),
        ("location", "<u8"),
        ("size", "<u4"),
        ("namespace", "<u4"),
        ("incarnation", "<u4"),
        ("layers", "<u4"),
    ]
)
_ROW_BYTES = ROW.itemsize
_NAMESPACE = struct.Struct("<IIIQ")
_BARRIER = struct.Struct("<16sQQ")
_META, _NAMESPACES, _BLOCKS, _BARRIERS = b"m", b"n", b"b", b"t"
_SEQUENCE_MAX: Final = (1 << 64) - 1
# The machine's troubles, not the folder's: what was durable is served again when they have passed. RocksDB tells its
# reasons as text only.
_PASSING: Final = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EACCES,
    errno.EROFS,
    errno.ENOLCK,  # somebody else has it open
)
_MEMTABLE_BYTES = 8 << 20
_CACHE_BYTES = 16 << 20
_OPEN_FILES_MAX = 64


class CatalogDamagedError(Exception):
    """RocksDB can't open or read its files."""


class CatalogUnwritableError(OSError):
    """RocksDB refused a write: the disk is full, or worse."""


@dataclass(slots=True)
class NamespaceRow:
    """A namespace on this disk."""

    number: int
    incarnation: int
    layers: int
    layer_bytes: int
    tenant: str  # whose quota its blocks count on
    label: str  # for people


@dataclass(frozen=True, slots=True)
class Barrier:
    """What was removed: blocks that were written under a generation before this one, and rows before this sequence."""

    boot: bytes  # 16 bytes; generations of another boot say nothing
    generation: int
    sequence: int


@dataclass(slots=True)
class Meta:
    """What holds for the whole folder."""

    slab_bytes: int
    clean: bool = False  # the last owner closed it, so its newest blocks need no second look


class Batch:
    """Changes that become durable together."""

    def __init__(self) -> None:
        self.changes = WriteBatch(raw_mode=True)

    def put_blocks(self, rows: NDArray[np.void], sequences: U64, sums: Sequence[bytes]) -> None:
        """Add n blocks: ROW (n,), their sequences (n,), and the bytes of their sums."""
        put = self.changes.put
        raw = rows.tobytes()
        for at, (sequence, tail) in enumerate(zip(sequences.tolist(), sums, strict=True)):
            put(_block_key(sequence), raw[at * _ROW_BYTES : (at + 1) * _ROW_BYTES] + tail)

    def delete_blocks(self, sequences: U64) -> None:
        """Take blocks out."""
        for sequence in sequences.tolist():
            self.changes.delete(_block_key(sequence))

    def put_namespace(self, digest: bytes, row: NamespaceRow) -> None:
        """Add or change a namespace."""
        value = _NAMESPACE.pack(row.number, row.incarnation, row.layers, row.layer_bytes)
        names = json.dumps({"tenant": row.tenant, "label": row.label})
        self.changes.put(_NAMESPACES + digest, value + names.encode())

    def put_barrier(self, what: bytes, barrier: Barrier) -> None:
        """Remember that something was removed."""
        self.changes.put(_BARRIERS + what, _BARRIER.pack(barrier.boot, barrier.generation, barrier.sequence))

    def delete_barrier(self, what: bytes) -> None:
        """Forget a barrier."""
        self.changes.delete(_BARRIERS + what)


class Catalog:
    """Reads are the owner's; `write` and `sync` may run in another thread, one at a time.

    Raises:
        CatalogDamagedError: the folder can't be opened.
        ConfigError: not now, for a reason that lies outside of it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reopening = threading.Lock()
        self._logs: dict[str, int] = {}  # RocksDB's logs, open for syncing
        try:
            self._db = Rdict(str(folder), _options())
        except Exception as cause:
            if any(os.strerror(number) in str(cause) for number in _PASSING):
                raise ConfigError(f"disk tier: {cause}") from cause
            raise CatalogDamagedError(str(cause)) from cause

    def meta(self) -> Meta | None:
        """None in a new catalog.

        Raises:
            CatalogDamagedError: unreadable, or of another format.
        """
        raw = self._get(_META)
        if raw is None:
            return None
        try:
            values = json.loads(raw)
            if values["format"] != FORMAT:
                raise CatalogDamagedError(f"format {values['format']}, not {FORMAT}")
            return Meta(slab_bytes=int(values["slab_bytes"]), clean=bool(values["clean"]))
        except (ValueError, KeyError, TypeError) as cause:
            raise CatalogDamagedError("its first row is not readable") from cause

    def put_meta(self, meta: Meta) -> None:
        """Write and sync it."""
        batch = Batch()
        values = {"format": FORMAT, "slab_bytes": meta.slab_bytes, "clean": meta.clean}
        batch.changes.put(_META, json.dumps(values).encode())
        self.write(batch)
        self.sync()

    def namespaces(self) -> dict[bytes, NamespaceRow]:
        """All of them, by digest."""
        return {name[1:]: _namespace(value) for name, value in self._rows(_NAMESPACES)}

    def barriers(self) -> dict[bytes, Barrier]:
        """All of them, by what was removed."""
        return {name[1:]: Barrier(*_unpack(_BARRIER, value)) for name, value in self._rows(_BARRIERS)}

    def newest_sequence(self) -> int:
        """Of the block that was stored last; 0 without any.

        Raises:
            CatalogDamagedError: RocksDB found damage.
        """
        for _, sequences in self.blocks(1):
            return int(sequences[0])
        return 0

    def blocks(self, count: int) -> Iterator[tuple[NDArray[np.void], U64]]:
        """Every block as it is now, newest first, in pieces of up to `count`: ROW (n,) and sequences (n,).

        Raises:
            CatalogDamagedError: RocksDB found damage on the way.
        """
        names: list[bytes] = []
        values: list[bytes] = []
        for name, value in self._rows(_BLOCKS):
            if len(value) < _ROW_BYTES:
                raise CatalogDamagedError("a block's row is too short")
            names.append(name[1:])
            values.append(value[:_ROW_BYTES])
            if len(names) == count:
                yield _decoded(names, values)
                names, values = [], []
        if names:
            yield _decoded(names, values)

    def sums(self, sequences: U64) -> list[bytes | None]:
        """The bytes of each block's sums; None for one without a row.

        Raises:
            CatalogDamagedError: RocksDB found damage.
        """
        found = self._get([_block_key(sequence) for sequence in sequences.tolist()])
        return [None if value is None else value[_ROW_BYTES:] for value in cast("list[bytes | None]", found)]

    def write(self, batch: Batch) -> None:
        """Apply a batch; durable after `sync`.

        Raises:
            CatalogUnwritableError: RocksDB refuses.
        """
        try:
            self._db.write(batch.changes)
        except Exception as cause:
            raise CatalogUnwritableError(str(cause)) from cause

    def sync(self) -> None:
        """Make every write so far durable.

        A log that RocksDB has removed meanwhile is covered: its content is in a table file, which RocksDB syncs itself.

        Raises:
            OSError: the disk's own.
        """
        present = {entry.name for entry in os.scandir(self._folder) if entry.name.endswith(".log")}
        for name in self._logs.keys() - present:
            os.close(self._logs.pop(name))
        for name in sorted(present - self._logs.keys()):
            try:
                self._logs[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            sync_folder(self._folder)
        for fd in self._logs.values():
            os.fdatasync(fd)

    def reopen(self) -> None:
        """After a refused write RocksDB takes no more until it is opened again.

        Raises:
            CatalogUnwritableError: it still does not go.
        """
        with self._reopening:
            try:
                self._db.close()
                self._db = Rdict(str(self._folder), _options())
            except Exception as cause:
                raise CatalogUnwritableError(str(cause)) from cause

    def close(self) -> None:
        """Close the database."""
        for fd in self._logs.values():
            os.close(fd)
        self._logs.clear()
        self._db.close()

    def _get(self, name: bytes | list[bytes]) -> Any:
        with self._reopening:
            try:
                return self._db.get(cast("Any", name))
            except Exception as cause:
                raise CatalogDamagedError(str(cause)) from cause

    def _rows(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        rows = self._db.iter()
        try:
            rows.seek(prefix)
            while rows.valid():
                name = rows.key()
                if not name.startswith(prefix):
                    break
                yield name, rows.value()
                rows.next()
            rows.status()  # the end, or damage
        except Exception as cause:
            raise CatalogDamagedError(str(cause)) from cause
        finally:
            del rows  # it keeps the database open, and this frame lives as long as the exception


@dataclass(frozen=True, slots=True)
class Opened:
    """A catalog and what is read of it at once."""

    catalog: Catalog
    meta: Meta | None = None  # None: it is new
    namespaces: dict[bytes, NamespaceRow] = field(default_factory=dict[bytes, NamespaceRow])
    barriers: dict[bytes, Barrier] = field(default_factory=dict[bytes, Barrier])
    newest_sequence: int = 0


def open_or_set_aside(folder: Path) -> Opened:
    """The catalog in a folder. A damaged one is moved aside, and a new one starts empty; one line says so."""
    try:
        catalog = Catalog(folder)
        try:
            meta = catalog.meta()
            if meta is None:
                return Opened(catalog)
            return Opened(catalog, meta, catalog.namespaces(), catalog.barriers(), catalog.newest_sequence())
        except CatalogDamagedError:
            catalog.close()
            raise
    except CatalogDamagedError as error:
        set_aside(folder, error)
        return Opened(Catalog(folder))


def set_aside(folder: Path, damage: Exception) -> None:
    """Keep a damaged catalog for a person to look at, in place of the one before."""
    aside = folder.with_name(folder.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    log.error("%s is damaged (%s); moved to %s, the tier starts empty", folder, damage, aside.name)


def _namespace(value: bytes) -> NamespaceRow:
    numbers = _unpack(_NAMESPACE, value[: _NAMESPACE.size])
    try:
        names = json.loads(value[_NAMESPACE.size :])
        return NamespaceRow(*numbers, tenant=str(names["tenant"]), label=str(names["label"]))
    except (ValueError, KeyError, TypeError) as cause:
        raise CatalogDamagedError("a namespace's names are not readable") from cause


def _unpack(row: struct.Struct, value: bytes) -> tuple[Any, ...]:
    if len(value) != row.size:
        raise CatalogDamagedError(f"a row of {len(value)} bytes, not {row.size}")
    return row.unpack(value)


def _block_key(sequence: int) -> bytes:
    return _BLOCKS + (_SEQUENCE_MAX - sequence).to_bytes(8, "big")


def _decoded(names: list[bytes], values: list[bytes]) -> tuple[NDArray[np.void], U64]:
    sequences = _SEQUENCE_MAX - np.frombuffer(b"".join(names), dtype=">u8").astype(np.uint64)
    return np.frombuffer(b"".join(values), dtype=ROW), sequences


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())  # keys and sums are random bytes
    options.set_write_buffer_size(_MEMTABLE_BYTES)
    options.set_max_open_files(_OPEN_FILES_MAX)
    options.set_keep_log_file_num(2)
    options.set_paranoid_checks(True)
    # A log damaged anywhere but at its torn end would bring back what was deleted after the damage: refuse it.
    options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    tables = BlockBasedOptions()
    tables.set_block_cache(Cache(_CACHE_BYTES))
    options.set_block_based_table_factory(tables)
    return options
