"""Tests that need vLLM: `make test-vllm` has an environment for them, anywhere else they are left out."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.cluster import ServerProcess

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

# Read when vLLM is imported, here and in every process that these tests start: no hub, no usage reports, little memory.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="WARNING",
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama of random weights, always the same: 4 layers, 4 heads, 2 KV heads of 32."""
    from tests.engines.vllm.models import save_tiny  # not before vLLM's environment is known to be there

    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One store for all tests of a module."""
    with ServerProcess(dram="256MiB") as running:
        yield running
