import copy
import hashlib
import os
import pickle
import subprocess
import sys
import timeit
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import ConfigError, UsageError
from kvstore.core.keys import KEY_DTYPE, BlockKeys, KeyScheme, chain_keys, keys_from_digests
from kvstore.core.layout import CanonicalLayout
from kvstore.core.namespace import Namespace

NAMESPACE = Namespace(model="m", revision="r", dtype="float16", block_tokens=4, layout=CanonicalLayout(2, 2, 8))
SCHEMES = [KeyScheme(), KeyScheme(seed=0xFEED), KeyScheme("blake3"), KeyScheme("blake3", seed=0xFEED)]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
few_tokens = st.lists(st.integers(0, 2), max_size=24)  # from a handful of values, so that prefixes are often shared


def all_different(*batches: BlockKeys) -> bool:
    """No key, and no fingerprint either, is in two of the batches."""
    joined = BlockKeys.concat(*batches).array
    return all(len(np.unique(words)) == len(joined) for words in (joined[["hi", "lo"]], joined["fp"]))


class TensorLike:
    """What a CPU tensor is to numpy."""

    def __init__(self, values: list[int]) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self._values, dtype=dtype)


# ------------------------------------------------------------------------------------------------------ what keys cover


@given(one=few_tokens, other=few_tokens, scheme=st.sampled_from(SCHEMES))
def test_two_prompts_sharing_a_prefix_share_exactly_those_keys(
    one: list[int], other: list[int], scheme: KeyScheme
) -> None:
    unequal = [at for at, (ours, theirs) in enumerate(zip(one, other, strict=False)) if ours != theirs]
    common = min([len(one), len(other), *unequal]) // NAMESPACE.block_tokens
    ours, theirs = chain_keys(NAMESPACE, one, scheme=scheme), chain_keys(NAMESPACE, other, scheme=scheme)
    assert (len(ours), len(theirs)) == (len(one) // 4, len(other) // 4)
    assert ours[:common] == theirs[:common]
    assert all_different(ours, theirs[common:])


def test_a_repeated_block_has_another_key_at_each_place() -> None:
    assert all_different(chain_keys(NAMESPACE, [5, 6, 7, 8] * 50))


@every_scheme
def test_base_model_and_adapters_share_no_key(scheme: KeyScheme) -> None:
    adapters = [b"", hashlib.sha256(b"lora a").digest(), hashlib.sha256(b"lora b").digest()]
    assert all_different(
        *(chain_keys(replace(NAMESPACE, adapter=adapter), range(40), scheme=scheme) for adapter in adapters)
    )


@every_scheme
def test_salts_share_no_key(scheme: KeyScheme) -> None:
    salts = [None, b"a", b"b", b"ab", b"a\x00"]
    assert all_different(*(chain_keys(NAMESPACE, range(40), extra=salt, scheme=scheme) for salt in salts))


@every_scheme
def test_an_image_changes_the_keys_from_its_block_on(scheme: KeyScheme) -> None:
    text = chain_keys(NAMESPACE, range(40), scheme=scheme)
    cat, dog = (
        chain_keys(NAMESPACE, range(40), extra={3: hashlib.sha256(image).digest()}, scheme=scheme)
        for image in (b"cat", b"dog")
    )
    assert text[:3] == cat[:3] == dog[:3]
    assert all_different(text[3:], cat[3:], dog[3:])


def test_an_image_in_the_partial_block_changes_no_key() -> None:
    assert chain_keys(NAMESPACE, range(11), extra={2: b"image"}) == chain_keys(NAMESPACE, range(11))


@every_scheme
def test_a_salt_is_the_extra_of_block_0(scheme: KeyScheme) -> None:
    salted = chain_keys(NAMESPACE, range(40), extra=b"salt", scheme=scheme)
    assert salted == chain_keys(NAMESPACE, range(40), extra={0: b"salt"}, scheme=scheme)


def test_100_000_image_digests_give_100_000_keys() -> None:
    one_block = range(4)
    images = (hashlib.sha256(number.to_bytes(4, "little")).digest() for number in range(100_000))
    keys = BlockKeys.concat(*(chain_keys(NAMESPACE, one_block, extra={0: image}) for image in images))
    assert len(keys) == 100_000
    assert all_different(keys)


@given(
    one=st.tuples(few_tokens, st.dictionaries(st.integers(0, 5), st.binary(min_size=1, max_size=2))),
    other=st.tuples(few_tokens, st.dictionaries(st.integers(0, 5), st.binary(min_size=1, max_size=2))),
)
def test_prompts_have_equal_keys_exactly_when_tokens_and_extras_are_equal(
    one: tuple[list[int], dict[int, bytes]], other: tuple[list[int], dict[int, bytes]]
) -> None:
    def covered(tokens: list[int], extra: dict[int, bytes]) -> tuple[list[int], dict[int, bytes]]:
        full = len(tokens) // 4
        return tokens[: 4 * full], {block: digest for block, digest in extra.items() if block < full}

    ours, theirs = covered(*one), covered(*other)
    assert (ours == theirs) == (
        chain_keys(NAMESPACE, ours[0], extra=ours[1]) == chain_keys(NAMESPACE, theirs[0], extra=theirs[1])
    )


@every_scheme
@given(tokens=few_tokens, salt=st.none() | st.binary(min_size=1, max_size=2), data=st.data())
def test_a_chain_continued_after_any_block_is_the_chain_in_one_go(
    scheme: KeyScheme, tokens: list[int], salt: bytes | None, data: st.DataObject
) -> None:
    extra = {0: salt} if salt and tokens else None
    whole = chain_keys(NAMESPACE, tokens, extra=extra, scheme=scheme)
    cut = data.draw(st.integers(0, len(whole)))
    rest = chain_keys(NAMESPACE, tokens[4 * cut :], extra=None if cut else extra, scheme=scheme, after=whole[:cut])
    assert BlockKeys.concat(whole[:cut], rest) == whole


def test_extra_bytes_that_look_like_tokens_are_not_taken_for_tokens() -> None:
    tokens = [1, 2, 3, 4]
    next_tokens = np.array([5, 6, 7, 8], "<i4").tobytes()
    longer = chain_keys(NAMESPACE, [*tokens, 5, 6, 7, 8])
    assert all_different(longer, chain_keys(NAMESPACE, tokens, extra=next_tokens))
    with_length = len(next_tokens).to_bytes(4, "little") + next_tokens
    assert all_different(longer, chain_keys(NAMESPACE, tokens, extra=with_length))


@every_scheme
def test_a_new_weights_revision_hits_nothing_stored_before(scheme: KeyScheme) -> None:
    old, new = (
        chain_keys(replace(NAMESPACE, revision=revision), range(40), scheme=scheme) for revision in ("v1", "v2")
    )
    assert all_different(old, new)


def test_schemes_and_seeds_share_no_key() -> None:
    assert all_different(*(chain_keys(NAMESPACE, range(400), scheme=scheme) for scheme in SCHEMES))


KEYS_IN_ANOTHER_PROCESS = """
from kvstore.core.keys import KeyScheme, chain_keys
from kvstore.core.layout import CanonicalLayout
from kvstore.core.namespace import Namespace
namespace = Namespace(model="m", revision="r", dtype="float16", block_tokens=4, layout=CanonicalLayout(2, 2, 8),
                      adapter=b"lora", tenant=b"salt")
for algorithm in ("xxh3-128", "blake3"):
    print(*chain_keys(namespace, range(100), extra={2: b"image", 7: b"other"}, scheme=KeyScheme(algorithm, 7)).hex())
print(hash("None"))
"""


# --------------------------------------------------------------------------------------- keys of an engine's digests

PAGES = [hashlib.sha256(bytes([page])).digest() for page in range(50)]


@every_scheme
def test_each_digest_has_its_own_key_wherever_it_is_named(scheme: KeyScheme) -> None:
    keys = keys_from_digests(NAMESPACE, PAGES, scheme=scheme)
    assert all_different(keys)
    assert keys_from_digests(NAMESPACE, PAGES[20:30], scheme=scheme) == keys[20:30]


@every_scheme
def test_namespaces_share_no_key_of_a_digest(scheme: KeyScheme) -> None:
    others = [replace(NAMESPACE, revision="s"), replace(NAMESPACE, tenant=b"t"), replace(NAMESPACE, dtype="bfloat16")]
    assert all_different(*(keys_from_digests(space, PAGES, scheme=scheme) for space in (NAMESPACE, *others)))


@every_scheme
def test_a_digest_that_looks_like_tokens_is_not_taken_for_tokens(scheme: KeyScheme) -> None:
    tokens = np.frombuffer(PAGES[0], "<i4")[:4] & 0x7FFFFFFF
    assert all_different(
        chain_keys(NAMESPACE, tokens, scheme=scheme), keys_from_digests(NAMESPACE, [tokens.tobytes()], scheme=scheme)
    )


@pytest.mark.parametrize("digest", [b"", bytes(15), bytes(65), "0" * 32, 7, bytearray(32)])
def test_a_wrong_digest_is_named_in_one_line_with_what_is_allowed(digest: Any) -> None:
    with pytest.raises(UsageError, match=r"^digests\[1\]=.*allowed is bytes, 16 to 64 of them$"):
        keys_from_digests(NAMESPACE, [PAGES[0], digest])


def test_processes_with_random_hash_seeds_agree_byte_for_byte() -> None:
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", KEYS_IN_ANOTHER_PROCESS],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("random", "0", "1", "4242")
    ]
    printed = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len({lines[-1] for lines in printed}) > 1  # their own hashes do differ
    assert len({tuple(lines[:-1]) for lines in printed}) == 1


