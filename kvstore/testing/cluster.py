"""A real `kvstore-server` for tests and benchmarks: free ports, folders of its own, and ways to hurt it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0
RESTART_TRIES = 5
RESTART_PAUSE_S = 1.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.02


class ServerProcess:
    """A server in processes of its own. Start it with `start` or as a context manager.

    Args:
        dram: size of the DRAM tier, as text.
        folder: where data and sockets go; a temporary one unless given, removed at the end.
        options: further settings of `kvstore-server`, underscores for dashes.
    """

    def __init__(self, dram: str = "256MiB", *, shards: int = 1, folder: Path | None = None, **options: object) -> None:
        self._own_folder = folder is None
        self._folder = folder or Path(tempfile.mkdtemp(prefix="kvs-"))
        self._settings: dict[str, object] = {"dram": dram, "shards": shards, "disk": "0", **options}
        self._ports: dict[str, object] = {"control_port": 0, "data_port": 0, "http_port": 0}
        self._process: subprocess.Popen[str] | None = None
        self.address = ""
        self.data_address = ""
        self.http_address = ""

    def start(self) -> ServerProcess:
        """Start and wait until it is ready. A second start reuses folder and ports: a restart."""
        tries_left = RESTART_TRIES if any(self._ports.values()) else 1
        while True:
            tries_left -= 1
            try:
                self._start()
                return self
            except RuntimeError:
                # While nobody listened there, somebody's outgoing connection may have got one of the ports.
                if not tries_left:
                    raise
            time.sleep(RESTART_PAUSE_S)

    def _start(self) -> None:
        settings = {
            "data_dir": self._folder / "data",
            "runtime_dir": self._folder / "run",
            **self._ports,
            **self._settings,
        }
        flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.server.cli", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        for name, endpoint in self._read_endpoints():
            match name:
                case "control":
                    self.address = endpoint
                case "data":
                    self.data_address = endpoint
                case _:
                    self.http_address = endpoint
            self._ports[f"{name}_port"] = int(endpoint.rpartition(":")[2])

    @property
    def pid(self) -> int:
        """Process id of the node."""
        return self._running().pid

    @property
    def runtime_dir(self) -> Path:
        """Folder of its local sockets."""
        return self._folder / "run"

    def pids(self) -> list[int]:
        """The node and all its processes."""
        return [self.pid, *_descendants(self.pid)]

    def status(self) -> dict[str, Any]:
        """What `/status` says."""
        return json.loads(self.http("/status"))

    def http(self, path: str) -> str:
        """A page of the HTTP port."""
        with urllib.request.urlopen(self.http_address + path, timeout=10) as answer:
            return answer.read().decode()

    def wait_warm(self, timeout_s: float = 300.0) -> None:
        """Until every page of the pools is present, for measurements."""
        _until(lambda: all(s["warm_bytes"] == s["pool_bytes"] for s in self.status()["shards"]), timeout_s, "warm")

    def kill(self) -> None:
        """SIGKILL to the node; its processes follow by themselves."""
        pids = self.pids()
        self._running().kill()
        self._reap(pids)

    def kill_all(self) -> None:
        """SIGKILL to all its processes at once, as when the machine's memory runs out: nobody cleans up."""
        pids = self.pids()
        self.freeze()  # else some would see the others' end and tidy up
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self._reap(pids)

    def kill_shard(self, shard: int = 0) -> None:
        """SIGKILL to one shard, and wait until the node has noticed; it starts the shard again."""
        victim = self.shard_pid(shard)
        os.kill(victim, signal.SIGKILL)
        _until(lambda: not Path(f"/proc/{victim}").exists(), STOP_TIMEOUT_S, f"end of shard {shard}")

    def shard_pid(self, shard: int = 0) -> int:
        """Process id of a shard."""
        pool = f"/memfd:kvstore-pool-{shard} (deleted)"  # workers have it open, too
        return next(pid for pid in self._running_module("shard.process") if pool in _open_files(pid))

    def worker_pids(self) -> list[int]:
        """Process ids of the data port's workers."""
        return self._running_module("data_port")

    def disk_worker_pids(self) -> list[int]:
        """Process ids of the shards' disk workers."""
        return self._running_module("disk.process")

    def fabric_pids(self) -> list[int]:
        """Process ids of the shards' fabric workers."""
        return self._running_module("server.fabric")

    def _running_module(self, module: str) -> list[int]:
        found: list[int] = []
        for pid in _descendants(self.pid):
            with contextlib.suppress(OSError):  # it has just ended
                if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def stop(self) -> int:
        """A clean shutdown; the exit code."""
        pids = self.pids()
        self._running().terminate()
        return self._reap(pids)

    def freeze(self) -> None:
        """SIGSTOP to all its processes."""
        for pid in self.pids():
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT to all its processes."""
        for pid in self.pids():
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """Stop if it runs, and remove its folder."""
        if self._process is not None:
            self.thaw()
            self.stop()
        if self._own_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("the server does not run")
        return self._process

    def _reap(self, pids: list[int]) -> int:
        process = self._running()
        try:
            code = process.wait(STOP_TIMEOUT_S)
        finally:
            for pid in pids[1:]:
                with contextlib.suppress(TimeoutError):
                    _until(lambda pid=pid: _ended(pid), STOP_TIMEOUT_S, f"end of process {pid}")
            if process.stdout is not None:
                process.stdout.close()
            self._process = None
        return code

    def _read_endpoints(self) -> Iterator[tuple[str, str]]:
        """The indented lines between the first one and `ready`."""
        process = self._running()
        assert process.stdout is not None
        watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            for line in process.stdout:
                if line == "ready\n":
                    return
                if line.startswith(" "):
                    name, endpoint = line.split()
                    yield name, endpoint
        finally:
            watchdog.cancel()
        code = process.wait()
        process.stdout.close()
        self._process = None
        raise RuntimeError(f"kvstore-server ended at its start with code {code}")


def _ended(pid: int) -> bool:
    """Whether a process is gone. One that nobody has waited for yet has let go of everything, once its last thread has
    ended.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(list(Path(f"/proc/{pid}/task").iterdir())) <= 1
    except OSError:
        return True


def _open_files(pid: int) -> set[str]:
    """What the descriptors of a process point to."""
    files: set[str] = set()
    with contextlib.suppress(OSError):  # it has just ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                files.add(str(link.readlink()))
    return files


def _descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name, which may hold anything) state parent ...
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def _until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)
