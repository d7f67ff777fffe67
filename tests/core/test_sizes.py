from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import ConfigError
from kvstore.core.sizes import MAX_SIZE, UNITS, format_size, parse_size

whole_units = st.tuples(st.integers(0, 4096), st.sampled_from(list(UNITS.values())))
sizes = st.integers(0, MAX_SIZE) | whole_units.map(lambda whole: whole[0] * whole[1])


@given(size=sizes)
def test_a_formatted_size_parses_to_itself(size: int) -> None:
    assert parse_size(format_size(size)) == size
    assert parse_size(str(size)) == parse_size(size) == size


@given(count=st.integers(0, 4096), unit=st.sampled_from(sorted(UNITS)), gap=st.sampled_from(["", " ", "  "]))
def test_case_and_blanks_around_a_unit_do_not_matter(count: int, unit: str, gap: str) -> None:
    size = count * UNITS[unit]
    for spelling in (unit, unit.lower(), unit.upper()):
        assert parse_size(f" {count}{gap}{spelling} ") == size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("512MiB", 512 * 2**20),
        ("80GB", 80 * 10**9),
        ("4096", 4096),
        (4096, 4096),
        ("1.5GiB", 3 * 2**29),
        ("0.5 kB", 500),
        ("0", 0),
        ("7B", 7),
        (f"{MAX_SIZE}", MAX_SIZE),
    ],
)
def test_sizes_read_as_people_mean_them(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1, "1B"),
        (1000, "1KB"),
        (1025, "1025B"),
        (4096, "4KiB"),
        (3 * 2**29, "1536MiB"),
        (8 * 2**30, "8GiB"),
        (80 * 10**9, "80GB"),
        (2**40, "1TiB"),
    ],
)
def test_a_size_is_written_in_the_shortest_exact_way(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "8 Gi", "8g", "-1", "-1GiB", "1e9", "1,5GiB", "0.3B", "1.0001KiB", ".5GiB", "8GiB8", "٣GiB",
     "0x10", "9" * 30, "9000000TiB", -1, MAX_SIZE + 1, True, None, 8.0, b"8GiB"],
)  # fmt: skip
def test_what_is_no_size_is_named_with_the_allowed_units(text: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_size(text)
    message = str(refusal.value)
    assert message.startswith(f"size {text!r} is not understood: allowed is a whole number of bytes")
    assert message.endswith("TiB, GiB, MiB, KiB, TB, GB, MB, KB, B")
    assert "\n" not in message


@pytest.mark.parametrize("size", [-1, MAX_SIZE + 1])
def test_a_number_that_is_no_size_is_not_formatted(size: int) -> None:
    with pytest.raises(ConfigError, match="is not understood"):
        format_size(size)