# ------------------------------------------------------------------------------------------------------------ the input


@pytest.mark.parametrize(
    "token_ids",
    [
        tuple(range(1, 12)),
        range(1, 12),
        np.arange(1, 12, dtype=np.int32),
        np.arange(1, 12, dtype=np.int64),
        np.arange(1, 12, dtype=np.uint16),
        np.arange(1, 12, dtype=">i8"),
        np.arange(2, 24, dtype=np.int64)[::2] // 2,
        np.arange(0, 24, dtype=np.int32)[2::2] // 2,
        np.asfortranarray(np.arange(1, 12)),
        [np.int64(number) for number in range(1, 12)],
        TensorLike(list(range(1, 12))),
    ],
)
def test_any_kind_of_integers_gives_the_same_keys(token_ids: Any) -> None:
    assert chain_keys(NAMESPACE, token_ids) == chain_keys(NAMESPACE, list(range(1, 12)))


@pytest.mark.parametrize("token_ids", [[], (), np.empty(0, np.int32), [1], [1, 2, 3]])
def test_less_than_one_block_has_no_key(token_ids: Any) -> None:
    assert len(chain_keys(NAMESPACE, token_ids, extra=b"salt")) == 0


@pytest.mark.parametrize(
    ("token_ids", "culprit"),
    [
        ([1, 2, -1], "token_ids[2]=-1: "),
        ([1, 2**31], "token_ids[1]=2147483648: "),
        ([1, 2**63], f"token_ids[1]={2**63}: "),
        ([1, 2**64], f"token_ids[1]={2**64}: "),
        (np.array([3, -7]), "token_ids[1]=-7: "),
        (np.array([2**64 - 1], np.uint64), f"token_ids[0]={2**64 - 1}: "),
        ([1, 2.0, 3], "token_ids[1]=2.0: "),
        (np.array([1.0, 2.0]), "token_ids[0]=1.0: "),
        ([True, False], "token_ids[0]=True: "),
        (np.array([True]), "token_ids[0]=True: "),
        ([1, None], "token_ids[1]=None: "),
        ([1, "2"], "token_ids[1]='2': "),
        (["1"], "token_ids[0]='1': "),
        ("12345", "token_ids of shape (): "),
        (b"12345", "token_ids of shape (): "),
        (5, "token_ids of shape (): "),
        (None, "token_ids of shape (): "),
        ([[1, 2], [3, 4]], "token_ids of shape (2, 2): "),
        (np.zeros((0, 4), np.int32), "token_ids of shape (0, 4): "),
        ([[1], [2, 3]], "token_ids: "),
    ],
)
def test_a_wrong_token_is_named_in_one_line_with_what_is_allowed(token_ids: Any, culprit: str) -> None:
    with pytest.raises(UsageError) as refusal:
        chain_keys(NAMESPACE, token_ids)
    message = str(refusal.value)
    assert message.startswith(culprit)
    assert message.endswith("allowed is a 1-D sequence or array of ints from 0 to 2147483647")
    assert "\n" not in message


