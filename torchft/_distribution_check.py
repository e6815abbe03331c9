"""Refuses an installation in which ``torchft`` is not one consistent package, before it can do harm."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path


def check_distribution() -> None:
    """Checks that this patch runs inside the release that it was built on.

    Raises:
        ImportError: if the release's files are missing (a checkout that was never installed), or if
            torchft-nightly is installed in the same folder. The message names the fix.
    """
    if find_spec("torchft._upstream_local_sgd") is None:
        raise ImportError(
            "this is a checkout of the patched torchft that is not installed in"
            f" {sys.prefix}: run `pip install -e .` in the checkout"
        )
    package = sys.modules["torchft"].__file__
    assert package is not None, "torchft has no __init__.py although the release's files are there"
    site = str(Path(package).parent.parent)
    for nightly in distributions(name="torchft-nightly", path=[site]):
        raise ImportError(
            f"torchft-nightly {nightly.version} in {site} owns the same files as torchft, and the two are"
            " mixed: run `pip uninstall -y torchft-nightly torchft`, then install torchft again"
            " (with TORCHFT_BASE=torchft-nightly==VERSION to have that nightly under it)"
        )
