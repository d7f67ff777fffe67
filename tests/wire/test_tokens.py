"""Session tokens: good for this server, for a while, and not a byte otherwise."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.wire.tokens import TOKEN_TTL_S, issue_token, token_is_valid

KEY = bytes(range(32))
BOOT = "0123456789abcdef"
NOW_S = 1_700_000_000.0
TOKEN = issue_token(KEY, BOOT, b"n" * 16, NOW_S)


def test_a_token_is_valid_until_its_time_is_over() -> None:
    assert token_is_valid(KEY, BOOT, TOKEN, NOW_S)
    assert token_is_valid(KEY, BOOT, TOKEN, NOW_S + TOKEN_TTL_S - 1)
    assert not token_is_valid(KEY, BOOT, TOKEN, NOW_S + TOKEN_TTL_S)


def test_a_token_of_another_boot_or_key_is_not_valid() -> None:
    assert not token_is_valid(KEY, "another boot", TOKEN, NOW_S)
    assert not token_is_valid(bytes(32), BOOT, TOKEN, NOW_S)


@given(bit=st.integers(0, len(TOKEN) * 4 - 1))
def test_a_token_with_any_bit_changed_is_not_valid(bit: int) -> None:
    raw = bytearray.fromhex(TOKEN)
    raw[bit // 8] ^= 1 << bit % 8
    assert not token_is_valid(KEY, BOOT, raw.hex(), NOW_S)


@given(token=st.text() | st.none() | st.integers() | st.binary() | st.just(TOKEN[:-2]) | st.just(TOKEN + "00"))
def test_what_is_no_token_is_not_valid(token: object) -> None:
    assert not token_is_valid(KEY, BOOT, token, NOW_S)


def test_two_tokens_differ_by_their_nonce() -> None:
    other = issue_token(KEY, BOOT, b"m" * 16, NOW_S)
    assert other != TOKEN
    assert token_is_valid(KEY, BOOT, other, NOW_S)
