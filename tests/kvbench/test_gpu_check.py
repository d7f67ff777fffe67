"""`bench/gpu_check` on the host device: the same steps as on a GPU, smaller."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvbench.gpu_check as module
from kvbench.gpu_check import NO_DEVICE, GpuRow, Outcome, Plan, main
from kvstore.core.errors import ConfigError
from kvstore.device.base import Copies, Memory
from kvstore.device.host import HostDevice, HostTicket
from tests.docs.pages import ROOT

SMALL = ["--device", "host", "--link", "8MiB", "--block", "64KiB", "--blocks", "8", "--seconds", "0.01"]
ROWS = [
    "pageable pool to device",
    "registered pool to device",
    "device to registered pool",
    "put from device",
    "get_into from DRAM",
    "get_into from the segment",
    "layer stream from DRAM",
    "layer stream over loopback TCP",
]


def instead_of_tests(monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> None:
    """A test that runs all the other tests takes a while: once is enough."""

    def run_tests(_: str) -> Outcome:
        return outcome

    monkeypatch.setattr(module, "run_tests", run_tests)


def test_every_copy_is_measured_beside_the_link_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    instead_of_tests(monkeypatch, Outcome(passed=5, failed=0, skipped=0))
    assert main([*SMALL, "--json", str(tmp_path / "gpu.json")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("tests on host: 5 passed, 0 failed, 0 skipped\n")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["what"] for row in written["rows"]] == ROWS
    assert written["checked"] is True
    assert written["tests"] == {"passed": 5, "failed": 0, "skipped": 0}
    for row in written["rows"]:
        assert row["gib_s"] > 0
        assert row["ratio_to_limit"] == pytest.approx(row["gib_s"] / row["limit_gib_s"])
        assert row["what"] in printed


@pytest.mark.parametrize(
    ("tests", "code"),
    [(Outcome(5, 0, 0), 0), (Outcome(4, 1, 0), 1), (Outcome(4, 0, 1), 1), (Outcome(0, 0, 0), 1)],
    ids=str,
)
def test_a_test_that_failed_or_did_not_run_is_no_proof(
    tests: Outcome, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(_: Plan) -> list[GpuRow]:
        return []

    instead_of_tests(monkeypatch, tests)
    monkeypatch.setattr(module, "measure", nothing)
    assert main(SMALL) == code


@pytest.mark.slow
def test_the_tests_are_run_and_counted() -> None:
    tests = module.run_tests("host")
    assert tests.good
    assert tests.passed > 10


def test_wrong_bytes_are_no_figure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(HostDevice):
        def copy(self, target: Memory, source: Memory, copies: Copies) -> HostTicket:
            half = Copies(copies.target_offsets, copies.source_offsets, copies.sizes // 2)
            return super().copy(target, source, half)

    def forgetful(_: str) -> HostDevice:
        return Forgetful()

    monkeypatch.setattr(module, "open_device", forgetful)
    assert main([*SMALL, "--no-tests"]) == 1
    assert capsys.readouterr().err == "gpu_check: pageable pool to device: wrong bytes\n"


def test_without_the_device_one_line_says_so_and_the_code_is_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ConfigError('device "cuda:0" asked for, but there is none')

    monkeypatch.setattr(module, "require_device", missing)
    assert main([]) == NO_DEVICE
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", 'gpu_check: device "cuda:0" asked for, but there is none\n')


@pytest.mark.parametrize("flags", [["--device", "gpu"], ["--device", "host", "--json", "no/such/folder.json"]])
def test_wrong_flags_are_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_script_stands_on_its_own() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "bench/gpu_check"), "--help"], capture_output=True, check=True)
    assert b"--device" in done.stdout
