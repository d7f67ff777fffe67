import numpy as np

from kvstore.core.states import BlockState, PutStatus


def test_the_numbers_of_states_are_what_the_index_and_the_wire_hold() -> None:
    assert {state.name: int(state) for state in BlockState} == {"ABSENT": 0, "RESERVED": 1, "COMMITTED": 2}
    assert {status.name: int(status) for status in PutStatus} == {
        "STORED": 0,
        "EXISTS": 1,
        "PENDING": 2,
        "NO_ROOM": 3,
        "FAILED": 4,
        "OVER_QUOTA": 5,
    }


def test_states_live_in_uint8_arrays() -> None:
    states = np.array([BlockState.ABSENT, BlockState.COMMITTED], np.uint8)
    assert (states == BlockState.COMMITTED).tolist() == [False, True]
