"""docs/reference-engine.md: its example runs against a real server and prints what its comments say."""

import contextlib
import io
import re

import pytest

pytest.importorskip("transformers", reason="the reference engine is built on transformers' modules")

import torch

from kvstore.testing.cluster import ServerProcess
from tests.docs.pages import ROOT, fences, page, rows, section

GUIDE = page("docs/reference-engine.md")


@pytest.mark.slow
def test_the_example_runs_and_prints_what_its_comments_say() -> None:
    (example,) = fences(GUIDE, "python")
    expected = re.findall(r"print\(.*\)  # (.+)$", example, re.MULTILINE)
    assert len(expected) == example.count("print(") == 2
    torch.set_num_threads(1)
    printed = io.StringIO()
    with ServerProcess(dram="256MiB") as server, contextlib.redirect_stdout(printed):
        exec(compile(example.replace("127.0.0.1:7400", server.address), "reference-engine.md", "exec"), {})
    assert printed.getvalue().splitlines() == expected


def test_the_files_that_the_guide_lists_are_those_that_exist() -> None:
    listed = {cells[0].strip("` ") for cells in rows(section(GUIDE, "How it is built"))}
    folder = ROOT / "engine_adapters" / "reference"
    assert listed == {file.name for file in folder.glob("*.py")} - {"__init__.py"}
