"""The direct file really moves the bytes that it is timed for."""

from pathlib import Path

import numpy as np
import pytest

from kvbench.direct import DirectFile
from kvbench.memory import U8, arena
from kvstore.core.errors import UsageError

BLOCK_BYTES = 64 << 10
BLOCKS = 8


@pytest.fixture
def memory() -> U8:
    rows = arena(BLOCKS * BLOCK_BYTES).reshape(BLOCKS, BLOCK_BYTES)
    rows[:] = np.random.default_rng(1).integers(0, 256, rows.shape, dtype=np.uint8)
    return rows


def test_it_begins_with_everything_written(tmp_path: Path, memory: U8) -> None:
    file = DirectFile(tmp_path / "limit", memory)
    expected = memory.tobytes()
    assert (tmp_path / "limit").read_bytes() == expected
    file.close()
    assert not (tmp_path / "limit").exists()


def test_each_block_is_written_to_its_own_place_and_read_from_there(tmp_path: Path, memory: U8) -> None:
    file = DirectFile(tmp_path / "limit", memory)
    before = memory.copy()
    memory[2:4] ^= 0xFF
    assert file.write([2, 3]) > 0
    written = memory.copy()
    memory[:] = 0
    assert file.read(range(BLOCKS)) > 0
    assert np.array_equal(memory, written)
    assert not np.array_equal(memory, before)
    file.close()


def test_writing_and_reading_at_the_same_time_does_both(tmp_path: Path, memory: U8) -> None:
    file = DirectFile(tmp_path / "limit", memory)
    first = memory[0] ^ 0xFF
    last = memory[7].copy()
    memory[0], memory[7] = first, 0
    assert file.write_and_read([0], [7]) > 0
    assert np.array_equal(memory[7], last)
    memory[0] = 0
    file.read([0])
    assert np.array_equal(memory[0], first)
    file.close()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, memory: U8) -> None:
    with pytest.raises(UsageError, match=f"^--dir {tmp_path / 'no'}: .*allowed: "):
        DirectFile(tmp_path / "no" / "limit", memory)
