"""The README says what is so: its example runs and prints what its comments say, its commands and links exist."""

import contextlib
import io
import re
import shlex
from collections.abc import Callable

import pytest

import kvbench.cli
import kvstore.client.ctl
import kvstore.server.cli
from kvstore.testing.cluster import ServerProcess
from tests.docs.pages import ROOT, fences, page

README = page("README.md")
DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "kvstore-server": kvstore.server.cli.main,
    "kvstorectl": kvstore.client.ctl.main,
    "kvbench": kvbench.cli.main,
}


def test_the_example_runs_against_a_real_server_and_prints_what_its_comments_say() -> None:
    (example,) = fences(README, "python")
    expected = re.findall(r"print\(.*\)  # (.+)$", example, re.MULTILINE)
    assert len(expected) == example.count("print(")
    printed = io.StringIO()
    with ServerProcess(dram="256MiB") as server, contextlib.redirect_stdout(printed):
        exec(compile(example.replace('"local"', repr(server.address)), "README.md", "exec"), {})
    assert printed.getvalue().splitlines() == expected


def test_the_example_is_short() -> None:
    (example,) = fences(README, "python")
    lines = [line for line in example.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(lines) <= 24


def command_lines() -> list[str]:
    found = [
        line.partition("  #")[0].strip()
        for document in DOCUMENTS
        for block in fences(page(document), "", "sh", "console")
        for line in block.splitlines()
    ]
    return sorted({line for line in found if line.partition(" ")[0] in COMMANDS})


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_in_the_documents_is_one_that_exists(line: str) -> None:
    """The command's own help knows each word and flag of it."""
    name, *words = shlex.split(re.split(r" [<>|] ", line)[0])
    is_nested = name != "kvstore-server" and words
    help_text = io.StringIO()
    with contextlib.redirect_stdout(help_text), pytest.raises(SystemExit) as end:
        COMMANDS[name]([words[0], "--help"] if is_nested else ["--help"])
    assert end.value.code == 0
    for flag in (word for word in words if word.startswith("--")):
        assert re.search(rf"{flag}\b", help_text.getvalue()), f"{line}: no {flag}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_between_documents_leads_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page(document)):
        assert (folder / target).exists(), f"{document}: {target}"


def test_make_targets_that_the_readme_names_exist() -> None:
    makefile = page("Makefile")
    for target in set(re.findall(r"`make (\w+)`", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
