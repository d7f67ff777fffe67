"""Devices by name: `host`, or `cuda:0` and so on."""

from __future__ import annotations

from kvstore.core.errors import ConfigError
from kvstore.device.base import Device
from kvstore.device.cuda import CudaDevice, require_cuda
from kvstore.device.host import HostDevice

HOST = "host"
_CUDA = "cuda:"


def cuda_ordinal(name: str) -> int | None:
    """The number in `cuda:0`; None for `host`.

    Raises:
        ConfigError: no name of a device.
    """
    if name == HOST:
        return None
    ordinal = name.removeprefix(_CUDA)
    if not (name.startswith(_CUDA) and ordinal.isascii() and ordinal.isdigit()):
        raise ConfigError(f'device "{name}": allowed is host, or cuda: and a number, as in cuda:0')
    return int(ordinal)


def require_device(name: str) -> None:
    """Make sure that it can be opened, without taking any of its memory.

    Raises:
        ConfigError: one line says why not.
    """
    ordinal = cuda_ordinal(name)
    if ordinal is not None:
        require_cuda(ordinal)


def open_device(name: str) -> Device:
    """A device, ready for use.

    Raises:
        ConfigError: there is no such device here; one line says why.
        DeviceError: it refuses.
    """
    ordinal = cuda_ordinal(name)
    return HostDevice() if ordinal is None else CudaDevice(ordinal)
