"""Tests that need SGLang: `make test-sglang` has an environment for them, anywhere else they are left out."""

import importlib.util
from collections.abc import Iterator

import pytest

from kvstore.testing.cluster import ServerProcess

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One store for all tests of a module, each of which names a revision of its own."""
    with ServerProcess(dram="64MiB") as running:
        yield running
