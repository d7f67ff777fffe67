"""The SSD tier against a dict: stores, late stores, loads of ranges, removes, flushes, evictions, restarts, crashes."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.server.tiers.disk.messages import LoadStatus, StoreStatus
from tests.server.tiers.disk.rig import BOOT, DIGEST, OTHER_DIGEST, Rig, copy_as_it_is, disk_usage, key_of

# Few blocks, so that the same ones meet again; of two namespaces: even and odd numbers.
numbers = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True)
NUMBER_OF = {key_of(number): number for number in range(12)}


class TierMachine(RuleBasedStateMachine):
    """`there` is what must be served; `maybe` is what a crash or an eviction has decided without telling."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="kvs-disk-"))
        self.runs = 0
        self.there: set[int] = set()
        self.maybe: set[int] = set()
        self.removed_at: dict[int, int] = {}  # generation from which on a store counts again

    @initialize(slabs=st.integers(1, 3))
    def start(self, slabs: int) -> None:
        # Slabs of 1 MiB with three slots each: evictions begin at once.
        self.capacity = slabs << 20
        self.folder = self.base / "0"
        self.rig = Rig(self.folder, capacity=self.capacity, layers=5, layer_bytes=60_000)

    @rule(chosen=numbers, odd=st.booleans())
    def store(self, chosen: list[int], odd: bool) -> None:
        self._store(chosen, odd, self.rig.generation)

    @rule(chosen=numbers, odd=st.booleans(), ago=st.integers(1, 3))
    def store_late(self, chosen: list[int], odd: bool, ago: int) -> None:
        self._store(chosen, odd, max(1, self.rig.generation - ago))

    def _store(self, chosen: list[int], odd: bool, generation: int) -> None:
        chosen = [number for number in chosen if number % 2 == odd]
        if not chosen:
            return
        statuses = self.rig.store(chosen, digest=OTHER_DIGEST if odd else DIGEST, generation=generation)
        for number, status in zip(chosen, statuses, strict=True):
            stale = generation < self.removed_at.get(number, 0)
            match status:
                case StoreStatus.STALE:
                    assert stale
                case StoreStatus.EXISTS:
                    assert not stale
                    assert number in self.there | self.maybe
                    self._is_there(number)
                case StoreStatus.DURABLE:
                    assert not stale
                    assert number not in self.there or key_of(number) in self.rig.gone
                    self._is_there(number)
                case StoreStatus.BUSY:  # it was there, and has been evicted for others of the batch
                    assert key_of(number) in self.rig.gone
                case _:
                    assert status == StoreStatus.NO_ROOM
        self._note_gone(just_stored=set(chosen))

    def _is_there(self, number: int) -> None:
        self.there.add(number)
        self.maybe.discard(number)

    def _note_gone(self, just_stored: set[int]) -> None:
        """Evictions: what this very store has brought can't be told from what it has pushed out, so it may be gone."""
        for key in self.rig.gone:
            number = NUMBER_OF[key]
            self.there.discard(number)
            if number in just_stored:
                self.maybe.add(number)
        self.rig.gone.clear()

    @rule(chosen=numbers, layers=st.sampled_from([(0, 0), (0, 1), (1, 3), (4, 5), (0, 4)]))
    def load(self, chosen: list[int], layers: tuple[int, int]) -> None:
        for number, status in zip(chosen, self.rig.load(chosen, layers), strict=True):
            assert status in {LoadStatus.OK, LoadStatus.MISS}
            if status == LoadStatus.OK:
                assert number in self.there | self.maybe
                self._is_there(number)
            else:
                assert number not in self.there
                self.maybe.discard(number)

    @rule(chosen=numbers)
    def remove(self, chosen: list[int]) -> None:
        self.rig.remove(chosen)
        for number in chosen:
            self._is_removed(number)

    @rule(digest=st.sampled_from([DIGEST, OTHER_DIGEST, b""]))
    def flush(self, digest: bytes) -> None:
        self.rig.flush(digest)
        for number in range(12):
            if digest in {b"", OTHER_DIGEST if number % 2 else DIGEST}:
                self._is_removed(number)

    def _is_removed(self, number: int) -> None:
        self.there.discard(number)
        self.maybe.discard(number)
        self.removed_at[number] = self.rig.generation

    @rule(same_boot=st.booleans())
    def restart(self, same_boot: bool) -> None:
        self.rig.close()
        self._open(same_boot)

    @rule(same_boot=st.booleans())
    def crash(self, same_boot: bool) -> None:
        """The folder as it is at this moment, with nobody having closed it."""
        self.rig.settle()
        self.runs += 1
        copy = self.base / str(self.runs)
        copy_as_it_is(self.folder, copy)
        self.rig.close()
        shutil.rmtree(self.folder)
        self.folder = copy
        self._open(same_boot)

    def _open(self, same_boot: bool) -> None:
        generation, boot = self.rig.generation, self.rig.boot
        if not same_boot:
            boot = bytes([boot[0] + 1 if boot[0] < 255 else 0]) + BOOT[1:]
            self.removed_at.clear()
        self.rig = Rig(self.folder, capacity=self.capacity, layers=5, layer_bytes=60_000, boot=boot)
        self.rig.generation = generation
        scanned = {NUMBER_OF[key] for key in self.rig.scanned}
        assert len(scanned) == len(self.rig.scanned)
        assert self.there <= scanned, "a durable block is lost"
        assert scanned <= self.there | self.maybe, "a removed block is back"
        self.there, self.maybe = scanned, set()
        self.rig.gone.clear()

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "rig"):
            return
        stats = self.rig.stats()
        assert stats["disk_bytes"] == disk_usage(self.folder) <= self.capacity
        assert stats["blocks"] >= len(self.there)
        assert stats["failed_reads"] == 0
        assert stats["dying_blocks"] == 0 or not self.rig.tier.idle

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()
        shutil.rmtree(self.base)


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestTier.pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # pyright: ignore[reportAttributeAccessIssue] -- to shrink
