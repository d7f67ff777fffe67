"""Waiting for what another process does: look again and again until a deadline, never sleep and hope."""

import time
from collections.abc import Callable

POLL_S = 0.01  # between two looks: other processes tell us nothing when they change


def until(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Return as soon as the condition is true.

    Raises:
        TimeoutError: it was not, by the deadline; names what was waited for.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)


def holds_for(condition: Callable[[], object], seconds: float) -> bool:
    """Whether the condition stays true for that long; looks again and again, and returns at the first no."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        if not condition():
            return False
        time.sleep(POLL_S)
    return True
