"""Reading the documents as data: fenced blocks, tables, command lines."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def page(path: str) -> str:
    """A document of the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


def fences(text: str, *languages: str) -> list[str]:
    """The fenced blocks of those languages; "" is a fence without one."""
    # All fences are matched, in order: the end of one must not pass for the beginning of the next.
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language in languages]


def section(text: str, title: str) -> str:
    """What stands below a heading, up to the next one of its level."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^\1 |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no heading {title!r}"
    return found[2]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each table row, backticks taken off; neither heads nor rules."""
    table = re.findall(r"^\|(.+)\|\n\|[-| ]+\|\n((?:^\|.+\|\n?)*)", text, re.MULTILINE)
    for _, body in table:
        for line in body.splitlines():
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def code(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)
