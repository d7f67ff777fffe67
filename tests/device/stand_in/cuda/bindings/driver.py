"""`cuda.bindings.driver` for processes that are started with the folder `stand_in` on their path."""

from typing import Any

from tests.device.fake_driver import FakeDriver

_driver = FakeDriver()


def __getattr__(name: str) -> Any:
    return getattr(_driver, name)
