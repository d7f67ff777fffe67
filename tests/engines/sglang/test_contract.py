"""SGLang passes the suite for engines with an adapter: each one a process of its own, on the CPU with stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.engines import EngineConformance, EngineUnderTest
from tests.engines.sglang.engines import EngineProcess
from tests.engines.sglang.models import VOCABULARY, save_tiny

pytestmark = pytest.mark.timeout(900)  # up to five engines start in one test's set-up


class TestSglang(EngineConformance):
    vocabulary = VOCABULARY
    folder: Path

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.folder = save_tiny(tmp_path_factory.mktemp("tiny"))

    def start(self, address: str | None, *, revision: str = "r1", dtype: str = "float32") -> EngineUnderTest:
        options = {"revision": revision, "checksums": True, "timeout_s": 3.0}
        # Its answers are `Generated` with more in them, but to a checker no list of the one is a list of the other.
        running: Any = EngineProcess(self.folder, address, options=options, dtype=dtype)
        return running
