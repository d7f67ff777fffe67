"""Time as a value that arrives as an argument, so that leases and deadlines are tested without waiting."""

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Seconds that never run backwards. Only differences mean anything, and only within one machine."""

    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock. On Linux it is the same for all processes of the machine."""

    def monotonic(self) -> float:
        return time.monotonic()
