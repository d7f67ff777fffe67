"""One server and one prefill process for this room's tests: every test uses prompts of its own."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from kvstore.testing.cluster import ServerProcess

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before any test imports transformers


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="64MiB") as running:
        yield running


@pytest.fixture(scope="module")
def other_process() -> Iterator[ProcessPoolExecutor]:
    """Another Python process, started afresh: nothing in memory is shared with this one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool
