"""Figures are drawn without a display; without matplotlib the run is refused in one line."""

import sys
from pathlib import Path

import pytest

from kvbench.plot import (
    plot_disk,
    plot_engine,
    plot_index,
    plot_layers,
    plot_replay,
    plot_scale,
    plot_transfer,
    require_plot,
)
from kvstore.core.errors import ConfigError, UsageError
from tests.kvbench.rows import (
    DISK_ROWS,
    ENGINE_RESULT,
    INDEX_RESULT,
    LAYERS_RESULT,
    REPLAY_ROWS,
    SCALE_RESULT,
    TRANSFER_ROWS,
)

PNG = b"\x89PNG\r\n"


def test_a_transfer_figure_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_transfer(tmp_path / "t.png", TRANSFER_ROWS)
    assert (tmp_path / "t.png").read_bytes().startswith(PNG)


def test_an_index_figure_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_index(tmp_path / "i.png", INDEX_RESULT)
    assert (tmp_path / "i.png").read_bytes().startswith(PNG)


def test_a_disk_figure_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_disk(tmp_path / "d.png", DISK_ROWS)
    assert (tmp_path / "d.png").read_bytes().startswith(PNG)


def test_a_scale_figure_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_scale(tmp_path / "s.png", SCALE_RESULT)
    assert (tmp_path / "s.png").read_bytes().startswith(PNG)


def test_a_layers_figure_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_layers(tmp_path / "l.png", LAYERS_RESULT)
    assert (tmp_path / "l.png").read_bytes().startswith(PNG)


def test_a_replay_figure_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_replay(tmp_path / "r.png", REPLAY_ROWS)
    assert (tmp_path / "r.png").read_bytes().startswith(PNG)


def test_an_engine_figure_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_engine(tmp_path / "e.png", ENGINE_RESULT)
    assert (tmp_path / "e.png").read_bytes().startswith(PNG)


def test_without_matplotlib_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what Python takes as "can't be imported"
    with pytest.raises(ConfigError, match=r"^--plot needs matplotlib.*kvstore-llm\[bench\]$"):
        require_plot(tmp_path / "t.png")


def test_an_unknown_picture_format_is_named_with_the_known_ones(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match=r"t\.gif: no known picture format; allowed: \.png, \.svg, \.pdf"):
        require_plot(tmp_path / "t.gif")
