"""The demo keeps its promises, says what is wrong in one line, and leaves no process behind."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("transformers", reason="the demo needs transformers")

from engine_adapters.transformers.demo import check, main

GOOD = {
    "block_tokens": 16,
    "prompt_tokens": 1025,
    "hit_tokens": 1024,
    "tokens_equal": True,
    "second_prompt_tokens": 600,
    "second_shared_tokens": 520,
    "second_hit_tokens": 512,
    "second_tokens_equal": True,
    "third_prompt_tokens": 500,
    "third_shared_tokens": 250,
    "third_hit_tokens": 240,
    "third_tokens_equal": True,
}


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first run on a machine converts the weights
def test_a_prompt_prefilled_in_one_process_is_answered_alike_in_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "folder" / "demo.json"
    assert main(["--json", str(file), "--paragraphs", "4", "--new-tokens", "8"]) == 0
    result = json.loads(file.read_text())
    assert result["tokens_equal"]
    assert result["second_tokens_equal"]
    assert result["logprob_max_abs_diff"] < 1e-3
    assert result["hit_tokens"] == (result["prompt_tokens"] - 1) // 16 * 16 > 256
    assert result["second_hit_tokens"] == result["second_shared_tokens"] // 16 * 16 < result["hit_tokens"]
    assert result["bytes_moved"] == result["hit_tokens"] // 16 * result["block_bytes"]
    assert result["third_tokens_equal"]
    assert result["third_logprob_max_abs_diff"] < 1e-4
    assert result["third_hit_tokens"] == result["third_shared_tokens"] // 16 * 16 > 0
    assert result["third_bytes_moved"] == result["third_hit_tokens"] // 16 * result["block_bytes"]
    assert result["link_bytes_s"] * 2 == pytest.approx(result["link_hiding_bytes_s"])
    assert result["fetch_transfer_ms"] >= result["third_bytes_moved"] / result["link_bytes_s"] * 1e3 * 0.95
    shown = capsys.readouterr().out
    assert "times faster" in shown
    assert "layer stream" in shown
    assert result["answer"].strip() in shown


def test_a_result_as_promised_has_no_problems() -> None:
    assert check(GOOD) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"tokens_equal": False}, "tokens_equal is false: the answer from the store differs from the cold one"),
        ({"hit_tokens": 1008}, "hit_tokens is 1008 of 1025: expected 1024"),
        ({"second_hit_tokens": 528}, "second_hit_tokens is 528 of 600: expected 512"),
        (
            {"third_tokens_equal": False},
            "third_tokens_equal is false: the answer from the store differs from the cold one",
        ),
        ({"third_hit_tokens": 0}, "third_hit_tokens is 0 of 500: expected 240"),
    ],
)
def test_a_broken_promise_is_one_line(change: dict[str, object], line: str) -> None:
    assert check({**GOOD, **change}) == [line]


@pytest.mark.parametrize("flag", ["--threads", "--new-tokens", "--paragraphs"])
def test_a_flag_out_of_range_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([flag, "0"])
    assert f"{flag} 0: allowed is" in capsys.readouterr().err


@pytest.fixture
def running_demo() -> Iterator[subprocess.Popen[str]]:
    """A demo whose server and first worker run."""
    command = [sys.executable, "-m", "engine_adapters.transformers.demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("prefill worker"):
                break
        yield demo


@pytest.mark.slow
def test_a_worker_that_dies_is_named_and_ends_the_demo(running_demo: subprocess.Popen[str]) -> None:
    children = psutil.Process(running_demo.pid).children()
    [worker] = [child for child in children if child.cmdline()[-1] == "engine_adapters.transformers.worker"]
    worker.kill()
    errors = running_demo.communicate(timeout=30)[1]
    assert running_demo.returncode == 1
    assert errors.strip() == "demo failed: prefill worker ended during load: exit status -9"


@pytest.mark.slow
def test_ctrl_c_ends_every_process(running_demo: subprocess.Popen[str]) -> None:
    children = psutil.Process(running_demo.pid).children(recursive=True)
    running_demo.send_signal(signal.SIGINT)
    errors = running_demo.communicate(timeout=30)[1]
    assert (running_demo.returncode, errors.strip()) == (130, "interrupted")
    assert psutil.wait_procs(children, timeout=5)[1] == []
