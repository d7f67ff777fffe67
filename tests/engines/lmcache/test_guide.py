"""docs/lmcache.md says what is so: its configuration works as it stands, its options are the plugin's."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
from lmcache.v1.config import LMCacheEngineConfig

from engine_adapters.lmcache.options import Options
from kvstore.testing.cluster import ServerProcess
from tests.docs.pages import code, fences, page, rows, section
from tests.engines.lmcache.worker import Model, Worker, content

pytestmark = pytest.mark.filterwarnings("ignore:.*LoggingHandler:DeprecationWarning")  # LMCache's own

GUIDE = page("docs/lmcache.md")


def configuration(server: ServerProcess, folder: Path) -> LMCacheEngineConfig:
    """The guide's file, with the address of a server that runs and less memory."""
    (text,) = fences(GUIDE, "yaml")
    path = folder / "lmcache.yaml"
    path.write_text(
        text.replace("127.0.0.1:7400", server.address).replace("max_local_cpu_size: 5", "max_local_cpu_size: 0.05")
    )
    return LMCacheEngineConfig.from_file(str(path))


def test_two_engines_with_the_guides_configuration_share_chunks(server: ServerProcess, tmp_path: Path) -> None:
    config = configuration(server, tmp_path)
    model = replace(Model(), chunk=config.chunk_size)
    saver, loader = Worker(config, model), Worker(config, model)
    chunk = saver.chunk(seed=1)
    saver.save([model.key(b"digest of a chunk")], [chunk])
    (loaded,) = loader.load([model.key(b"digest of a chunk")])
    assert content(loaded) == content(chunk)
    for worker in (saver, loader):
        worker.close()


def test_the_options_in_the_guide_are_those_that_there_are() -> None:
    told = {code(cells[0])[0]: cells[1].strip("`") for cells in rows(section(GUIDE, "Options"))}
    assert set(told) == {spec.name for spec in fields(Options)}
    defaults = {spec.name: spec.default for spec in fields(Options) if spec.default not in (MISSING, "")}
    shown = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in defaults.items()}
    assert {name: told[name] for name in defaults} == shown
