"""Traces: what is read, how blocks are numbered, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvbench.trace import TOKENS_PER_ID, block_keys, read_trace, tokens
from kvstore.core.errors import UsageError
from kvstore.core.keys import BlockKeys
from kvstore.core.layout import OpaqueLayout
from tests.kvbench.traces import write_trace

NAMESPACE = kvstore.Namespace(
    model="m", revision="r", dtype="uint8", block_tokens=TOKENS_PER_ID, layout=OpaqueLayout("t", 1, 4096)
)


def test_equal_prefixes_get_equal_numbers_and_a_branch_gets_new_ones(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "t.jsonl", [[7, 8, 9], [7, 8, 4, 5], [7, 8, 9]]))
    assert [request.blocks.tolist() for request in trace.requests] == [[0, 1, 2], [0, 1, 3, 4], [0, 1, 2]]
    assert (trace.name, trace.distinct_blocks, trace.references, trace.longest) == ("t", 5, 10, 4)
    assert trace.input_tokens == 3 * TOKENS_PER_ID - 100 + 4 * TOKENS_PER_ID - 100 + 3 * TOKENS_PER_ID - 100


def test_an_id_behind_another_prefix_is_another_block(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "t.jsonl", [[1, 3], [2, 3]]))
    assert trace.distinct_blocks == 4


def test_the_limit_is_what_a_cache_that_forgets_nothing_would_hit(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "t.jsonl", [[1, 2], [1, 2, 3], [4, 2, 3], [1, 2, 3]]))
    assert trace.hit_rate_limit() == 5 / 11


def test_only_the_first_requests_are_read_when_told_so(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "t.jsonl", [[1], [2], [3]]), requests_max=2)
    assert len(trace.requests) == trace.distinct_blocks == 2


def test_each_block_number_has_the_key_that_its_whole_prefix_gives(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "t.jsonl", [[7, 8, 9], [7, 8, 4, 5], [6, 8]]))
    keys = block_keys(trace, NAMESPACE)
    for request in trace.requests:
        assert BlockKeys(keys[request.blocks]) == kvstore.chain_keys(NAMESPACE, tokens(request.ids))
    assert len(np.unique(keys)) == trace.distinct_blocks


def test_an_id_stands_for_the_same_512_tokens_everywhere() -> None:
    first, second = tokens(np.array([5, 6])), tokens(np.array([6, 5]))
    assert first.dtype == np.int32
    assert first.min() >= 0
    assert np.array_equal(first[:TOKENS_PER_ID], second[TOKENS_PER_ID:])
    assert not np.array_equal(first[:TOKENS_PER_ID], second[:TOKENS_PER_ID])


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n", "no prefix identity"),
        ("", "has no requests"),
        ("\n\n", "has no requests"),
        ('{"hash_ids": [1], "input_length": 5}\n\n{"hash_ids": [1]}\n', "line 3 is no request"),
        ("[1, 2]\n", "line 1 is no request"),
        ('{"hash_ids": ["a"], "input_length": 5}\n', "line 1 is no request"),
        ('{"hash_ids": [99999999999999999999], "input_length": 5}\n', "line 1 is no request"),
        ('{"hash_ids": [], "input_length": 5}\n', "line 1 has no blocks"),
        ('{"hash_ids": [-1], "input_length": 5}\n', "line 1 has no blocks, or a negative number"),
    ],
)
def test_what_is_no_trace_is_named_with_its_line_and_what_is_allowed(tmp_path: Path, text: str, culprit: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"^--trace {path}: .*{culprit}.*allowed: a Mooncake trace") as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"\xff\xfe\x80")
    for name, reason in (("missing", "No such file"), ("noise", "it is not text"), (".", "Is a directory")):
        with pytest.raises(UsageError, match=f"^--trace {tmp_path / name}: can't be read: {reason}"):
            read_trace(tmp_path / name)
