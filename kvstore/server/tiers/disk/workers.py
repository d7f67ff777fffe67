"""Threads for calls that wait: the disk's. What they return is handled by the one thread that owns the tier."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.transport.memory import prefault, private_arena

STUCK_S = 1.0  # a call that takes longer no longer counts as a thread at work
STUCK_MAX = 12  # threads more, at most, while calls are stuck

Scratch = NDArray[np.uint8]
Work = Callable[[Scratch], Any]  # in a thread; its argument is that thread's page-aligned memory
Done = Callable[[Any, Exception | None], None]  # in the owner; what `Work` returned, or its failure


@dataclass(slots=True)
class _Job:
    work: Work
    done: Done


class Inbox:
    """Finished jobs of all pools, and a descriptor that becomes readable when there are some."""

    def __init__(self) -> None:
        self._finished: queue.SimpleQueue[tuple[_Job, Any, Exception | None]] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def put(self, job: _Job, result: Any, error: Exception | None) -> None:
        """From a thread."""
        self._finished.put((job, result, error))
        os.eventfd_write(self.fd, 1)

    def handle(self) -> int:
        """Run `done` of every finished job; how many."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return 0
        handled = 0
        while True:
            try:
                job, result, error = self._finished.get_nowait()
            except queue.Empty:
                return handled
            job.done(result, error)
            handled += 1


class Workers:
    """Some threads and their queue. A call that hangs keeps one thread busy, and another takes its place.

    Args:
        threads: calls in flight at once.
        scratch_bytes: memory of each thread, present from its start on.
    """

    def __init__(self, name: str, threads: int, inbox: Inbox, scratch_bytes: int = 0) -> None:
        self._name = name
        self._threads = threads
        self._scratch_bytes = scratch_bytes
        self._inbox = inbox
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._since_s: list[float] = []  # when each thread took up its job; 0 = it waits for one
        self.unfinished = 0
        for _ in range(threads):
            self._start_thread()

    def submit(self, work: Work, done: Done) -> None:
        """Run `work` in a thread, then `done` in the owner."""

        def counted(result: Any, error: Exception | None) -> None:
            self.unfinished -= 1
            done(result, error)

        self.unfinished += 1
        self._jobs.put(_Job(work, counted))

    @property
    def stuck(self) -> int:
        """Calls that hang now."""
        limit_s = time.monotonic() - STUCK_S
        return sum(0.0 < since_s < limit_s for since_s in self._since_s)

    def replace_stuck(self) -> None:
        """Start a thread for each call that hangs while others wait."""
        if not self._jobs.empty() and len(self._since_s) < min(self.stuck, STUCK_MAX) + self._threads:
            self._start_thread()

    def close(self) -> None:
        """End the threads once the queue is empty. Those that hang are left to the end of the process."""
        for _ in self._since_s:
            self._jobs.put(None)

    def _start_thread(self) -> None:
        number = len(self._since_s)
        self._since_s.append(0.0)
        threading.Thread(target=self._run, args=(number,), name=f"{self._name}-{number}", daemon=True).start()

    def _run(self, number: int) -> None:
        scratch = private_arena(self._scratch_bytes)
        prefault(scratch)
        while (job := self._jobs.get()) is not None:
            self._since_s[number] = time.monotonic()
            result, failure = None, None
            try:
                result = job.work(scratch)
            except Exception as error:  # noqa: BLE001 -- handed to the owner, who decides
                failure = error
            self._since_s[number] = 0.0
            self._inbox.put(job, result, failure)