def test_a_tensor_that_numpy_cannot_read_is_refused_with_its_own_reason() -> None:
    class OnDevice:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            raise TypeError("can't convert a device tensor to numpy")

    with pytest.raises(UsageError, match="device tensor to numpy; allowed is"):
        chain_keys(NAMESPACE, OnDevice())


@pytest.mark.parametrize(
    ("extra", "culprit"),
    [
        (b"", "extra=b''"),
        ("salt", "extra='salt'"),
        (7, "extra=7"),
        ([b"salt"], "extra=[b'salt']"),
        ({0: b""}, "extra[0]=b''"),
        ({0: None}, "extra[0]=None"),
        ({1: "cat"}, "extra[1]='cat'"),
        ({-1: b"cat"}, "extra[-1]: these tokens have 3 blocks"),
        ({3: b"cat"}, "extra[3]: these tokens have 3 blocks"),
        ({"0": b"cat"}, "extra['0']: these tokens have 3 blocks"),
        ({True: b"cat"}, "extra[True]: these tokens have 3 blocks"),
    ],
)
def test_a_wrong_extra_is_named_in_one_line_with_what_is_allowed(extra: Any, culprit: str) -> None:
    with pytest.raises(UsageError) as refusal:
        chain_keys(NAMESPACE, range(11), extra=extra)
    message = str(refusal.value)
    assert message.startswith(culprit)
    assert "allowed is" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("algorithm", "seed", "culprit"),
    [
        ("hash", 0, "algorithm='hash': allowed is one of xxh3-128, blake3"),
        (None, 0, "algorithm=None: allowed is one of xxh3-128, blake3"),
        ("xxh3-128", -1, "seed=-1: allowed is an int from 0 to 18446744073709551615"),
        ("xxh3-128", 2**64, "seed=18446744073709551616: allowed is an int from 0 to"),
        ("xxh3-128", "7", "seed='7': allowed is an int from 0 to"),
        ("blake3", None, "seed=None: allowed is an int from 0 to"),
    ],
)
def test_an_unstable_or_unknown_scheme_is_refused(algorithm: Any, seed: Any, culprit: str) -> None:
    with pytest.raises(UsageError) as refusal:
        KeyScheme(algorithm, seed)
    assert str(refusal.value).startswith(culprit)


