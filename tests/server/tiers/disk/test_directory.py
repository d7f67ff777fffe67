"""The directory of blocks on disk behaves like a dict, also when hashes collide."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.keys import KEY_DTYPE
from kvstore.server.tiers.disk.directory import Directory, Life

# Few home places, so that chains of collisions and traces of removed keys are common.
numbers = st.sets(st.integers(0, 60), max_size=40)


def keys_of(chosen: list[int]) -> np.ndarray:
    keys = np.zeros(len(chosen), KEY_DTYPE)
    keys["hi"] = chosen
    keys["lo"] = [number % 3 for number in chosen]
    return keys


@given(st.lists(st.tuples(st.booleans(), numbers), max_size=30))
@settings(deadline=None)
def test_a_directory_is_a_dict_of_handles(steps: list[tuple[bool, set[int]]]) -> None:
    directory = Directory()
    model: dict[int, int] = {}
    for adding, chosen in steps:
        if adding:
            fresh = sorted(chosen - model.keys())
            places = np.array(fresh, dtype=np.int64) * 4096
            handles = directory.add(keys_of(fresh), places, 7, 1, np.array(fresh, dtype=np.uint64))
            assert not set(handles.tolist()) & set(model.values())
            model |= dict(zip(fresh, handles.tolist(), strict=True))
        else:
            going = sorted(chosen & model.keys())
            handles = np.array([model.pop(number) for number in going], dtype=np.int64)
            directory.unlink(handles)
            directory.give_back(handles)
        found = directory.find(keys_of(list(range(61))))
        assert found.tolist() == [model.get(number, -1) for number in range(61)]
        assert len(directory) == len(model)
        living = np.array(sorted(model.values()), dtype=np.int64)
        assert sorted(directory.select(Life.WRITING).tolist()) == living.tolist()
        assert sorted((directory.locations(living) // 4096).tolist()) == sorted(model)
        assert sorted(directory.keys(living)["hi"].tolist()) == sorted(model)


def test_a_directory_grows_and_forgets_what_was_removed() -> None:
    directory = Directory()
    random = np.random.default_rng(3)
    for round_number in range(20):
        keys = random.integers(0, 1 << 63, (10_000, 3), dtype=np.uint64).view(KEY_DTYPE).reshape(-1)
        handles = directory.add(keys, np.arange(10_000) * 4096, 1, 1, np.arange(10_000, dtype=np.uint64))
        assert (directory.find(keys) == handles).all()
        if round_number % 2:
            directory.unlink(handles)
            directory.give_back(handles)
            assert (directory.find(keys) == -1).all()
    assert len(directory) == 100_000
