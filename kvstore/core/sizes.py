"""Byte sizes as people write them: `8GiB`, `80GB`, `4096`."""

import re
from fractions import Fraction

from kvstore.core.errors import ConfigError

__all__ = ["format_size", "parse_size"]

UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
MAX_SIZE = 2**63 - 1  # sizes are signed 64-bit on the wire and in numpy offsets

_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_FACTORS = {unit.lower(): factor for unit, factor in UNITS.items()}
_ALLOWED = f"a whole number of bytes from 0 to {MAX_SIZE}, with no unit or one of {', '.join(UNITS)}"


def parse_size(text: str | int) -> int:
    """Bytes of `text`: "8GiB", "1.5 MiB", "80GB", "4096" or an int. Case and blanks around the unit do not matter.

    Raises ConfigError naming the text and the allowed units.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise _bad_size(text)
    if isinstance(text, int):
        return _checked(text, text)
    match = _PATTERN.fullmatch(text.strip())
    if match is None or len(match[1]) > 40:  # 40 digits: far above MAX_SIZE, and far below int()'s own limit
        raise _bad_size(text)
    factor = _FACTORS.get(match[2].lower() or "b")
    if factor is None:
        raise _bad_size(text)
    size = Fraction(match[1]) * factor
    if size.denominator != 1:
        raise _bad_size(text)
    return _checked(int(size), text)


def format_size(size: int) -> str:
    """The shortest exact spelling of `size` bytes: `parse_size(format_size(size)) == size`.

    Binary units win over decimal ones where both are exact, so 4096 reads `4KiB` and 80000000000 reads `80GB`.
    """
    _checked(size, size)
    exact = [(size // factor, -factor, unit) for unit, factor in UNITS.items() if size % factor == 0]
    digits, _, unit = min(exact, key=lambda spelling: (len(str(spelling[0])), "i" not in spelling[2], spelling[1]))
    return f"{digits}{unit}" if size else "0B"


def _checked(size: int, text: object) -> int:
    if not 0 <= size <= MAX_SIZE:
        raise _bad_size(text)
    return size


def _bad_size(text: object) -> ConfigError:
    return ConfigError(f"size {text!r} is not understood: allowed is {_ALLOWED}")
