"""Small traces for tests, in Mooncake's form."""

import json
from pathlib import Path
from random import Random


def write_trace(path: Path, prompts: list[list[int]]) -> Path:
    """A trace of these prompts, each but its last block full."""
    lines = [
        json.dumps({"timestamp": 0, "input_length": 512 * len(ids) - 100, "output_length": 1, "hash_ids": ids})
        for ids in prompts
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def made_up_prompts(count: int, *, seed: int = 1) -> list[list[int]]:
    """Prompts of 2 to 12 blocks that continue one another's prefixes, some of them often."""
    random = Random(seed)
    prompts: list[list[int]] = []
    fresh = 0
    for _ in range(count):
        prefix: list[int] = []
        if prompts and random.random() < 0.7:
            chosen = prompts[int(len(prompts) * random.random() ** 3)]
            prefix = chosen[: random.randint(1, min(10, len(chosen)))]
        tail = random.randint(2, max(2, 12 - len(prefix)))
        prompts.append([*prefix, *range(fresh, fresh + tail)])
        fresh += tail
    return prompts
