"""Every code block of README.md, CONTRIBUTING.md and the pages is run by a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from docs_blocks import block, blocks, broken_links, find, pages, shell
from places import TESTS
from torch.distributed.run import parse_args

from torchft._launch import cli
from torchft.examples.local_sgd.options import add_training_options

# Blocks, by words of theirs, that no test runs, for want of several machines. At most five, and why.
SEVERAL_MACHINES = {
    ("main_job.rst", "#SBATCH"): "needs a SLURM cluster; below it runs with stand-ins for SLURM's commands",
}
# They make an environment and download PyTorch: for whoever checks a clean checkout, as .ci/run does.
README_COMMANDS = [
    ("README.md", ".venv/bin/python -m torchft.examples.local_sgd"),
    ("README.md", ".venv-dev/bin/python -m pytest"),
]


def taken() -> Iterator[tuple[str, str, str]]:
    """The calls of ``block`` in tests and fixtures: file and line, page, words."""
    for path in sorted(TESTS.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            decorators = " ".join(map(ast.unparse, function.decorator_list))
            if not function.name.startswith("test_") and "fixture" not in decorators:
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "block":
                    literal = [one.value for one in call.args if isinstance(one, ast.Constant)]
                    assert len(literal) == 2, f"{path.name}:{call.lineno}: block() needs two literal strings"
                    yield f"{path.name}:{call.lineno}", str(literal[0]), str(literal[1])


def test_every_block_is_run() -> None:
    assert len(SEVERAL_MACHINES) <= 5
    left = {one: None for page in pages() for one in blocks(page)}
    assert len(left) > 40, "blocks are not found any more"
    problems = []
    listed = [("a list of test_docs.py", *key) for key in [*SEVERAL_MACHINES, *README_COMMANDS]]
    for where, page, words in [*taken(), *listed]:
        found = find(page, words)
        if len(found) != 1:
            problems.append(f"{where}: {words!r} finds {len(found)} blocks of {page}, not one")
        for one in found:
            left.pop(one, None)
    problems += [
        f"{one.page}: no test runs the block {one.text.splitlines()[0]!r}. Take it "
        f"by block({one.page!r}, 'words of it') in a test and run it, or list it in SEVERAL_MACHINES."
        for one in left
    ]
    assert not problems, "\n".join(["", *problems])


def test_links_of_markdown_lead_somewhere() -> None:
    assert broken_links() == []


def test_blocks_for_several_machines_are_valid() -> None:
    for (page, words), reason in SEVERAL_MACHINES.items():
        assert reason
        (script,) = find(page, words)
        assert shell('bash -n -c "$SCRIPT"', TESTS, SCRIPT=script.text).stderr == ""


def test_batch_script(tmp_path: Path) -> None:
    """Two nodes of SLURM, whose commands only write down what they were asked for."""
    script = block("main_job.rst", "#SBATCH")
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    (tmp_path / "local_sgd.sbatch").write_text(script)
    srun = 'echo "${REPLICA_GROUP_ID-} $TORCHFT_LIGHTHOUSE $*" >> calls\n'
    srun += 'case "$*" in *torchft_lighthouse*) exec sleep 100;; esac\n'
    # A group that ends at once would end the lighthouse before that has written down anything.
    srun += "until grep -q torchft_lighthouse calls; do sleep 0.01; done\n"
    srun += 'case "$*" in *=$BROKEN*) exit 1;; esac'
    for name, body in {"scontrol": "printf 'node-a\\nnode-b\\n'", "srun": srun}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def submit(broken: str) -> int:
        script = 'PATH="$PWD:$PATH" bash local_sgd.sbatch'
        return shell(script, tmp_path, SLURM_JOB_NODELIST="node-[a-b]", BROKEN=broken).returncode

    assert submit(broken="none") == 0
    lighthouse, *groups = sorted((tmp_path / "calls").read_text().splitlines())
    assert "--nodelist=node-a " in lighthouse
    assert lighthouse.endswith(" torchft_lighthouse --min_replicas 2 --bind [::]:29510")
    assert len(groups) == 2
    parser = cli.Parser("train", "")
    add_training_options(parser)
    for number, (node, group) in enumerate(zip(("node-a", "node-b"), groups, strict=True)):
        assert group.startswith(f"{number} http://node-a:29510 ")
        assert f"--nodelist={node} " in group
        torchrun = parse_args(group.partition(" torchrun ")[2].split())
        assert (torchrun.module, torchrun.training_script) == (True, "torchft.examples.local_sgd.train")
        assert torchrun.master_addr == node
        assert parser.parse_args(torchrun.training_script_args).replicas == 2
    assert submit(broken="node-b") == 1
