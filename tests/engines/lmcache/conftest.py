"""Tests that need LMCache: `make test-vllm` has an environment for them, anywhere else they are left out."""

import importlib.util
import warnings
from collections.abc import Iterator

import pytest

from kvstore.testing.cluster import ServerProcess

HAS_LMCACHE = importlib.util.find_spec("lmcache") is not None
collect_ignore_glob = [] if HAS_LMCACHE else ["test_*.py"]

if HAS_LMCACHE:
    with warnings.catch_warnings():  # LMCache's own at its import, which are errors here
        warnings.simplefilter("ignore")
        importlib.import_module("lmcache.v1.storage_backend.remote_backend")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One store for all tests of a module, each of which names a revision of its own."""
    with ServerProcess(dram="64MiB") as running:
        yield running
