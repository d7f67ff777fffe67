"""The index against a dict, at its limits, and with bad input. Races are in test_races.py."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.core.errors import IndexFull, ProtocolError
from kvstore.core.states import BlockState
from kvstore.index import IndexReader, IndexWriter, Probe, buckets_for, index_bytes
from kvstore.index.layout import Header, Word, home_buckets
from tests.index.tables import insert, keys_of, new_memory, new_table, random_keys

Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """What the model knows of one key."""

    handle: int
    generation: int
    offset: int
    size: int
    state: BlockState
    layers_ready: int


# Few values, so that keys share buckets, tags and all but the fingerprint. The low 32 bits choose a bucket (0, 1, 3 and
# 0 again of four), the highest 16 bits of the second half are the tag; equal halves make both homes the same bucket.
HALVES = [0, 0x0001_0000_4000_0000, 0x7FFF_0000_4000_0001, 0xFFFF_FFFF_FFFF_FFFF, 0x0002_0000_0000_0000]
some_keys = st.tuples(st.sampled_from(HALVES), st.sampled_from(HALVES), st.integers(0, 1))
batches = st.lists(some_keys, min_size=1, max_size=12)
NAMESPACE = 7
LAYERS = 5


class IndexAgainstADict(RuleBasedStateMachine):
    """Every answer of the table is that of a dict, whatever was done to it before."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets = 4
        self.writer, self.reader = new_table(self.buckets)
        self.model: dict[Key, Entry] = {}
        self.generation = 1
        self.probes: list[tuple[list[Key], Probe]] = []

    @initialize(batch=st.lists(some_keys, min_size=1, max_size=30))
    def start_with_some(self, batch: list[Key]) -> None:
        self.insert(batch)

    @rule(batch=batches)
    def more(self, batch: list[Key]) -> None:
        self.insert(batch)

    def insert(self, batch: list[Key]) -> None:
        fresh = [key for key in dict.fromkeys(batch) if key not in self.model]
        used = {entry.handle for entry in self.model.values()}
        handles = [handle for handle in range(len(used) + len(fresh)) if handle not in used][: len(fresh)]
        generations = list(range(self.generation, self.generation + len(fresh)))
        self.generation += len(fresh)
        sizes = [generation % 4000 + 1 for generation in generations]
        try:
            self.writer.insert(
                keys_of(fresh),
                np.array(generations, dtype=np.uint64),
                np.array(generations, dtype=np.int64) * 4096,
                np.array(sizes, dtype=np.int64),
                np.array(handles, dtype=np.int64),
                NAMESPACE,
                LAYERS,
            )
        except IndexFull:
            return  # the model keeps none of the batch: nothing may be half done
        for key, handle, generation, size in zip(fresh, handles, generations, sizes, strict=True):
            self.model[key] = Entry(handle, generation, generation * 4096, size, BlockState.RESERVED, 0)

    @rule(batch=batches, layers_ready=st.integers(0, LAYERS), state=st.sampled_from([1, 2]))
    def set_status(self, batch: list[Key], layers_ready: int, state: int) -> None:
        chosen = [key for key in dict.fromkeys(batch) if key in self.model]
        handles = np.array([self.model[key].handle for key in chosen], dtype=np.int64)
        self.writer.set_status(handles, BlockState(state), layers_ready)
        for key in chosen:
            self.model[key] = replace(self.model[key], state=BlockState(state), layers_ready=layers_ready)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=3, unique=True))
        self.writer.remove(np.array([self.model.pop(key).handle for key in chosen], dtype=np.int64))

    @rule(batch=batches)
    def probe(self, batch: list[Key]) -> None:
        """One key and many take different paths, and so do batches where all keys are found; all agree with the
        model, duplicates and all.
        """
        self.probes.append((batch, self.check(batch)))
        for row in range(len(batch)):
            self.check(batch[row : row + 1])
            self.check(batch[row : row + 2])

    @rule()
    def ask_whether_probed_entries_still_stand(self) -> None:
        for batch, probe in self.probes:
            rows = np.flatnonzero(probe.positions >= 0)
            standing = self.reader.unchanged(probe, rows)
            for row, stands in zip(rows.tolist(), standing.tolist(), strict=True):
                now = self.model.get(batch[row])
                generation = int(probe.generations[row])
                # A moved entry may be reported as changed, a changed one never as standing.
                assert not stands or (now is not None and now.generation == generation)

    @precondition(lambda self: self.buckets < 64)
    @rule()
    def grow(self) -> None:
        self.buckets *= 2
        writer, reader = new_table(self.buckets)
        self.writer.move_to(writer)
        assert self.reader.retired
        self.writer, self.reader, self.probes = writer, reader, []

    @invariant()
    def the_table_holds_what_the_dict_holds(self) -> None:
        assert self.writer.resident == self.reader.resident == len(self.model)
        entries = self.writer.all_entries()
        words = [Word.KEY_HI, Word.KEY_LO, Word.FINGERPRINT]
        assert sorted((hi, lo, fp) for hi, lo, fp in entries[:, words].tolist()) == sorted(self.model)
        if self.model:
            self.check(list(self.model))

    def check(self, batch: list[Key]) -> Probe:
        probe = self.reader.probe(keys_of(batch))
        for row, key in enumerate(batch):
            entry = self.model.get(key)
            if entry is None:
                assert probe.positions[row] == -1
                assert not probe.entries[row].any()
                continue
            assert tuple(probe.entries[row, :3].tolist()) == key
            assert probe.generations[row] == entry.generation
            assert (probe.offsets[row], probe.sizes[row]) == (entry.offset, entry.size)
            assert (probe.handles[row], probe.layers[row]) == (entry.handle, LAYERS)
            assert (probe.states[row], probe.layers_ready[row]) == (entry.state, entry.layers_ready)
            assert probe.namespaces[row] == NAMESPACE
        found = np.flatnonzero(probe.positions >= 0)
        assert self.reader.unchanged(probe, found).all()
        return probe


