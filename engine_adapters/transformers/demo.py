"""The demo: one worker computes a long prompt, another answers it from the store.

    python -m engine_adapters.transformers.demo --json build/demo.json

Starts a real kvstore-server and two worker processes (worker.py) with real weights. The prefill worker computes the KV
of a prompt and stores it; the decode worker, which never saw the prompt, fetches it and answers, then answers the same
prompt cold, and a second prompt that begins like the first one. Last, half of a third prompt comes over a slow link,
before the model computes the rest, and while it does. Prints a table, writes JSON, fails if anything differs.
"""

import argparse
import json
import os
import platform
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

HIT_RUNS: Final = 7
COLD_RUNS: Final = 3
DRAM: Final = "512MiB"  # the KV of three prompts of 80 MB, and room
SPINNER: Final = "|/-\\"
QUESTION: Final = "Summarise the text in one sentence."
SECOND_QUESTION: Final = "Who is Dinah?"
THIRD_QUESTION: Final = "Where does it happen?"
LINK_RUNS: Final = 3
LINK_TIMEOUT_S: Final = 60.0  # the link is slow on purpose
LINK_LOAD: Final = 2.0  # transfer of the cached half over computing the other half


class DemoError(Exception):
    """Something is wrong; the message is one line that says what."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Three prompts. The second one has the first half of the first one's text; the third one its first and its last
    quarter, of which the store has the first.
    """

    first: str
    second: str
    third: str


