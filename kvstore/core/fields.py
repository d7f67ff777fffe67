"""What the fields of every noun go through: a check that names the culprit, and the length-prefixed encoding."""

from kvstore.core.errors import UsageError

__all__ = ["length_prefixed", "require_int", "require_text"]


def require_int(name: str, value: object, low: int, high: int) -> None:
    """Raise UsageError unless `value` is an int (a bool is none) from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise UsageError(f"{name}={value!r}: allowed is an int from {low} to {high}")


def require_text(name: str, value: object, meaning: str) -> None:
    """Raise UsageError unless `value` is a str with more than blanks in it that UTF-8 can encode."""
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{name}={value!r}: allowed is a non-empty str, {meaning}")
    try:
        value.encode()
    except UnicodeEncodeError as cause:
        raise UsageError(f"{name}={value!r}: allowed is text that UTF-8 can encode (no lone surrogates)") from cause


def length_prefixed(*fields: str | int | bytes) -> bytes:
    """Each field as its length (u32, little-endian) and its bytes: text as UTF-8, numbers as decimal ASCII.

    The length in front is what keeps neighbours apart: ("ab", "c") and ("a", "bc") encode differently.
    """
    raw = [field if isinstance(field, bytes) else str(field).encode() for field in fields]
    return b"".join(len(field).to_bytes(4, "little") + field for field in raw)
