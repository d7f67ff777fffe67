"""Telling the user where a run stands: a bar on a terminal (with rich), else a plain line a step. Always on stderr."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """A run of known length."""

    def note(self, text: str) -> None:
        """Something else happens now."""
        ...

    def step(self, text: str) -> None:
        """One step is done; `text` is its outcome."""
        ...

    def part(self, share: float) -> None:
        """So much of the current step is done."""
        ...


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """Progress over `total` steps."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        with _rich_bar(total) as bar:
            yield bar
    else:
        yield PlainLines(total)


class PlainLines:
    """One line a step: for logs, and where rich is missing."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0

    def note(self, text: str) -> None:
        """Print the text."""
        print(text, file=sys.stderr, flush=True)

    def step(self, text: str) -> None:
        """Print the text behind a counter."""
        self._done += 1
        print(f"[{self._done}/{self._total}] {text}", file=sys.stderr, flush=True)

    def part(self, share: float) -> None:
        """Nothing: a log wants whole steps."""


@contextmanager
def _rich_bar(total: int) -> Iterator[Progress]:
    rich_progress = importlib.import_module("rich.progress")
    console = importlib.import_module("rich.console").Console(stderr=True)
    columns = (
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("{task.description}"),
    )
    with rich_progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)

        class Bar:
            def __init__(self) -> None:
                self._done = 0

            def note(self, text: str) -> None:
                bar.update(task, description=text)

            def step(self, text: str) -> None:
                self._done += 1
                bar.update(task, description=text, completed=self._done)

            def part(self, share: float) -> None:
                bar.update(task, completed=self._done + share)

        yield Bar()
