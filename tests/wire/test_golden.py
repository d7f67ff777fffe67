"""The wire format is a promise: the bytes of one message of every kind are kept, and compared.

A change on purpose raises `PROTOCOL_VERSION` and writes the new bytes: `python -m tests.wire.test_golden`.
"""

import json
from pathlib import Path

import pytest

from kvstore.wire.frames import Op
from tests.wire.golden import controls, frames

GOLDEN = Path(__file__).with_name("golden.json")
MESSAGES = {"frames": frames(), "control": controls()}


def test_every_operation_has_an_example() -> None:
    assert {op.name for op in Op} <= set(MESSAGES["frames"])


@pytest.mark.parametrize("plane", ["frames", "control"])
def test_messages_have_the_bytes_that_they_always_had(plane: str) -> None:
    known: dict[str, str] = json.loads(GOLDEN.read_text())[plane]
    assert {name: message.hex() for name, message in MESSAGES[plane].items()} == known


if __name__ == "__main__":
    texts = {plane: {name: data.hex() for name, data in sorted(known.items())} for plane, known in MESSAGES.items()}
    GOLDEN.write_text(json.dumps(texts, indent=2) + "\n")
