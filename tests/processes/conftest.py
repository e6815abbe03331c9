"""Text to train on."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with text that a small model learns something of."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall, {n} bottles of beer\n" for n in range(4000)))
    return str(path)