def test_blake3_without_its_package_is_refused_when_the_scheme_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)  # how Python itself marks a module that cannot be imported
    with pytest.raises(ConfigError, match=r"install kvstore-llm\[blake3\] or use xxh3-128"):
        KeyScheme("blake3")


def test_naming_a_prompt_of_4096_tokens_takes_well_below_a_millisecond() -> None:
    namespace = replace(NAMESPACE, block_tokens=16)
    tokens = np.arange(4096)
    assert len(chain_keys(namespace, tokens)) == 256
    times_s = timeit.repeat(lambda: chain_keys(namespace, tokens), number=1, repeat=50)
    assert min(times_s) < 0.5e-3  # 0.1 ms usually; the best of many is what other work on the machine does not blur


# ------------------------------------------------------------------------------------------------------ batches of keys


def test_a_record_is_the_raw_bytes_of_key_and_fingerprint() -> None:
    keys = chain_keys(NAMESPACE, range(4))
    key, fingerprint = (bytes.fromhex(text) for text in keys.hex()[0].split(":"))
    assert keys.tobytes() == key + fingerprint
    assert keys.array.tolist() == [
        (
            int.from_bytes(key[:8], "little"),
            int.from_bytes(key[8:], "little"),
            int.from_bytes(fingerprint, "little"),
        )
    ]