def main(argv: list[str] | None = None) -> int:
    """Run the demo. 0: all as promised; 1: something is wrong, said in one line; 130: interrupted."""
    arguments = _arguments(argv)
    try:
        result = run(_prompts(arguments.paragraphs), arguments.threads, arguments.new_tokens)
    except DemoError as wrong:
        print(f"\ndemo failed: {wrong}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print(table(result))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
        print(f"\nwritten to {arguments.json}")
    problems = check(result)
    for problem in problems:
        print(f"demo failed: {problem}", file=sys.stderr)
    return 1 if problems else 0


def run(prompts: Prompts, threads: int, new_tokens: int) -> dict[str, Any]:
    """Server, workers, measurements; the result as it is written to JSON. Raises DemoError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-demo-")))
        with progress("server", "starting"):
            address = stack.enter_context(_server(folder))
        prefill = stack.enter_context(_worker("prefill worker", folder))
        loaded = prefill.do("load", threads=threads)  # alone, so that a first conversion of the weights happens once
        decode = stack.enter_context(_worker("decode worker", folder))
        decode.do("load", threads=threads)
        for worker in (prefill, decode):
            worker.do("connect", address=address)
        decode.do("warm_up", prompt=prompts.first)

        prefilled = prefill.do("prefill", prompt=prompts.first)
        hits = [decode.do("answer", prompt=prompts.first, way="fetch", new_tokens=new_tokens, label="hit")]
        hits += [_first_token(decode, prompts.first, "fetch") for _ in range(HIT_RUNS - 1)]
        colds = [decode.do("answer", prompt=prompts.first, way="cold", new_tokens=new_tokens, label="cold")]
        colds += [_first_token(decode, prompts.first, "cold") for _ in range(COLD_RUNS - 1)]
        compared = decode.do("compare", one="hit", other="cold")

        shared = decode.do("shared_tokens", one=prompts.first, other=prompts.second)["tokens"]
        second = decode.do("answer", prompt=prompts.second, way="fetch", new_tokens=new_tokens, label="second")
        second_cold = decode.do("answer", prompt=prompts.second, way="cold", new_tokens=new_tokens, label="cold")
        slow = _over_a_slow_link(decode, address, folder, prompts, new_tokens)
        memcpy = decode.do("memcpy", size_bytes=hits[0]["bytes"] or 64 * 2**20)
    hit, cold = hits[0], colds[0]
    ttft_hit_ms, ttft_cold_ms = _median(hits, "ttft_ms"), _median(colds, "ttft_ms")
    transfer_ms = _median(hits, "transfer_ms")
    gib_s = _gib_s(hit["bytes"], transfer_ms)
    return {
        "command": "demo",
        "arguments": {"threads": threads, "new_tokens": new_tokens, "hit_runs": HIT_RUNS, "cold_runs": COLD_RUNS},
        "versions": {
            "python": platform.python_version(),
            "torch": loaded["torch"],
            "transformers": loaded["transformers"],
        },
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "model": loaded["model"],
        "revision": loaded["revision"],
        "dtype": loaded["dtype"],
        "threads": loaded["threads"],
        "block_tokens": loaded["block_tokens"],
        "block_bytes": loaded["block_bytes"],
        "checked": True,  # the answer, its log-probabilities and the hits of both prompts; `check` says what was wrong
        "tokens_equal": hit["tokens"] == cold["tokens"],
        "new_tokens": len(hit["tokens"]),
        "logprob_max_abs_diff": compared["logprob_max_abs_diff"],
        "prompt_tokens": hit["prompt_tokens"],
        "hit_tokens": hit["hit_tokens"],
        "ttft_cold_ms": ttft_cold_ms,
        "ttft_hit_ms": ttft_hit_ms,
        "ttft_hit_first_ms": hit["ttft_ms"],
        "ttft_speedup": ttft_cold_ms / ttft_hit_ms,
        "lookup_ms": _median(hits, "lookup_ms"),
        "transfer_ms": transfer_ms,
        "unpack_ms": _median(hits, "unpack_ms"),
        "bytes_moved": hit["bytes"],
        "gib_s": gib_s,
        "limit_gib_s": memcpy["gib_s"],
        "ratio_to_limit": gib_s / memcpy["gib_s"],
        "prefill_compute_ms": prefilled["compute_ms"],
        "prefill_store_ms": prefilled["store_ms"],
        "prefill_stored_blocks": prefilled["stored_blocks"],
        "prefill_missing_blocks": prefilled["missing_blocks"],
        "answer": hit["text"],
        "second_prompt_tokens": second["prompt_tokens"],
        "second_shared_tokens": shared,
        "second_hit_tokens": second["hit_tokens"],
        "second_tokens_equal": second["tokens"] == second_cold["tokens"],
        "second_ttft_cold_ms": second_cold["ttft_ms"],
        "second_ttft_hit_ms": second["ttft_ms"],
        "second_answer": second["text"],
        **slow,
    }


def _over_a_slow_link(
    decode: "WorkerProcess", address: str, folder: Path, prompts: Prompts, new_tokens: int
) -> dict[str, Any]:
    """The third prompt, half of which is in the store, over a link that takes `LINK_LOAD` times as long for that half
    as the model for the other one.
    """
    prompt = prompts.third
    shared = decode.do("shared_tokens", one=prompts.first, other=prompt)["tokens"]
    cold = decode.do("answer", prompt=prompt, way="cold", new_tokens=new_tokens, label="cold")
    decode.do("connect", address=address, transport="tcp", timeout_s=LINK_TIMEOUT_S)
    unlimited = [_first_token(decode, prompt, "fetch") for _ in range(LINK_RUNS)]
    hit_bytes = unlimited[0]["bytes"]
    if not hit_bytes:
        raise DemoError("nothing of the third prompt is in the store")
    link_bytes_s = hit_bytes / (LINK_LOAD * _median(unlimited, "compute_ms") / 1e3)
    with _slow_link(address, link_bytes_s, folder) as slow_address:
        decode.do("connect", address=slow_address, transport="tcp", timeout_s=LINK_TIMEOUT_S)
        fetches: list[dict[str, Any]] = []
        streams: list[dict[str, Any]] = []
        for _ in range(LINK_RUNS):
            fetches.append(_first_token(decode, prompt, "fetch"))
            streams.append(_first_token(decode, prompt, "stream"))
        streamed = decode.do("answer", prompt=prompt, way="stream", new_tokens=new_tokens, label="stream")
        compared = decode.do("compare", one="stream", other="cold")
    fetch_ms, stream_ms = _median(fetches, "ttft_ms"), _median(streams, "ttft_ms")
    return {
        "third_prompt_tokens": streamed["prompt_tokens"],
        "third_shared_tokens": shared,
        "third_hit_tokens": streamed["hit_tokens"],
        "third_bytes_moved": streamed["bytes"],
        "third_tokens_equal": streamed["tokens"] == cold["tokens"],
        "third_logprob_max_abs_diff": compared["logprob_max_abs_diff"],
        "link_bytes_s": link_bytes_s,
        "link_hiding_bytes_s": link_bytes_s * LINK_LOAD,
        "ttft_fetch_then_compute_ms": fetch_ms,
        "ttft_stream_ms": stream_ms,
        "stream_gain": 1 - stream_ms / fetch_ms,
        "fetch_transfer_ms": _median(fetches, "transfer_ms"),
        "fetch_compute_ms": _median(fetches, "compute_ms"),
        "stream_wait_ms": _median(streams, "transfer_ms"),
        "stream_compute_ms": _median(streams, "compute_ms"),
    }


def check(result: dict[str, Any]) -> list[str]:
    """What is wrong with a result, one line each."""
    block = result["block_tokens"]
    problems: list[str] = []
    for name, tokens, usable in (
        ("", result["prompt_tokens"], result["prompt_tokens"] - 1),
        ("second_", result["second_prompt_tokens"], result["second_shared_tokens"]),
        ("third_", result["third_prompt_tokens"], result["third_shared_tokens"]),
    ):
        wanted = usable // block * block
        if result[f"{name}hit_tokens"] != wanted:
            problems.append(f"{name}hit_tokens is {result[f'{name}hit_tokens']} of {tokens}: expected {wanted}")
        if not result[f"{name}tokens_equal"]:
            problems.append(f"{name}tokens_equal is false: the answer from the store differs from the cold one")
    return problems


def table(result: dict[str, Any]) -> str:
    """The result for a reader."""
    computed = result["prompt_tokens"] - result["hit_tokens"]
    speed = f"{result['gib_s']:.1f} GiB/s, memcpy here {result['limit_gib_s']:.1f}"
    shared = f"{result['second_shared_tokens']:,} of {result['second_prompt_tokens']:,} tokens as in the first"
    rows = [
        ("", "cold", "from the store", ""),
        (
            "time to first token",
            _ms(result["ttft_cold_ms"]),
            _ms(result["ttft_hit_ms"]),
            _times(result["ttft_speedup"]),
        ),
        ("  lookup", "", _ms(result["lookup_ms"]), ""),
        ("  transfer", "", _ms(result["transfer_ms"]), speed),
        ("  unpack", "", _ms(result["unpack_ms"]), "blocks into the model's tensors"),
        ("bytes moved", "0", f"{result['bytes_moved'] / 2**20:.1f} MiB", ""),
        ("tokens computed", f"{result['prompt_tokens']:,}", f"{computed:,}", ""),
        ("tokens from the store", "0", f"{result['hit_tokens']:,}", f"whole blocks of {result['block_tokens']}"),
        ("second prompt", _ms(result["second_ttft_cold_ms"]), _ms(result["second_ttft_hit_ms"]), shared),
        ("  tokens from the store", "0", f"{result['second_hit_tokens']:,}", ""),
    ]
    prefilled = (
        f"Prefill worker: {result['prompt_tokens']:,} tokens in {_ms(result['prefill_compute_ms'])}, then "
        f"{result['prefill_stored_blocks']} blocks stored in {_ms(result['prefill_store_ms'])}."
    )
    largest = f"{max(result['logprob_max_abs_diff'], result['third_logprob_max_abs_diff']):.1e}"
    slow = (
        f"A third prompt of {result['third_prompt_tokens']:,} tokens, {result['third_hit_tokens']:,} of them in the store, "
        f"over a link of {result['link_bytes_s'] / 1e6:,.0f} MB/s,"
    )
    link_rows = [
        ("", "all", "waiting", "computing", ""),
        (
            "fetch, then compute",
            _ms(result["ttft_fetch_then_compute_ms"]),
            _ms(result["fetch_transfer_ms"]),
            _ms(result["fetch_compute_ms"]),
            "",
        ),
        (
            "layer stream",
            _ms(result["ttft_stream_ms"]),
            _ms(result["stream_wait_ms"]),
            _ms(result["stream_compute_ms"]),
            f"{result['stream_gain']:.0%} sooner",
        ),
    ]
    tokens = f"{result['new_tokens']} tokens" if result["tokens_equal"] else "NOT the same tokens"
    return "\n".join(
        [
            "",
            f"{result['model']}, {result['dtype']}, {result['threads']} threads a worker",
            prefilled,
            "Decode worker, which had never seen the prompt:",
            "",
            *(f"  {name:<26}{cold:>10}{hit:>16}   {note}".rstrip() for name, cold, hit, note in rows),
            "",
            slow,
            f"half of what would hide the transfer behind computing the rest ({result['link_hiding_bytes_s'] / 1e6:,.0f} MB/s):",
            "",
            *(f"  {n:<22}{a:>10}{w:>12}{c:>12}   {note}".rstrip() for n, a, w, c, note in link_rows),
            "",
            f"Same answer both ways ({tokens}; no log-probability differs by more than {largest}):",
            f"  {result['answer'].strip()}",
            "",
            "Times are from the prompt's text to the first token, after a warm-up of both ways with another prompt of the",
            f"same length: medians of {COLD_RUNS} cold and {HIT_RUNS} stored runs; the second prompt ran once each way,",
            f"the third one {LINK_RUNS} times by turns, through a relay that limits the bandwidth.",
        ]
    )


@contextmanager
def progress(who: str, what: str) -> Iterator["Step"]:
    """Show that `who` does `what` while the block runs, and how long it took when it is done."""
    step = Step(who, what, terminal=sys.stdout.isatty())
    yield step
    step.done()


class Step:
    """One line of progress: a spinner on a terminal, else a line after 2, 4, 8 ... seconds."""

    def __init__(self, who: str, what: str, *, terminal: bool) -> None:
        self._who, self._what, self._terminal = who, what, terminal
        self._started_s = time.monotonic()
        self._next_s = 2.0
        self._ticks = 0

    def says(self, what: str) -> None:
        """The step has got this far."""
        self._what = what
        self._show(force=True)

    def tick(self) -> None:
        """Time has passed."""
        self._show(force=False)

    def done(self) -> None:
        """The step has ended; steps that took no time leave no trace."""
        took_s = time.monotonic() - self._started_s
        if self._terminal:
            print("\r\033[K", end="")
        if took_s >= 0.5:
            print(f"{self._who}: {self._what}, {took_s:.1f} s", flush=True)

    def _show(self, *, force: bool) -> None:
        running_s = time.monotonic() - self._started_s
        line = f"{self._who}: {self._what} ... {running_s:.0f} s"
        if self._terminal:
            self._ticks += 1
            print(f"\r\033[K{SPINNER[self._ticks % len(SPINNER)]} {line}", end="", flush=True)
        elif not force and running_s >= self._next_s:
            self._next_s *= 2
            print(line, flush=True)


class WorkerProcess:
    """A worker process, spoken to in JSON lines over pipes."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self._name, self._process, self._log = name, process, log
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def do(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Run a command and wait for its reply, showing progress. Raises DemoError with the worker's own words."""
        assert self._process.stdin is not None
        with progress(self._name, command.replace("_", " ")) as step:
            try:
                self._process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
                self._process.stdin.flush()
            except OSError as cause:
                raise DemoError(f"{self._name} ended: {self._last_words()}") from cause
            while True:
                try:
                    line = self._lines.get(timeout=0.2)
                except queue.Empty:
                    step.tick()
                    continue
                if not line:
                    raise DemoError(f"{self._name} ended during {command}: {self._last_words()}")
                match json.loads(line):
                    case {"progress": text}:
                        step.says(text)
                    case {"error": text}:
                        raise DemoError(f"{self._name}, {command}: {text}")
                    case {"reply": reply}:
                        return reply
                    case other:
                        raise DemoError(f"{self._name}, {command}: unexpected answer {other}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _last_words(self) -> str:
        return _last_line(self._log) or f"exit status {self._process.wait()}"


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    """A kvstore-server on free ports, with all its files in `folder`; its control address."""
    log = folder / "server.log"
    flags = ["--dram", DRAM, "--data-dir", str(folder / "data"), "--runtime-dir", str(folder / "run")]
    for port in ("control", "data", "http"):
        flags += [f"--{port}-port", "0"]
    command = [sys.executable, "-m", "kvstore.server.cli", *flags]
    with log.open("w") as stderr, _child(command, stdout=subprocess.PIPE, stderr=stderr) as process:
        assert process.stdout is not None
        endpoints: dict[str, str] = {}
        for line in process.stdout:
            if line.strip() == "ready":
                break
            name, _, endpoint = line.strip().partition(" ")
            endpoints[name] = endpoint.strip()
        if "control" not in endpoints:
            raise DemoError(f"the server ended at its start: {_last_line(log)}")
        yield endpoints["control"]


@contextmanager
def _slow_link(address: str, bytes_s: float, folder: Path) -> Iterator[str]:
    """A relay in front of the server that carries so much; the address to connect to."""
    log = folder / "relay.log"
    command = [sys.executable, "-m", "kvstore.testing.relay", address, f"{bytes_s:.0f}"]
    with log.open("w") as stderr, _child(command, stdout=subprocess.PIPE, stderr=stderr) as process:
        assert process.stdout is not None
        slow_address = process.stdout.readline().strip()
        if not slow_address:
            raise DemoError(f"the relay ended at its start: {_last_line(log)}")
        yield slow_address


@contextmanager
def _worker(name: str, folder: Path) -> Iterator[WorkerProcess]:
    log = folder / f"{name.replace(' ', '-')}.log"
    with (
        log.open("w") as stderr,
        _child(
            [sys.executable, "-m", "engine_adapters.transformers.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        ) as process,
    ):
        yield WorkerProcess(name, process, log)


@contextmanager
def _child(command: list[str], **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """A child in a session of its own, so that Ctrl-C reaches only us; it is gone when the block ends."""
    with subprocess.Popen(command, text=True, start_new_session=True, **streams) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                process.kill()
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # a command that a dead worker never took
                    process.stdin.close()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _first_token(decode: WorkerProcess, prompt: str, way: str) -> dict[str, Any]:
    return decode.do("answer", prompt=prompt, way=way, new_tokens=1, label="timing")


def _prompts(most: int) -> Prompts:
    text = resources.files("engine_adapters.transformers").joinpath("alice.txt").read_text()
    paragraphs = text.strip().split("\n\n")[:most]
    half = paragraphs[: len(paragraphs) // 2]
    whole = "\n\n".join(paragraphs)
    quarter = len(whole) // 4
    return Prompts(
        first=_prompt(paragraphs, QUESTION),
        second=_prompt(half, SECOND_QUESTION),
        third=_prompt([whole[:quarter], whole[-quarter:]], THIRD_QUESTION),
    )


def _prompt(paragraphs: list[str], question: str) -> str:
    return "\n\n".join(["Read this text.", *paragraphs, question])


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"


def _times(speedup: float) -> str:
    return f"{speedup:.1f} times faster"


def _median(answers: list[dict[str, Any]], name: str) -> float:
    return statistics.median(answer[name] for answer in answers)


def _gib_s(size_bytes: int, milliseconds: float) -> float:
    return size_bytes / 2**30 / (milliseconds / 1e3) if milliseconds else 0.0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description="A real model through the store, in two processes.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))), help="of torch, a worker")
    parser.add_argument("--new-tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--paragraphs", type=int, default=99, help="most paragraphs of the text in the prompt")
    arguments = parser.parse_args(argv)
    for name, least in (("threads", 1), ("new_tokens", 1), ("paragraphs", 2)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}: allowed is {least} or more")
    return arguments


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(143))  # unwinds, so that the children end too
    sys.exit(main())
