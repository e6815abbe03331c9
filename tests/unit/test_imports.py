"""Which module imports which, read from the source: down the floors only, and in no circle."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

from places import ROOT

# From the ground up; what shares a floor knows nothing of the others there.
FLOORS = [
    {"_distribution_check", "_staging"},
    {"_launch", "local_sgd"},
    {"examples", "local_sgd_bench", "local_sgd_memory", "titan"},
]


def modules() -> dict[str, Path]:
    """Our modules by their full names; a package is its __init__."""
    found = {}
    for path in sorted((ROOT / "torchft").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, ours: dict[str, Path]) -> Iterator[str]:
    """What a module imports of ours, inside of functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}:{node.lineno} is a relative import"
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            # "from package import module" imports the module, "from module import name" does not.
            names = [
                full if (full := f"{node.module}.{alias.name}") in ours else node.module
                for alias in node.names
            ]
        else:
            continue
        yield from (name for name in names if name in ours)


def room(name: str) -> str:
    return name.split(".")[1]


OURS = modules()
GRAPH = {name: set(imported(path, OURS)) for name, path in OURS.items()}


def test_the_graph_is_read() -> None:
    assert "torchft._staging.buffers" in GRAPH["torchft.local_sgd"]
    assert "torchft._launch.cli" in GRAPH["torchft.examples.local_sgd.train"]
    assert {room(name) for name in OURS} == set.union(*FLOORS)


def test_no_circle() -> None:
    try:
        graphlib.TopologicalSorter(GRAPH).prepare()
    except graphlib.CycleError as error:
        circle = " <- ".join(error.args[1])
        raise AssertionError(f"modules import one another: {circle}") from None


def test_imports_go_down() -> None:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    wrong = [
        f"{name} imports {other}"
        for name, others in GRAPH.items()
        for other in sorted(others)
        if room(name) != room(other) and floor[room(name)] <= floor[room(other)]
    ]
    assert not wrong
