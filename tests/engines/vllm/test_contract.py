"""vLLM with our connector passes the suite that every engine with an adapter must pass."""

from pathlib import Path

import pytest

from kvstore.testing.engines import EngineConformance
from tests.engines.vllm.models import VOCABULARY
from tests.engines.vllm.process import VllmEngine, connector

pytestmark = pytest.mark.timeout(600)  # an engine takes 20 to 40 s to start


class TestVllm(EngineConformance):
    vocabulary = VOCABULARY
    model: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _model(cls, tiny: Path) -> None:
        cls.model = tiny

    def start(self, address: str | None, *, revision: str = "r1", dtype: str = "float32") -> VllmEngine:
        kv = None if address is None else connector(address, revision=revision)
        return VllmEngine(self.model, kv, dtype=dtype)
