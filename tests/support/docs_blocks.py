"""The code blocks of README.md and the pages; a test that runs one takes its text from here.

A test takes a block by ``block("page.rst", "words of it")``, with literal strings. test_docs.py reads these
calls in the source of the tests, and so finds a block that no test takes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from places import ROOT

_PAGES = ROOT / "docs" / "source"

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# A directive that shows its content, or a paragraph that ends with "::". Bullets count as indentation.
_BEGIN = re.compile(
    r"(?P<indent> *(?:[*-] +)*)"
    r"(?:\.\. (?:code-block|code|sourcecode|parsed-literal):: *(?P<language>\w*)|(?!\.\. [\w-]+::$).*::)"
)
# Sample output differs from run to run in [ids], hashes, numbers and how they are aligned.
_SAMPLE = re.compile(
    r"(?P<id>\[.*?\])|(?P<hash>\b[0-9a-f]{8,}\b)|(?P<number>\d[\d.,]*)|(?P<spaces> +)|(?P<fixed>.)"
)
_LIKE = {"id": r"\[.*\]", "hash": "[0-9a-f]+", "number": "[0-9.,]+", "spaces": " +"}


class Block(NamedTuple):
    """A code block, or sample output.

    Attributes:
        page: README.md, or the name of a page.
        line: where the block begins, roughly.
        text: without its indentation.
    """

    page: str
    line: int
    text: str


def pages() -> list[str]:
    """README.md and every page there is."""
    return ["README.md", *sorted(path.relative_to(_PAGES).as_posix() for path in _PAGES.rglob("*.rst"))]


def blocks(page: str) -> list[Block]:
    """All blocks of a page, whatever their language, in order."""
    if page == "README.md":
        source = (ROOT / page).read_text(encoding="utf-8")
        found = [(source.count("\n", 0, fence.start()) + 1, fence[3]) for fence in _FENCE.finditer(source)]
    else:
        found = list(_indented((_PAGES / page).read_text(encoding="utf-8").splitlines()))
    return [Block(page, line, textwrap.dedent(text).strip("\n") + "\n") for line, text in found]


def _indented(lines: list[str]) -> Iterator[tuple[int, str]]:
    number = 0
    while number < len(lines):
        begin = _BEGIN.fullmatch(lines[number].rstrip())
        number += 1
        if begin is None:
            continue
        # The options of a directive stand right below it.
        while number < len(lines) and lines[number].strip():
            number += 1
        first, deeper = number, " " * (len(begin["indent"]) + 1)
        while number < len(lines) and (not lines[number].strip() or lines[number].startswith(deeper)):
            number += 1
        yield first, "\n".join(lines[first:number])


def find(page: str, words: str) -> list[Block]:
    """The blocks of a page that are these words, or else those that contain them."""
    found = blocks(page) if page in pages() else []
    return [one for one in found if one.text.strip() == words] or [one for one in found if words in one.text]


def block(page: str, words: str) -> str:
    """The text of the one block that these words find."""
    found = find(page, words)
    assert len(found) == 1, f"{words!r} finds {len(found)} blocks of {page}, not one"
    return found[0].text


def commands(text: str) -> list[str]:
    """The commands of a block, one a line: continued lines joined, comments dropped."""
    lines = text.replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip())]


def shell(script: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script by bash, with the commands of this interpreter's environment first on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHFT_LIGHTHOUSE"}
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    command = ["bash", "-euo", "pipefail", "-c", script]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=240)
    finally:
        # bash alone would leave what it started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def check_shown(sample: str, output: str) -> None:
    """Asserts that output has all lines of sample output, in order, but for what differs from run to run."""
    at = 0
    for line in sample.splitlines():
        pieces = [_LIKE.get(piece.lastgroup or "", re.escape(piece[0])) for piece in _SAMPLE.finditer(line)]
        found = re.compile("".join([*pieces, " *$"]), re.MULTILINE).search(output, at)
        assert found is not None, f"nothing like {line!r} in\n{output[at:]}"
        at = found.end()
