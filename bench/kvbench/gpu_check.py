"""`bench/gpu_check`: all that needs a GPU, in one go: the tests marked `gpu`, then copies beside the link's limit.

The limit is one copy of 1 GiB between registered (page-locked) host memory and the device: what the link gives. Each
row is timed in turn with it, in the same direction, and what arrived is compared byte for byte.

Exit codes: 0 all is well; 1 a test failed or was skipped, or bytes were wrong; 2 wrong flags; 3 no such device here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kvstore
from kvbench.errors import BenchError
from kvbench.report import envelope, print_table, require_writable, write_json
from kvbench.sampling import Samples, alternate
from kvstore.core.errors import ConfigError, KvStoreError
from kvstore.core.sizes import format_size, parse_size
from kvstore.device.base import Copies, Device, Memory, host_memory
from kvstore.device.opening import HOST, open_device, require_device
from kvstore.testing.cluster import ServerProcess
from kvstore.testing.waiting import until
from kvstore.transport.memory import create_segment, map_segment, prefault

ROOT = Path(__file__).parents[2]
NO_DEVICE = 3
COPY_TIMEOUT_S = 60.0
HOT_TIMEOUT_S = 60.0
STREAM_LAYERS = 8  # that blocks are divided into for layer streams
_GIB = 1 << 30

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the test run came to."""

    passed: int
    failed: int
    skipped: int

    @property
    def good(self) -> bool:
        """All ran, and there were some."""
        return self.passed > 0 and not self.failed and not self.skipped


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One kind of copy beside the link."""

    what: str
    blocks: int
    block_bytes: int
    gib_s: float
    p50_us: float
    limit_gib_s: float
    ratio_to_limit: float
    checked: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    device: str
    link_bytes: int
    blocks: int
    block_bytes: int
    seconds: float

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return self.blocks * self.block_bytes


class Link:
    """Both ends of the limit: registered host memory and as much of the device's."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._array: U8 = np.ones(nbytes, dtype=np.uint8)
        self._host = host_memory(self._array)
        device.register(self._host)
        self._memory = device.allocate(nbytes)
        zero = np.zeros(1, dtype=np.int64)
        self._whole = Copies(zero, zero, np.array([nbytes]))

    def to_device(self, _: int) -> float:
        """Seconds of one copy there."""
        return timed(lambda: finish(self._device, self._memory, self._host, self._whole))

    def to_host(self, _: int) -> float:
        """Seconds of one copy back."""
        return timed(lambda: finish(self._device, self._host, self._memory, self._whole))

    def close(self) -> None:
        """Give the memory back."""
        self._device.unregister(self._host)
        self._device.free(self._memory)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        plan = Plan(
            arguments.device,
            parse_size(arguments.link),
            arguments.blocks,
            parse_size(arguments.block),
            arguments.seconds,
        )
        if arguments.json is not None:
            require_writable("--json", arguments.json)
        require_device(plan.device)
    except ConfigError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return NO_DEVICE if "asked for, but" in str(error) else 2
    except KvStoreError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    tests = None if arguments.no_tests else run_tests(plan.device)
    try:
        rows = measure(plan)
    except (BenchError, KvStoreError, TimeoutError) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 1
    show(plan, tests, rows)
    if arguments.json is not None:
        value = envelope("gpu_check", asdict(plan), 0, checked=all(row.checked for row in rows))
        limit = f"one copy of {format_size(plan.link_bytes)} between registered host memory and the device"
        write_json(
            arguments.json,
            {
                **value,
                "limits": {"link": limit},
                "tests": None if tests is None else asdict(tests),
                "rows": [asdict(row) for row in rows],
            },
        )
    return 0 if tests is None or tests.good else 1


