"""Tests the tests: ``python tests/support/mutants.py`` breaks the staged path in one place at a time.

Each change of ``mutant_changes.py`` is made in a copy of this checkout with an environment of its own, and
the tests that are named with it have to fail there. Where they pass, all of tests/unit and tests/faults run.
What goes unnoticed is printed by file and line.

Exit code 0: all changes were noticed. 1: some were not, or nothing is known of them. 2: a change does not fit
the code, or the tests fail without any.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Optional

from mutant_changes import CHANGES, Change
from packaging_environments import Environment, copy_tree, inherited, link_dependencies
from places import ROOT

EVERYTHING = ("unit", "faults")
# A change that makes tests wait has to make one of them fail: to be stopped here says nothing of them.
LIMIT_S = 900


class Trial:
    """Tests that run in a checkout and an environment of their own.

    Args:
        folder: for both; made here, and gone after :meth:`stop`.
        dependencies: the packages that the environment sees.
        change: is made in the checkout.
    """

    def __init__(self, folder: Path, dependencies: Path, change: Optional[Change] = None) -> None:
        self.change = change
        self._folder = folder
        self._checkout = copy_tree(folder / "checkout")
        if change is not None:
            (self._checkout / change.path).write_text(change.mutated(), encoding="utf-8")
        self._environment = Environment(folder / "environment", dependencies)
        _install(self._checkout, self._environment.site / "torchft")

    def start(self, tests: Sequence[str]) -> None:
        """Runs tests, given below tests/, until the first one fails."""
        self.tests = tuple(tests)
        self._begin = time.monotonic()
        options = ("-x", "-q", "-p", "no:cacheprovider")
        with (self._folder / "output").open("w") as output:
            self._process = subprocess.Popen(
                [
                    self._environment.executable,
                    "-m",
                    "pytest",
                    *options,
                    *(f"tests/{test}" for test in tests),
                ],
                cwd=self._checkout,
                env=inherited(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # To be ended together with what the tests start.
                start_new_session=True,
            )

    def over(self) -> bool:
        """Whether the tests have come to an end, or to that of their time."""
        return self._process.poll() is not None or self.seconds > LIMIT_S

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    @property
    def passed(self) -> bool:
        return self._process.returncode == 0

    def failed_test(self) -> Optional[str]:
        """Returns the test that failed; None where none did, whatever else went wrong."""
        failed = re.search(r"^(?:FAILED|ERROR) tests/(.*?)(?: - .*)?$", self.output(), re.MULTILINE)
        return failed[1] if failed is not None and self._process.returncode == 1 else None

    def output(self) -> str:
        return (self._folder / "output").read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """Ends what still runs, and removes the folder."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _install(checkout: Path, site: Path) -> None:
    """Repeats the editable install of this checkout for a copy of it."""
    spec = find_spec("torchft")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    installed = spec.submodule_search_locations[0]
    shutil.copytree(installed, site, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    for ours in (checkout / "torchft").rglob("*.py"):
        link = site / ours.relative_to(checkout / "torchft")
        stub = link.read_text(encoding="utf-8").replace(str(ROOT), str(checkout))
        link.unlink()
        link.write_text(stub, encoding="utf-8")


def run_trials(changes: Sequence[Change], scratch: Path) -> list[str]:
    """Tries changes, as many at once as there are cores, and prints what notices each.

    Returns:
        For each change that was not noticed where it is, and what became of its tests.

    Raises:
        SystemExit: the tests fail without a change as well, and so say nothing.
    """
    dependencies = link_dependencies(scratch / "dependencies")
    waiting: list[Optional[Change]] = [None, *changes]
    running: list[Trial] = []
    unnoticed: list[str] = []
    try:
        while waiting or running:
            if waiting and len(running) < len(os.sched_getaffinity(0)):
                change = waiting.pop(0)
                running.append(Trial(scratch / str(len(waiting)), dependencies, change))
                named = [change] if change is not None else changes
                running[-1].start(list(dict.fromkeys(test for each in named for test in each.tests)))
            time.sleep(0.1)
            for trial in filter(Trial.over, list(running)):
                change, failed = trial.change, trial.failed_test()
                if change is None:
                    if not trial.passed:
                        print(trial.output(), file=sys.stderr)
                        raise SystemExit(2)
                elif failed is not None:
                    print(f"{change.where()} noticed by {failed} ({trial.seconds:.0f} s)", flush=True)
                elif trial.passed and trial.tests != EVERYTHING:
                    trial.start(EVERYTHING)
                    continue
                else:
                    what = (
                        "no test fails"
                        if trial.passed
                        else f"stopped, or ended oddly: {trial.output()[-500:]}"
                    )
                    unnoticed.append(f"{change.where()} {change.old!r} -> {change.new!r}: {what}")
                    print(unnoticed[-1], flush=True)
                running.remove(trial)
                trial.stop()
    finally:
        for trial in running:
            trial.stop()
    return unnoticed


def main(arguments: Sequence[str]) -> int:
    """Tries the changes whose ``file:line`` begins with one of the arguments; all of them without any."""
    try:
        for change in CHANGES:
            change.mutated()
        changes = [change for change in CHANGES if change.where().startswith(tuple(arguments) or "")]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        unnoticed = run_trials(changes, Path(scratch))
    print(f"{len(changes)} changes in {time.monotonic() - begin:.0f} s, {len(unnoticed)} of them unnoticed")
    for each in unnoticed:
        print(f"  {each}")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    # As Ctrl-C: what runs is ended, and the copies are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
