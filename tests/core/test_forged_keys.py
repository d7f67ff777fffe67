"""XXH3 is not cryptographic: here two different blocks get one 128-bit key, and the fingerprint tells them apart.

For inputs of 65 to 96 bytes XXH3-128 reads bytes 16..31 as two numbers (a, b), adds (a ^ s1) * (b ^ s2) to one half of
its state, folded, and mixes a + b into the other; s1 and s2 are the secret's numbers at bytes 32 and 40, plus and minus
the seed. A block of 16 tokens behind a key of 16 bytes puts its first four tokens there. With a = s1 the product is 0
whatever b is, and with b = s2 it is 0 whatever a is: so (s1, x) and (s1 + x - s2, s2) hash alike, for every x.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.keys import KEY_DTYPE, BlockKeys, KeyScheme, chain_keys
from kvstore.core.layout import CanonicalLayout
from kvstore.core.namespace import Namespace

NAMESPACE = Namespace(model="m", revision="r", dtype="float16", block_tokens=16, layout=CanonicalLayout(1, 1, 64))
S1 = 0x78E5C0CC4EE679CB  # of XXH3's default secret; the seed is 0
S2 = 0x2172FFCC7DD05A82
LOW_HALF_OF_X = 0x4000_0000  # any value that keeps all four tokens of both blocks below 2**31


def two_tokens(number: int) -> list[int]:
    return [number & 0xFFFF_FFFF, number >> 32]


def forged_prompts(x_high: int, rest: list[int]) -> tuple[list[int], list[int]]:
    """Two prompts that differ in their first four tokens and have equal XXH3-128 keys."""
    x = x_high << 32 | LOW_HALF_OF_X
    y = (S1 + x - S2) % 2**64
    return two_tokens(S1) + two_tokens(x) + rest, two_tokens(y) + two_tokens(S2) + rest


@given(x_high=st.integers(0, 2**29), rest=st.lists(st.integers(0, 50_000), min_size=12, max_size=60))
def test_a_forged_collision_of_keys_differs_in_every_fingerprint(x_high: int, rest: list[int]) -> None:
    one, other = forged_prompts(x_high, rest)
    ours, theirs = chain_keys(NAMESPACE, one), chain_keys(NAMESPACE, other)
    assert one != other
    assert np.array_equal(ours.array["hi"], theirs.array["hi"])
    assert np.array_equal(ours.array["lo"], theirs.array["lo"])
    assert not np.any(ours.array["fp"] == theirs.array["fp"])
    assert ours != theirs


@pytest.mark.parametrize("scheme", [KeyScheme(seed=0x5EED), KeyScheme("blake3")])
def test_another_seed_or_blake3_takes_the_forgery_apart(scheme: KeyScheme) -> None:
    one, other = forged_prompts(5, list(range(12)))
    ours, theirs = chain_keys(NAMESPACE, one, scheme=scheme), chain_keys(NAMESPACE, other, scheme=scheme)
    assert not np.any(ours.array["hi"] == theirs.array["hi"])


@pytest.mark.parametrize("field", ["hi", "lo", "fp"])
def test_keys_that_differ_in_one_bit_of_any_word_are_unequal(field: str) -> None:
    array: Any = np.array([(1, 2, 3)], KEY_DTYPE)
    forged = array.copy()
    forged[field] ^= 1 << 63
    assert BlockKeys(array) == BlockKeys(array.copy())
    assert BlockKeys(array) != BlockKeys(forged)
