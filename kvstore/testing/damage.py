"""Faulty memory: bytes of stored blocks that change in a running server's pools, behind everybody's back."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from kvstore.core.states import BlockState
from kvstore.index.layout import HEADER_BYTES, POOL_UNIT_BYTES, Header, Table, Word
from kvstore.testing.cluster import ServerProcess
from kvstore.transport.memory import POOL_START_BYTES

_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
_STATE_MASK = np.uint64(0xFF)


def damage_blocks(server: ServerProcess, shard: int = 0) -> int:
    """Flip bits in the first, the middle and the last byte of every complete block of a shard; how many blocks.

    Needs to be the user that started the server. Readers notice only where checksums are in use.
    """
    pid = server.shard_pid(shard)
    entries = _entries(pid)
    committed = entries[(entries[:, Word.STATUS] & _STATE_MASK) == np.uint64(BlockState.COMMITTED)]
    locations = committed[:, Word.LOCATION]
    starts = POOL_START_BYTES + (locations & _LOW32).astype(np.int64) * POOL_UNIT_BYTES
    sizes = (locations >> _SHIFT32).astype(np.int64)
    pool = os.open(_descriptor(pid, f"kvstore-pool-{shard}"), os.O_RDWR)
    try:
        for place in np.concatenate([starts, starts + sizes // 2, starts + sizes - 1]).tolist():
            os.pwrite(pool, bytes([os.pread(pool, 1, place)[0] ^ 0x5A]), place)
    finally:
        os.close(pool)
    return len(committed)


def _entries(pid: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    memory = np.fromfile(_descriptor(pid, "kvstore-index"), dtype=np.uint8)
    header = memory[:HEADER_BYTES].view(np.uint64)
    return Table(memory, int(header[Header.BUCKETS])).entries


def _descriptor(pid: int, name: str) -> Path:
    """The newest memory of that name that a process has open."""
    links = sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda link: int(link.name))
    return [link for link in links if str(link.readlink()).startswith(f"/memfd:{name} ")][-1]
