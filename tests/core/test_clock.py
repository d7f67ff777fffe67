from kvstore.core.clock import Clock, SystemClock


def test_the_system_clock_is_a_clock_that_never_runs_backwards() -> None:
    clock: Clock = SystemClock()
    readings = [clock.monotonic() for _ in range(1000)]
    assert readings == sorted(readings)
