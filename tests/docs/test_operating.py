"""docs/operating.md lists exactly the settings, metrics and status fields that a real server has."""

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any, cast

import pytest

from kvstore.core.sizes import format_size
from kvstore.server.config import ServerConfig
from kvstore.testing.cluster import ServerProcess
from tests.docs.pages import code, page, rows, section

OPERATING = page("docs/operating.md")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(dram="16MiB") as server:
        yield server


def first_names(title: str) -> list[str]:
    """What stands in backticks in the first column of a section's tables."""
    return [name for row in rows(section(OPERATING, title)) for name in code(row[0])]


def test_every_setting_is_described_once_with_its_default() -> None:
    described = {code(row[0])[0]: row[1].strip("`") for row in rows(section(OPERATING, "Settings"))}
    assert list(described) == [spec.name for spec in fields(ServerConfig)]
    for spec in fields(ServerConfig):
        if spec.default is MISSING:
            continue  # computed from the machine; the page says how
        default: object = format_size(cast("int", spec.default)) if spec.metadata.get("size") else spec.default
        assert described[spec.name] == (str(default) or "empty"), spec.name


def test_every_metric_is_described_once(server: ServerProcess) -> None:
    served = re.findall(r"^(kvstore_\w+?)(?:\{.*?\})? ", server.http("/metrics"), re.MULTILINE)
    assert sorted(first_names("Metrics")) == sorted(set(served))


def test_every_status_field_is_described_once(server: ServerProcess) -> None:
    status = server.status()
    names = [*status, *(f"shards[].{name}" for name in status["shards"][0])]
    assert sorted(first_names("Health and status")) == sorted(names)


def test_status_speaks_of_gauges_and_counters_by_the_names_of_the_metrics(server: ServerProcess) -> None:
    shard: dict[str, Any] = server.status()["shards"][0]
    metrics = set(first_names("Metrics"))
    assert {f"kvstore_{name}" for name in shard["gauges"]} <= metrics
    assert {f"kvstore_{name}_total" for name in shard["counters"]} <= metrics


def test_the_uses_of_the_pool_add_up_as_the_page_says(server: ServerProcess) -> None:
    uses = server.status()["shards"][0]["bytes"]
    assert uses.pop("capacity") == sum(uses.values())
    assert list(uses) == ["free", "reserved", "committed"]
