"""Byte sizes as people write them: `8GiB`, `80GB`, `4096`."""

import re
from fractions import Fraction

from kvstore.core.errors import ConfigError

__all__ = ["format_size", "parse_size"]

# In the order that `format_size` prefers.
UNITS = {
    "TiB": 2**40,
    "GiB": 2**30,
    "MiB": 2**20,
    "KiB": 2**10,
    "TB": 10**12,
    "GB": 10**9,
    "MB": 10**6,
    "KB": 10**3,
    "B": 1,
}
MAX_SIZE = 2**63 - 1  # sizes are signed 64-bit on the wire and in numpy offsets

_PATTERN = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_FACTORS = {unit.lower(): factor for unit, factor in UNITS.items()} | {"": 1}


def parse_size(text: str | int) -> int:
    """Bytes of `text`: "8GiB", "1.5 MiB", "80GB", "4096" or an int. Case and blanks around the unit do not matter.

    Raises ConfigError naming the text and the allowed units.
    """
    size = text if isinstance(text, int) else _parsed(text)
    if size is None or isinstance(text, bool) or not 0 <= size <= MAX_SIZE:
        raise ConfigError(
            f"size {text!r} is not understood: allowed is a whole number of bytes from 0 to {MAX_SIZE}, "
            f"as a number with no unit or one of {', '.join(UNITS)}"
        )
    return size


def format_size(size: int) -> str:
    """The shortest exact spelling of `size` bytes: `parse_size(format_size(size)) == size`.

    Of equally short ones the binary, larger unit wins: 4096 reads 4KiB and 80000000000 reads 80GB. Raises ConfigError
    when no size is that large, or negative.
    """
    if parse_size(size) == 0:
        return "0B"
    exact = [(str(size // factor), unit) for unit, factor in UNITS.items() if size % factor == 0]
    return "".join(min(exact, key=lambda spelling: len(spelling[0])))


def _parsed(text: object) -> int | None:
    """Bytes of a number and its unit; None unless it is both understood and whole."""
    match = _PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        return None
    size = Fraction(match[1]) * factor
    return int(size) if size.denominator == 1 else None
