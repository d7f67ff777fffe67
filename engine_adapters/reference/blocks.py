"""Which block of the KV memory belongs to whom, and which blocks still hold a prefix that somebody may want again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 0 to `count` - 1, with reference counts, and the engine's own prefix cache.

    A block is free or referenced. A free block keeps its key, and can be shared again, until it is allocated for
    something else: the one that was released longest ago goes first.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._references = [0] * count
        self._key_of: list[bytes | None] = [None] * count
        self._block_of: dict[bytes, int] = {}
        self._free = OrderedDict.fromkeys(range(count))

    @property
    def free(self) -> int:
        """Blocks that nobody refers to."""
        return len(self._free)

    def references(self, block: int) -> int:
        """How many requests have this block."""
        return self._references[block]

    def allocate(self, count: int) -> list[int] | None:
        """So many blocks for one request, with content that means nothing; None (and nothing done) when there are not
        as many.
        """
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._drop_key(block)
            self._references[block] = 1
        return blocks

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the leading keys that are here, referenced once more."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._free.pop(block, None)
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def register(self, block: int, key: bytes) -> None:
        """From now on the block, which is complete, can be shared by its key; unless another one has that key."""
        if key not in self._block_of:
            self._drop_key(block)
            self._block_of[key], self._key_of[block] = block, key

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each of a request's blocks; the deepest is reused first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._key_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def forget(self) -> None:
        """Drop the prefix cache. Blocks in use stay with who has them."""
        self._block_of.clear()
        self._key_of = [None] * self.count

    def _drop_key(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
