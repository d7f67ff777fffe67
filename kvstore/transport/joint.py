"""The end of a part of a joint block, for writers that leave sums: the data port, and clients over shared memory that
were told to.

Sums are those of whole slices, and no part has one. So the writer whose part is the last one computes them of the bytes
that it finds in the slot. Until it has committed, the slot can't be another block's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.transport.base import Mask
from kvstore.transport.channel import Deadline
from kvstore.transport.trailer import sums_of, write_trailers
from kvstore.wire.frames import Op
from kvstore.wire.messages import Finish

if TYPE_CHECKING:
    from kvstore.transport.shm import LocalSession

I64 = NDArray[np.int64]


def commit_summed(
    session: LocalSession, parts: NDArray[np.void], offsets: I64, layers: int, layer_bytes: int, deadline: Deadline
) -> Mask:
    """Commit parts; for which it came in time, shape (n,). Blocks of which they were the last have their sums then.

    Args:
        session: that reserved them.
        parts: handle and generation of each.
        offsets: of their blocks in the pool, shape (n,).
        layers: of each block.
        layer_bytes: of each layer.
        deadline: of all of it.
    """
    answers = session.finish(parts, deadline)
    done: Mask = answers["status"] == Finish.DONE
    last = np.flatnonzero(answers["status"] == Finish.LAST)
    if len(last):
        pool, size = memoryview(session.shared.pool_read_only), layers * layer_bytes
        with session.channel.kept():
            found = [sums_of(pool[offset : offset + size], layer_bytes) for offset in offsets[last].tolist()]
            sums = np.array(found, dtype=np.uint64)
            write_trailers(session.shared.pool, offsets[last], size, answers["generation"][last], sums)
        done[last] = session.settle(Op.COMMIT, parts[last], deadline)
    return done