TestIndexAgainstADict = IndexAgainstADict.TestCase
TestIndexAgainstADict.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestIndexAgainstADict.pytestmark = [pytest.mark.timeout(600)]  # pyright: ignore[reportAttributeAccessIssue] -- to shrink


def test_an_absent_key_beside_one_whose_two_homes_are_the_same_bucket_stays_absent() -> None:
    """The shrunk example of what the machine above once found: the second key's entry was the answer for both."""
    writer, reader = new_table(4)
    double, absent = (0, 0, 0), (0, 0x7FFF_0000_4000_0001, 0)
    insert(writer, keys_of([double]))
    assert reader.probe(keys_of([double, absent])).positions.tolist()[1] == -1
    assert reader.probe(keys_of([absent, double])).positions.tolist()[0] == -1


def test_a_key_with_another_fingerprint_is_a_miss() -> None:
    """A forged or accidental collision of the 16 key bytes."""
    writer, reader = new_table(16)
    insert(writer, keys_of([(5, 6, 7)]))
    assert reader.probe(keys_of([(5, 6, 7), (5, 6, 8)])).positions.tolist()[1] == -1
    assert reader.probe(keys_of([(5, 6, 8)])).positions.tolist() == [-1]


def test_keys_that_differ_in_the_fingerprint_alone_live_side_by_side() -> None:
    writer, reader = new_table(16)
    keys = keys_of([(5, 6, fp) for fp in range(8)])
    generations = insert(writer, keys)
    assert reader.probe(keys).generations.tolist() == generations.tolist()
    assert [int(reader.probe(keys[row : row + 1]).generations[0]) for row in range(8)] == generations.tolist()


def test_a_table_takes_85_percent_of_its_slots_before_it_is_full() -> None:
    buckets = 512
    writer, reader = new_table(buckets)
    keys = random_keys(int(writer.slots * 0.85), seed=1)
    done = 0
    for size in np.random.default_rng(2).integers(1, 200, size=len(keys)).tolist():
        batch = keys[done : done + size]
        insert(writer, batch, first_handle=done, first_generation=done + 1)
        done += len(batch)
    assert reader.probe(keys).generations.tolist() == list(range(1, len(keys) + 1))


def test_a_full_table_is_an_error_that_leaves_nothing_behind() -> None:
    writer, reader = new_table(4)
    # All these keys live in the first bucket alone: eight have a place, and no other entry can move aside for more.
    keys = keys_of([(0, 0, fp) for fp in range(12)])
    insert(writer, keys[:6])
    before = writer.all_entries().tolist()
    with pytest.raises(IndexFull, match="6 entries in 32 slots"):
        insert(writer, keys[6:10], first_handle=6, first_generation=7)
    assert writer.all_entries().tolist() == before
    assert writer.resident == 6
    assert reader.probe(keys).positions.tolist()[6:] == [-1] * 6
    insert(writer, keys[6:8], first_handle=6, first_generation=20)
    assert reader.probe(keys).generations.tolist() == [1, 2, 3, 4, 5, 6, 20, 21, 0, 0, 0, 0]