records = st.binary(max_size=240).map(lambda raw: raw[: len(raw) // 24 * 24])


@given(raw=records, cut=st.integers(0, 10))
def test_keys_survive_every_form_they_are_written_in(raw: bytes, cut: int) -> None:
    keys = BlockKeys.frombuffer(raw)
    assert len(keys) == len(raw) // 24
    assert keys.tobytes() == raw
    assert BlockKeys.from_hex(keys.hex()) == keys
    assert BlockKeys.from_hex([text.upper() for text in keys.hex()]) == keys
    assert BlockKeys.frombuffer(memoryview(bytearray(raw))) == keys
    assert BlockKeys.concat(keys[:cut], keys[cut:]) == keys
    assert BlockKeys.concat() == BlockKeys.frombuffer(b"")
    for twin in (copy.copy(keys), copy.deepcopy(keys), pickle.loads(pickle.dumps(keys))):
        assert twin == keys
        assert hash(twin) == hash(keys)
        assert not twin.array.flags.writeable


def test_a_slice_is_a_batch_of_contiguous_keys() -> None:
    keys = chain_keys(NAMESPACE, range(40))
    for span in (slice(2, 5), slice(None, None, 3), slice(None, None, -1), slice(20, None)):
        assert keys[span].hex() == keys.hex()[span]
        assert keys[span].array.flags.c_contiguous


def test_single_keys_and_iteration_are_not_offered() -> None:
    keys: Any = chain_keys(NAMESPACE, range(40))
    with pytest.raises(TypeError, match="slice them"):
        keys[0]
    with pytest.raises(TypeError, match="not iterable"):
        list(keys)


def test_keys_own_their_bytes_and_cannot_be_changed() -> None:
    array = np.array([(1, 2, 3), (4, 5, 6)], KEY_DTYPE)
    view = array[:]
    view.flags.writeable = False
    for keys in (BlockKeys(array), BlockKeys(view), BlockKeys.frombuffer(memoryview(array))):
        before = keys.hex()
        array["hi"] ^= 1
        assert keys.hex() == before
        with pytest.raises(ValueError, match="read-only"):
            keys.array["hi"] = 0


def test_keys_are_neither_equal_to_a_prefix_nor_to_another_thing() -> None:
    keys = chain_keys(NAMESPACE, range(40))
    assert keys != keys[:3]
    assert keys != keys.hex()
    assert keys == chain_keys(NAMESPACE, range(40))


def test_a_repr_shows_few_keys_in_full_and_many_by_their_ends() -> None:
    keys = chain_keys(NAMESPACE, range(40))
    assert repr(keys[:2]) == f"BlockKeys({keys.hex()[0]}, {keys.hex()[1]})"
    assert repr(keys) == f"BlockKeys(10 keys, {keys.hex()[0]} to {keys.hex()[9]})"


@pytest.mark.parametrize("raw", [b"x", bytes(23), bytes(25), bytes(47)])
def test_a_ragged_buffer_is_refused(raw: bytes) -> None:
    with pytest.raises(UsageError, match=f"block keys of {len(raw)} bytes: allowed is a multiple of 24"):
        BlockKeys.frombuffer(raw)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00" * 24,
        "0" * 32 + ":" + "0" * 15,
        "0" * 31 + "g:" + "0" * 16,
        " " * 32 + ":" + "0" * 16,
        "é" * 49,
        None,
        7,
    ],
)
def test_a_wrong_hexadecimal_key_is_named(text: Any) -> None:
    good = "00" * 16 + ":" + "00" * 8
    with pytest.raises(UsageError) as refusal:
        BlockKeys.from_hex([good, text])
    assert str(refusal.value).startswith(f"block key {text!r}: allowed is 'key:fingerprint'")


@pytest.mark.parametrize(
    ("array", "culprit"),
    [
        (np.zeros(3, "u8"), "block keys of dtype uint64, shape (3,)"),
        (np.zeros((2, 2), KEY_DTYPE), "shape (2, 2)"),
        (np.zeros((), KEY_DTYPE), "shape ()"),
        ([(1, 2, 3)], "block keys of type list"),
    ],
)
def test_another_array_than_of_records_is_refused(array: Any, culprit: str) -> None:
    with pytest.raises(UsageError) as refusal:
        BlockKeys(array)
    assert culprit in str(refusal.value)
    assert "allowed is a 1-D array of KEY_DTYPE" in str(refusal.value)
