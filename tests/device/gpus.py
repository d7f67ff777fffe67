"""Whether there is a GPU for the tests that need one, and why not."""

import pytest

from kvstore.core.errors import ConfigError
from kvstore.device.opening import require_device

CUDA = "cuda:0"


def _missing() -> str:
    try:
        require_device(CUDA)
    except ConfigError as error:
        return str(error)
    return ""


needs_gpu = pytest.mark.skipif(bool(_missing()), reason=_missing())
