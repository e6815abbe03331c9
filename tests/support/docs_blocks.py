"""The code blocks of README.md, CONTRIBUTING.md and the pages; a test that runs one takes its text from here.

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
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from docutils.core import publish_doctree
from places import ROOT

_PAGES = ROOT / "docs" / "source"
_MARKDOWN = ("CONTRIBUTING.md", "README.md")

_FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Of Sphinx, so that docutils does not know them, and without a block of their own.
_NO_BLOCK = re.compile(r"\.\. (toctree|literalinclude|currentmodule|autoclass|autofunction)::")
# Sample output differs from run to run in [ids], hashes, numbers and how they are aligned.
_SAMPLE = re.compile(
    r"(?P<id>\[.*?\])|(?P<hash>\b[0-9a-f]{8,}\b)|(?P<number>\d[\d.,]*)|(?P<spaces> +)|(?P<fixed>.)"
)
_LIKE = {"id": r"\[.*\]", "hash": "[0-9a-f]+", "number": "[0-9.,]+", "spaces": " +"}


class Block(NamedTuple):
    """A code block, or sample output: its page, and its text without indentation."""

    page: str
    text: str


def pages() -> list[str]:
    """README.md, CONTRIBUTING.md and every page there is."""
    return [*_MARKDOWN, *sorted(path.relative_to(_PAGES).as_posix() for path in _PAGES.rglob("*.rst"))]


def _source(page: str) -> str:
    return ((ROOT if page in _MARKDOWN else _PAGES) / page).read_text(encoding="utf-8")


def _tree(page: str) -> nodes.document:
    settings = {"report_level": 5, "syntax_highlight": "none", "file_insertion_enabled": False}
    return publish_doctree(_source(page), settings_overrides=settings)


def broken_links() -> list[str]:
    """Links of README.md and CONTRIBUTING.md to files or sections that are not there."""
    links = {link for page in _MARKDOWN for link in re.findall(r"\]\(([^)]+)\)", _source(page))}
    broken = {link for link in links if not (ROOT / link.partition("#")[0]).is_file()}
    for link in links - broken:
        path, _, section = link.partition("#")
        if section and section not in {
            nodes.make_id(title.astext()) for title in _tree(Path(path).name).findall(nodes.title)
        }:
            broken.add(link)
    return sorted(broken)


def prose(page: str) -> str:
    """All words of a page, with one space between them."""
    return " ".join(_source(page).split())


def blocks(page: str) -> list[Block]:
    """All blocks of a page, whatever their language, in order."""
    if page in _MARKDOWN:
        source = _source(page)
        found = _FENCE.findall(source)
        assert len(re.findall("```|~~~", source)) == 2 * len(found), f"{page} has a block of another form"
    else:
        # What docutils does not understand, such as an option of Sphinx, counts as a block.
        found = [node.astext() for node in _tree(page).findall(nodes.literal_block)]
    return [Block(page, text.strip("\n") + "\n") for text in found if not _NO_BLOCK.match(text)]


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
