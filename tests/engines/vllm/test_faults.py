"""200 requests through an engine with little memory, while its store is hurt in every way and requests are aborted.

The engine computes prompts in small pieces, has room for a few requests only and preempts others, so loads and saves
meet every state that a request can be in.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.testing.cluster import ServerProcess
from kvstore.testing.damage import damage_blocks
from kvstore.testing.waiting import until
from kvstore.wire.control import ControlClient
from tests.engines.vllm.models import VOCABULARY
from tests.engines.vllm.process import BLOCK_TOKENS, VllmEngine, connector
from tests.engines.vllm.truth import Truth, same

pytestmark = pytest.mark.timeout(900)

REQUESTS = 200
AT_ONCE = 4
NEW_TOKENS = 6
ANSWER_S = 60.0  # four answers, several times what they take with a store that stands still


@pytest.fixture(scope="module")
def engine(server: ServerProcess, tiny: Path) -> Iterator[VllmEngine]:
    with closing(
        VllmEngine(
            tiny,
            connector(server.address, timeout_s=0.5),
            max_num_batched_tokens=96,
            max_num_seqs=AT_ONCE,
            num_gpu_blocks_override=28,  # less than four requests of ten blocks
            max_model_len=512,
        )
    ) as running:
        yield running


@pytest.fixture(scope="module")
def truth(tiny: Path) -> Truth:
    return Truth(tiny)


def test_200_requests_are_answered_rightly_whatever_happens_to_the_store(
    server: ServerProcess, engine: VllmEngine, truth: Truth
) -> None:
    chance = random.Random(7)
    prefixes = [[chance.randrange(VOCABULARY) for _ in range(7 * BLOCK_TOKENS)] for _ in range(6)]
    faults = itertools.cycle(["killed", "frozen", "emptied", "damaged", "restarted", "none"])
    answered, hits = 0, 0
    mend: Callable[[], object] | None = None
    while answered < REQUESTS:
        prompts: list[list[int]] = []
        for _ in range(AT_ONCE):
            shared = chance.choice(prefixes)[: chance.randrange(1, 7 * BLOCK_TOKENS)]
            prompts.append([*shared, *(chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 40)))])
        if answered % 20 == 0 and answered:
            mend = strike(server, next(faults))
        engine.forget()
        answers = engine.call("generate", ANSWER_S, prompts=prompts, new_tokens=NEW_TOKENS)
        for prompt, answer in zip(prompts, answers, strict=True):
            right = truth.answer(prompt, NEW_TOKENS)
            assert tuple(answer["tokens"]) == right.tokens
            assert answer["logprobs"] == pytest.approx(right.logprobs, abs=1e-3)
            hits += answer["cached"] > 0
        answered += len(answers)
        if answered % 20 == 12 and mend is not None:
            mend()
            mend = None
    assert hits > REQUESTS / 10


def test_requests_that_are_aborted_at_any_step_leave_the_engine_right(
    server: ServerProcess, engine: VllmEngine, truth: Truth
) -> None:
    chance = random.Random(8)
    known = [chance.randrange(VOCABULARY) for _ in range(8 * BLOCK_TOKENS)]
    until(lambda: hit(engine, known), ANSWER_S, "a store that is back")
    right = truth.answer(known, NEW_TOKENS)
    for steps in range(8):
        engine.forget()
        others = [known[: 5 * BLOCK_TOKENS] + [chance.randrange(VOCABULARY) for _ in range(90)] for _ in range(3)]
        assert engine.call("abort_midway", prompts=[known, *others], steps=steps) > 0
        assert same(engine.generate(known, NEW_TOKENS), right)
        engine.forget()
        again = engine.generate(known, NEW_TOKENS)
        assert same(again, right)
        assert again.hit_tokens > 0


def test_what_the_engine_counts_is_in_prometheus(engine: VllmEngine) -> None:
    counted = engine.call("metrics")
    for name in ("loads", "load_blocks", "load_bytes", "saves", "save_blocks", "failed_blocks", "lookups"):
        assert counted[f"vllm:kvstore_{name}"] > 0, name


def hit(engine: VllmEngine, prompt: list[int]) -> bool:
    engine.forget()
    return engine.generate(prompt, 1).hit_tokens > 0


def strike(server: ServerProcess, fault: str) -> Callable[[], object] | None:
    """Hurt the server; what mends it."""
    match fault:
        case "killed":
            server.kill_all()
            return server.start
        case "frozen":
            server.freeze()
            return server.thaw
        case "restarted":
            server.kill_all()
            server.start()
        case "emptied":
            with ControlClient(server.address, timeout_s=10.0) as control:
                control.flush(None)
        case "damaged":
            damage_blocks(server)
        case _:
            pass
    return None
