"""TEST ONLY. Lets SGLang run on a machine without a GPU: put this folder on PYTHONPATH, and Python imports this file.

Stood in for: the packages `sgl_kernel` (CUDA kernels) and `torchvision` (no build beside the CPU torch), of which only
names are needed; pinning host memory; synchronising a stream of the CPU; the copies between "device" and host pool; and
the 10 GiB of host memory that the engine leaves free.
Everything else is the real engine: attention, radix tree, page hashes, cache controller with its threads, host pools,
storage calls.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

ABSENT = ("sgl_kernel", "torchvision")


class Absent:
    """Any name of a package that isn't there. It can be asked for more names, subclassed and used as a decorator's
    argument; calling it says what is missing.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> Any:
        raise RuntimeError(f"{self._name} was called: it has no stand-in, for tests on the CPU don't need it")

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return (object,)


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent packages and all their submodules."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__

        def attribute(wanted: str) -> Absent:
            if wanted.startswith("__"):
                raise AttributeError(wanted)
            return Absent(f"{name}.{wanted}")

        module.__dict__["__getattr__"] = attribute
        module.__dict__["__version__"] = "0"  # older than whatever anyone asks for: nobody prefers it


class AfterImport(importlib.abc.MetaPathFinder):
    """Changes modules once they are loaded."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        change = self._changes.pop(fullname, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(fullname)
        assert spec is not None, fullname
        assert spec.loader is not None, fullname
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


class NoCuda:
    """Pinning always works: there is no device that would read the memory."""

    def cudaHostRegister(self, *_: object) -> int:  # noqa: N802 - CUDA's name
        return 0

    def cudaHostUnregister(self, *_: object) -> int:  # noqa: N802 - CUDA's name
        return 0


def nothing(_: object) -> None:
    """What there is to wait for on the CPU."""


def change_torch(torch: Any) -> None:
    """Nothing to pin, nothing to wait for."""
    torch.cuda.cudart = NoCuda
    torch.cpu.Stream.synchronize = nothing


def change_host_pool(mha: Any) -> None:
    """The copies between both pools, which on a GPU are kernels, as indexed copies."""
    mha.transfer_kv_direct = copy_layer_first
    mha.transfer_kv_all_layer_direct_lf_pf = copy_to_page_first
    mha.transfer_kv_per_layer_direct_pf_lf = copy_from_page_first


def copy_layer_first(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Slots of each layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def copy_to_page_first(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """All layers (K, then V) of the device pool into pages [page][layer][slot, head, dim]."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for part, target in enumerate(dst_ptrs):
        for layer in range(layers):
            source = src_ptrs[part * layers + layer][src_indices]
            target[pages, layer] = source.view(len(pages), page_size, *source.shape[1:])


def copy_from_page_first(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer of pages into the device pool."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].flatten(0, 1)


def change_reserve(base: Any) -> None:
    """Host memory that stays free: 10 GiB are much for a test machine whose pools have a few MiB."""
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "torch": change_torch,
    "sglang.srt.mem_cache.pool_host.base": change_reserve,
    "sglang.srt.mem_cache.pool_host.mha": change_host_pool,
}
sys.meta_path.insert(0, AbsentFinder())
sys.meta_path.insert(0, AfterImport(CHANGES))
