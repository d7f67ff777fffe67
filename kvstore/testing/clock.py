"""A clock that stands still until it is told to move, so that leases and deadlines are tested without waiting."""


class FakeClock:
    """A `kvstore.core.clock.Clock` in the hands of the test.

    Args:
        now_s: what it shows first, in seconds.
    """

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        """What it shows now."""
        return self.now_s

    def advance(self, seconds: float) -> float:
        """Move on, never back; what it shows then."""
        if seconds < 0:
            raise ValueError(f"a clock does not run backwards: {seconds} s")
        self.now_s += seconds
        return self.now_s