def test_filling_a_small_table_to_the_brim_ends_in_an_error_and_every_entry_stays_findable() -> None:
    writer, reader = new_table(8)
    keys = random_keys(200, seed=3)
    held = 0
    try:
        for held in range(len(keys)):
            insert(writer, keys[held : held + 1], first_handle=held, first_generation=held + 1)
    except IndexFull:
        pass
    assert writer.resident == held
    assert held >= 0.8 * writer.slots
    assert reader.probe(keys).generations.tolist() == [*range(1, held + 1), *[0] * (len(keys) - held)]


def test_a_larger_table_takes_over_every_entry_and_points_readers_of_the_old_one_away() -> None:
    writer, reader = new_table(buckets_for(1000))
    keys = random_keys(1000, seed=4)
    generations = insert(writer, keys)
    writer.set_status(np.arange(0, 1000, 2), BlockState.COMMITTED, 2)
    larger, larger_reader = new_table(buckets_for(5000))
    assert not reader.retired
    writer.move_to(larger)
    assert reader.retired
    assert not larger_reader.retired
    found = larger_reader.probe(keys)
    assert found.generations.tolist() == generations.tolist()
    assert found.states.tolist() == [BlockState.COMMITTED, BlockState.RESERVED] * 500
    larger.remove(np.arange(1000))
    assert larger.resident == 0


def test_a_removed_block_no_longer_stands_and_neither_does_its_successor_in_the_same_place() -> None:
    writer, reader = new_table(4)
    keys = keys_of([(0, 0, 1)])
    insert(writer, keys)
    seen = reader.probe(keys)
    assert reader.unchanged(seen, np.array([0])).all()
    writer.remove(np.array([0]))
    assert not reader.unchanged(seen, np.array([0])).any()
    insert(writer, keys, first_generation=2)
    assert reader.probe(keys).positions.tolist() == seen.positions.tolist()
    assert not reader.unchanged(seen, np.array([0])).any()


def test_a_state_or_watermark_that_moves_on_leaves_the_entry_standing() -> None:
    writer, reader = new_table(4)
    keys = keys_of([(0, 0, 1), (1, 1, 1)])
    insert(writer, keys)
    seen = reader.probe(keys)
    writer.set_status(np.array([0, 1]), BlockState.RESERVED, np.array([1, 2]))
    assert reader.probe(keys).layers_ready.tolist() == [1, 2]
    writer.set_status(np.array([0]), BlockState.COMMITTED, 2)
    assert reader.unchanged(seen, np.array([0, 1])).all()


def test_readable_means_this_namespace_this_size_and_layers_that_have_arrived() -> None:
    writer, reader = new_table(16)
    keys = keys_of([(1, 1, 1), (2, 2, 2), (3, 3, 3)])
    handles = np.arange(3)
    sizes = np.array([10, 10, 20])
    writer.insert(keys, np.array([1, 2, 3], dtype=np.uint64), handles * 4096, sizes, handles, namespace=4, layers=3)
    writer.set_status(np.array([0]), BlockState.COMMITTED, 3)
    writer.set_status(np.array([1]), BlockState.RESERVED, 2)
    found = reader.probe(keys)
    assert found.readable(4, 2, 10).tolist() == [True, True, False]
    assert found.readable(4, 3, 10).tolist() == [True, False, False]
    assert found.readable(5, 1, 10).tolist() == [False, False, False]
    assert found.states_in(5).tolist() == [0, 0, 0]


def test_no_keys_is_a_question_too() -> None:
    writer, reader = new_table(4)
    insert(writer, keys_of([]))
    assert len(reader.probe(keys_of([])).positions) == 0


def test_an_entry_costs_at_most_128_bytes_at_the_load_that_tables_are_made_for() -> None:
    assert index_bytes(buckets_for(1_000_000)) / 1_000_000 <= 128


def test_both_homes_of_random_keys_spread_evenly() -> None:
    keys = random_keys(40_000, seed=5)
    for side in home_buckets(keys.view(np.uint64).reshape(-1, 3), 100).T:
        counts = np.bincount(side, minlength=100)
        assert counts.min() > 300
        assert counts.max() < 500


@pytest.mark.parametrize(
    ("word", "value", "message"), [(Header.MAGIC, 1, "wrong magic"), (Header.VERSION, 99, "has version 99")]
)
def test_memory_that_is_no_index_of_this_version_is_refused(word: int, value: int, message: str) -> None:
    memory = new_memory(4)
    IndexWriter(memory, 4, handles=1)
    memory.view(np.uint64)[word] = value
    with pytest.raises(ProtocolError, match=message):
        IndexReader(memory)


def test_memory_too_small_for_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match="too small for 8 buckets"):
        IndexWriter(new_memory(4), 8, handles=1)
