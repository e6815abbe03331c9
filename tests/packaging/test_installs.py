"""How the distribution installs, editable or not, over what is there, and how it goes away."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging_builds import NIGHTLY, VERSION, build, refusal
from packaging_environments import Environment, copy_tree, run
from packaging_wheels import contents

pytestmark = pytest.mark.packaging

# A package below torchft/ like examples/local_sgd and titan: relative imports, python -m, a traceback.
PROBE = {
    "__init__.py": "from .part import WHAT\n",
    "part.py": "WHAT = 'before'\n\n\ndef fail():\n    raise RuntimeError('on purpose')\n",
    "__main__.py": """\
from . import WHAT, part

print(WHAT, __file__, __name__, __package__)
try:
    import torchft.later
except ModuleNotFoundError as error:
    print(error)
part.fail()
""",
}


def test_installs_over_everything_and_uninstalls_without_a_trace(
    environment: Environment, wheel: Path, release: Path, from_disk: dict[str, str], tree: Path
) -> None:
    before = environment.listing()
    for what in ([release], [wheel], ["--force-reinstall", wheel], ["-e", tree], [wheel]):
        environment.install(*what, variables=from_disk)
        assert environment.strays() == set(), what
    assert "No broken requirements" in environment.pip("check").stdout
    version = "import importlib.metadata as metadata; print(metadata.version('torchft'))"
    assert environment.python("-c", version).stdout.strip() == VERSION
    assert (environment.folder / "bin" / "torchft_lighthouse").exists()
    environment.pip("uninstall", "-y", "torchft")
    assert environment.listing() == before


def test_editable_runs_the_checkout(
    environment: Environment, from_disk: dict[str, str], tmp_path: Path
) -> None:
    before = environment.listing()
    checkout = copy_tree(tmp_path / "it's a checkout")
    probe = checkout / "torchft" / "probe"
    probe.mkdir()
    for name, source in PROBE.items():
        (probe / name).write_text(source, encoding="utf-8")
    environment.install("-e", checkout, variables=from_disk)
    for name in ("__init__.py", "local_sgd.py", "manager.py"):
        assert (environment.site / "torchft" / name).is_file()
    assert not (checkout / "torchft" / "__init__.py").exists(), "the release was unpacked into the checkout"

    (checkout / "torchft" / "later.py").touch()
    main, part = probe / "__main__.py", probe / "part.py"
    part.write_text(part.read_text(encoding="utf-8").replace("before", "after"), encoding="utf-8")
    ran = environment.python("-m", "torchft.probe", cwd=checkout, check=False)
    assert f"after {main} __main__ torchft.probe" in ran.stdout
    assert "No module named 'torchft.later'" in ran.stdout
    assert f'File "{part}", line 5, in fail\n    raise RuntimeError' in ran.stdout

    environment.install("-e", checkout, variables=from_disk)
    assert environment.strays() == set()
    move = f"import os; os.rename({str(checkout)!r}, {str(tmp_path / 'moved')!r})"
    ran = environment.python("-c", f"import torchft.later\n{move}\nimport torchft.probe", check=False)
    said = ran.stdout.splitlines()[-1]
    assert said.startswith(f"ImportError: {probe / '__init__.py'} is gone")
    assert "pip install -e ." in said
    environment.pip("uninstall", "-y", "torchft")
    assert environment.listing() == before


@pytest.mark.slow
def test_nightly_is_a_base_but_no_neighbour(
    environment: Environment, wheel: Path, tree: Path, tmp_path: Path
) -> None:
    build(tree, tmp_path / "out", {"TORCHFT_BASE": NIGHTLY})
    on_nightly = contents(next((tmp_path / "out").iterdir()))
    run(sys.executable, "-m", "pip", "download", "--no-deps", NIGHTLY, cwd=tmp_path)
    nightly = next(tmp_path.glob("torchft_nightly-*.whl"))
    theirs = {name: data for name, data in contents(nightly).items() if name.startswith("torchft/")}
    theirs["torchft/_upstream_local_sgd.py"] = theirs.pop("torchft/local_sgd.py")
    assert {name: on_nightly[name] for name in theirs} == theirs

    environment.install(nightly)
    for what in ([tree], ["-e", tree]):
        said = refusal(environment.install(*what, check=False))
        assert said.startswith(
            f"torchft: torchft-nightly 2026.10.26 in {environment.site} owns the same files"
        )
        assert "pip uninstall -y torchft-nightly torchft" in said
    # A wheel from elsewhere is not built here: only importing can tell.
    environment.install(wheel)
    ran = environment.python("-c", "import torchft.local_sgd", check=False)
    said = ran.stdout.splitlines()[-1]
    assert said.startswith(
        f"ImportError: torchft-nightly 2026.10.26 in {environment.site} owns the same files"
    )
    environment.pip("uninstall", "-y", "torchft-nightly", "torchft")
    environment.install(wheel)
    environment.python("-c", "import torchft.local_sgd")


def test_checkout_that_was_never_installed_says_so(environment: Environment, tree: Path) -> None:
    ran = environment.python("-B", "-c", "import torchft.local_sgd", cwd=tree, check=False)
    said = ran.stdout.splitlines()[-1]
    assert said.startswith("ImportError: this is a checkout of the patched torchft that is not installed in")
    assert "pip install -e ." in said