def run_tests(device: str) -> Outcome:
    """Run the tests marked `gpu` on that device; for `host`, the suite of the device port on the host."""
    chosen = ["-m", "gpu", "tests"]
    if device == HOST:
        chosen = ["-m", "not gpu and not slow", "-k", "TestHost", "tests/device/test_devices.py"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", *chosen, f"--junit-xml={report}"]
        paths = [str(ROOT), str(ROOT / "bench"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "KVSTORE_TEST_GPU": device, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
        if not report.exists():
            raise BenchError(f"the tests did not run (exit code {done.returncode}): {done.stdout[-500:]}")
        suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    if failed:
        print(done.stdout)
    for reason in {str(skipped.get("message")) for skipped in suite.iter("skipped")}:
        print(f"skipped: {reason}")
    return Outcome(count["tests"] - failed - count["skipped"], failed, count["skipped"])


def measure(plan: Plan) -> list[GpuRow]:
    """All rows.

    Raises:
        BenchError: wrong bytes, or a block that should be there is not.
        DeviceError: the device refuses.
    """
    device = open_device(plan.device)
    link = Link(device, plan.link_bytes)
    try:
        rows = measure_copies(plan, device, link)
        return rows + measure_store(plan, device, link) + measure_streams(plan, device, link)
    finally:
        link.close()
        device.close()


def measure_copies(plan: Plan, device: Device, link: Link) -> list[GpuRow]:
    """Scattered blocks between shared memory, as a pool is, and the device."""
    # Every second block of the pool, in random order, so that no two are neighbours.
    fd = create_segment("gpu-check-pool", 2 * plan.nbytes)
    pool = map_segment(fd, writable=True)
    os.close(fd)
    prefault(pool)
    pool[:] = np.random.default_rng(0).integers(0, 256, len(pool), dtype=np.uint8)
    places = np.random.default_rng(1).permutation(plan.blocks).astype(np.int64) * 2 * plan.block_bytes
    together = np.arange(plan.blocks, dtype=np.int64) * plan.block_bytes
    memory, host = device.allocate(plan.nbytes), host_memory(pool)
    there = Copies.of_blocks(together, places, plan.block_bytes)
    back = Copies.of_blocks(places, together, plan.block_bytes)
    expected = pool.reshape(-1, plan.block_bytes)[places // plan.block_bytes].copy()
    rows: list[GpuRow] = []
    for what, registered in (("pageable pool to device", False), ("registered pool to device", True)):
        if registered:
            device.register(host)
        samples = alternate(
            lambda _: timed(lambda: finish(device, memory, host, there)), link.to_device, seconds=plan.seconds
        )
        require_equal(what, contents(device, memory, plan), expected)
        rows.append(row(plan, what, samples))
    pool[:] = 0
    samples = alternate(lambda _: timed(lambda: finish(device, host, memory, back)), link.to_host, seconds=plan.seconds)
    require_equal("device to pool", pool.reshape(-1, plan.block_bytes)[places // plan.block_bytes], expected)
    rows.append(row(plan, "device to registered pool", samples))
    device.unregister(host)
    device.free(memory)
    return rows


def measure_store(plan: Plan, device: Device, link: Link) -> list[GpuRow]:
    """The same through the SDK and a real server: from its pool, from its segment, and into it."""
    space = kvstore.Namespace(
        model="gpu-check",
        revision="1",
        dtype="uint8",
        block_tokens=1,
        layout=kvstore.OpaqueLayout(tag="t", layers=1, layer_bytes_per_block=plan.block_bytes),
    )
    size = format_size(max(8 * plan.nbytes, 256 << 20))
    rows: list[GpuRow] = []
    # Two servers: what is read again and again from the first would come from its segment if it had one.
    for what, device_name in (("get_into from DRAM", ""), ("get_into from the segment", plan.device)):
        with (
            ServerProcess(dram=size, gpu=device_name, gpu_bytes=size) as server,
            kvstore.connect(server.address, namespace=space, device=device, timeout_s=COPY_TIMEOUT_S) as client,
        ):
            server.wait_warm()
            rows += _measure_client(plan, device, link, client, what, near=bool(device_name))
    return rows


def _measure_client(
    plan: Plan, device: Device, link: Link, client: kvstore.Client, what: str, *, near: bool
) -> list[GpuRow]:
    data = np.random.default_rng(2).integers(0, 256, (plan.blocks, plan.block_bytes), dtype=np.uint8)
    keys = client.keys(np.arange(plan.blocks))
    memory = device.allocate(plan.nbytes)
    zero = np.zeros(1, dtype=np.int64)
    whole = Copies(zero, zero, np.array([plan.nbytes]))
    finish(device, memory, host_memory(data.reshape(-1)), whole)
    tensor = device.array(memory, data.shape)

    def put(_: int) -> float:
        client.delete(keys)
        return timed(lambda: require(client.put(keys, tensor).stored == plan.blocks, "put: blocks were refused"))

    def get(_: int) -> float:
        return timed(lambda: require(bool(client.get_into(keys, tensor).ok.all()), f"{what}: blocks are missing"))

    rows: list[GpuRow] = []
    put(0)
    if near:
        until(lambda: _all_near(client, get, plan.blocks), HOT_TIMEOUT_S, "the blocks in the segment")
    else:
        rows.append(row(plan, "put from device", alternate(put, link.to_host, seconds=plan.seconds)))
    finish(device, memory, host_memory(np.zeros(plan.nbytes, dtype=np.uint8)), whole)
    samples = alternate(get, link.to_device, seconds=plan.seconds)
    require_equal(what, contents(device, memory, plan), data)
    if near:
        require(_all_near(client, get, plan.blocks), f"{what}: blocks came from DRAM")
    device.free(memory)
    return [*rows, row(plan, what, samples)]


def measure_streams(plan: Plan, device: Device, link: Link) -> list[GpuRow]:
    """Layer streams into tensors of one layer each, from the pool and over loopback."""
    require(
        plan.block_bytes % STREAM_LAYERS == 0, f"a block of {plan.block_bytes} bytes can't have {STREAM_LAYERS} layers"
    )
    space = kvstore.Namespace(
        model="gpu-check-streams",
        revision="1",
        dtype="uint8",
        block_tokens=1,
        layout=kvstore.OpaqueLayout("t", STREAM_LAYERS, plan.block_bytes // STREAM_LAYERS),
    )
    rows: list[GpuRow] = []
    with ServerProcess(dram=format_size(max(8 * plan.nbytes, 256 << 20))) as server:
        server.wait_warm()
        for transport, where in (("shm", "from DRAM"), ("tcp", "over loopback TCP")):
            with kvstore.connect(
                server.address, namespace=space, device=device, transport=transport, timeout_s=COPY_TIMEOUT_S
            ) as client:
                rows.append(_measure_stream(plan, device, link, server, client, f"layer stream {where}"))
    return rows


def _measure_stream(
    plan: Plan, device: Device, link: Link, server: ServerProcess, client: kvstore.Client, what: str
) -> GpuRow:
    layer_bytes = plan.block_bytes // STREAM_LAYERS
    shape = (plan.blocks, STREAM_LAYERS, layer_bytes)
    data = np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
    keys = client.keys(np.arange(plan.blocks))
    client.delete(keys)
    with kvstore.connect(server.address, namespace=client.namespace) as writer:
        require(writer.put(keys, data).stored == plan.blocks, f"{what}: blocks were refused")
    memory = device.allocate(plan.nbytes)
    nothing = np.zeros(plan.nbytes, dtype=np.uint8)
    zero = np.zeros(1, dtype=np.int64)
    finish(device, memory, host_memory(nothing), Copies(zero, zero, np.array([plan.nbytes])))
    each = plan.nbytes // STREAM_LAYERS
    tensors = [
        device.array(replace(memory, address=memory.address + layer * each, nbytes=each), (plan.blocks, layer_bytes))
        for layer in range(STREAM_LAYERS)
    ]

    def receive() -> None:
        with client.layer_stream(keys, tensors) as stream:
            for layer in stream.layers:
                require(bool(stream.wait(layer).all()), f"{what}: blocks are missing")

    samples = alternate(lambda _: timed(receive), link.to_device, seconds=plan.seconds)
    got = contents(device, memory, plan).reshape(STREAM_LAYERS, plan.blocks, layer_bytes)
    require_equal(what, got, np.ascontiguousarray(data.transpose(1, 0, 2)))
    device.free(memory)
    return row(plan, what, samples)


def _all_near(client: kvstore.Client, get: Callable[[int], float], blocks: int) -> bool:
    before = client.stats()["links"][0]["segment_blocks"]
    get(0)
    return client.stats()["links"][0]["segment_blocks"] - before == blocks


def row(plan: Plan, what: str, samples: Samples) -> GpuRow:
    """The figures of one kind of copy, whose content was compared."""
    limit = samples.limit_rate(plan.link_bytes / _GIB) or 0.0
    rate = samples.rate(plan.nbytes / _GIB)
    return GpuRow(
        what, plan.blocks, plan.block_bytes, rate, samples.percentile_us(50), limit, rate / limit, checked=True
    )


def show(plan: Plan, tests: Outcome | None, rows: Sequence[GpuRow]) -> None:
    """Print the tests' outcome and the table."""
    if tests is not None:
        print(f"tests on {plan.device}: {tests.passed} passed, {tests.failed} failed, {tests.skipped} skipped")
    print(f"{plan.blocks} blocks of {format_size(plan.block_bytes)}; limit: one copy of {format_size(plan.link_bytes)}")
    head = ("copy", "GiB/s", "p50 us", "link GiB/s", "of link", "content")
    print_table(
        head,
        [
            (
                row.what,
                f"{row.gib_s:.2f}",
                f"{row.p50_us:.0f}",
                f"{row.limit_gib_s:.2f}",
                f"{row.ratio_to_limit:.2f}",
                "right" if row.checked else "-",
            )
            for row in rows
        ],
    )


def timed(action: Callable[[], object]) -> float:
    """Seconds that it takes."""
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def finish(device: Device, target: Memory, source: Memory, copies: Copies) -> None:
    """Copy, and wait for the end."""
    device.copy(target, source, copies).wait(COPY_TIMEOUT_S)


def contents(device: Device, memory: Memory, plan: Plan) -> U8:
    """A copy of the blocks that lie there."""
    array = np.zeros(plan.nbytes, dtype=np.uint8)
    zero = np.zeros(1, dtype=np.int64)
    finish(device, host_memory(array), memory, Copies(zero, zero, np.array([plan.nbytes])))
    return array.reshape(plan.blocks, plan.block_bytes)


def require_equal(what: str, got: U8, expected: U8) -> None:
    """Every byte.

    Raises:
        BenchError: some differ.
    """
    require(np.array_equal(got, expected), f"{what}: wrong bytes")


def require(good: bool, complaint: str) -> None:
    """An honest number, or none.

    Raises:
        BenchError: with that complaint.
    """
    if not good:
        raise BenchError(complaint)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description="Prove the GPU tier on this machine: its tests, then its copies beside the link."
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:0 and so on; host: the same on the host's own memory")
    parser.add_argument("--blocks", type=int, default=64, help="blocks a copy")
    parser.add_argument("--block", default="1MiB", metavar="SIZE", help="size of a block")
    parser.add_argument("--link", default="1GiB", metavar="SIZE", help="size of the one copy that is the limit")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each row")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser
