"""Whether there is a GPU for the tests that need one, and why not."""

import os

import pytest

from kvstore.core.errors import ConfigError
from kvstore.device.opening import require_device

_ASKED = os.environ.get("KVSTORE_TEST_GPU", "")  # `bench/gpu_check --device` sets it
CUDA = _ASKED if _ASKED.startswith("cuda:") else "cuda:0"


def _missing() -> str:
    try:
        require_device(CUDA)
    except ConfigError as error:
        return str(error)
    return ""


needs_gpu = pytest.mark.skipif(bool(_missing()), reason=_missing())
