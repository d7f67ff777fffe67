"""Devices for tests: whether there is a GPU for those that need one, and why not; the host; a stand-in for CUDA."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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

STAND_IN = "stand-in"
DEVICES = ["host", STAND_IN, pytest.param(CUDA, marks=[pytest.mark.gpu, needs_gpu])]


@contextmanager
def usable(device: str) -> Iterator[str]:
    """The name to open it by. The stand-in is `cuda:0` here, and in the processes that are started meanwhile."""
    if device != STAND_IN:
        yield device
        return
    folder = str(Path(__file__).parent / "stand_in")
    paths = [folder, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        for module in _cuda_modules():
            patch.delitem(sys.modules, module)
        patch.setattr(sys, "path", [folder, *sys.path])
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield "cuda:0"
        for module in _cuda_modules():  # before the real ones, if there are any, come back
            del sys.modules[module]


def _cuda_modules() -> list[str]:
    return [name for name in sys.modules if name == "cuda" or name.startswith("cuda.")]
