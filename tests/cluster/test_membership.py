"""Addresses as people write them."""

import pytest

from kvstore.cluster.membership import Member, StaticMembership
from kvstore.core.errors import UsageError


@pytest.mark.parametrize(
    ("written", "members"),
    [
        ("local", [Member("127.0.0.1:7400")]),
        ("gpu7", [Member("gpu7:7400")]),
        ("gpu7:9000", [Member("gpu7:9000")]),
        ("gpu7:9000=2.5", [Member("gpu7:9000", 2.5)]),
        ("[::1]:9000", [Member("[::1]:9000")]),
        ("[fe80::1]", [Member("[fe80::1]:7400")]),
        ("a:1, b:2=3", [Member("a:1"), Member("b:2", 3.0)]),
        (["a:1", "b"], [Member("a:1"), Member("b:7400")]),
        (("local=2",), [Member("127.0.0.1:7400", 2.0)]),
    ],
)
def test_an_address_is_read_as_it_is_meant(written: str | list[str], members: list[Member]) -> None:
    assert list(StaticMembership(written).nodes()) == members


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ([], "no address: allowed is 'local', 'host:port', or several"),
        ("", "address ''"),
        ("a:1,,b:1", "address ''"),
        ("gpu7:", "address 'gpu7:'.*port from 1 to 65535"),
        ("gpu7:http", "address 'gpu7:http'.*port from 1 to 65535"),
        ("gpu7:²", "address 'gpu7:²'.*port from 1 to 65535"),
        ("gpu7:0", "address 'gpu7:0'"),
        ("gpu7:65536", "address 'gpu7:65536'"),
        (":7400", "address ':7400'"),
        ("gpu7:1=0", "the weight after '=' must be a number above 0"),
        ("gpu7:1=-1", "address 'gpu7:1=-1'"),
        ("gpu7:1=inf", "address 'gpu7:1=inf'"),
        ("gpu7:1=nan", "address 'gpu7:1=nan'"),
        ("gpu7:1=heavy", "address 'gpu7:1=heavy'"),
        (["a:1", "a:1=2"], "address 'a:1' is named twice"),
        (["local", "127.0.0.1:7400"], "'127.0.0.1:7400' is named twice"),
    ],
)
def test_a_wrong_address_is_named_with_what_is_allowed(written: str | list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StaticMembership(written)
