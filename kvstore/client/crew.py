"""Threads that are kept for the next task: to start one takes longer than to fetch a layer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

_KEPT_MAX = 8

Task = Callable[[], None]


class Crew:
    """Runs each task at once, in a daemon thread of its own; idle ones are used again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Task | None]] = []
        self._open = True

    def run(self, task: Task) -> None:
        """Begin a task. It must not raise."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is not None:
            worker.put(task)
        else:
            threading.Thread(target=self._serve, args=(task,), name=self._name, daemon=True).start()

    def close(self) -> None:
        """Let the idle threads end; the others do after their task."""
        with self._lock:
            self._open = False
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.put(None)

    def _serve(self, first: Task) -> None:
        tasks: SimpleQueue[Task | None] = SimpleQueue()
        task: Task | None = first
        while task is not None:
            task()
            del task  # what it holds on to is not needed while we wait
            with self._lock:
                if not self._open or len(self._idle) >= _KEPT_MAX:
                    return
                self._idle.append(tasks)
            task = tasks.get()
