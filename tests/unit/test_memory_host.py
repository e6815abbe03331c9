"""Available host memory within the limits of cgroups, in file trees as the kernel lays them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchft._staging import host_memory
from torchft._staging.host_memory import available_host_memory, host_shortage, local_world_size
from torchft._staging.units import GIB

MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {48 * GIB // 1024} kB\n"
UNLIMITED_V1 = "9223372036854771712"


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(root)


def mount(kind: str, point: str, options: str = "rw", root: str = "/") -> str:
    return f"31 23 0:28 {root} {point} rw,nosuid shared:9 - {kind} cgroup {options}"


def v2(folder: str, limit: str, used: int, active: int = 0, inactive: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": str(used),
        f"{folder}/memory.stat": f"anon 1\nfile 99999999999\ninactive_file {inactive}\nactive_file {active}",
    }


def v1(folder: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": str(used),
        # Without "total_" they are of the cgroup alone, and the usage is of its children as well.
        f"{folder}/memory.stat": f"inactive_file 7\nactive_file 7\ntotal_inactive_file {cache}",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(
            {"proc/self/cgroup": "0::/", "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup")},
            48 * GIB,
            id="no limit: what the kernel calls available",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pod",
                "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup"),
                **v2("sys/fs/cgroup/pod", "max", 3 * GIB),
            },
            48 * GIB,
            id="v2 without a limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pod",
                "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup"),
                **v2("sys/fs/cgroup/pod", str(16 * GIB), 10 * GIB, active=GIB, inactive=2 * GIB),
            },
            9 * GIB,
            id="v2: page cache can be dropped",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/slurm/job_1/step_0/task_3",
                "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup"),
                **v2("sys/fs/cgroup/slurm/job_1/step_0/task_3", "max", GIB),
                **v2("sys/fs/cgroup/slurm/job_1", str(8 * GIB), 3 * GIB),
                **v2("sys/fs/cgroup/slurm", str(60 * GIB), 3 * GIB),
            },
            5 * GIB,
            id="v2: the limit of an ancestor",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pod",
                "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup"),
                **v2("sys/fs/cgroup/pod", str(500 * GIB), GIB),
            },
            48 * GIB,
            id="a limit above what the node has",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pod",
                "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup"),
                **v2("sys/fs/cgroup/pod", str(GIB), 2 * GIB),
            },
            0,
            id="over the limit already",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "9:cpu:/x\n4:memory:/slurm/job_1\n0::/",
                "proc/self/mountinfo": "\n".join(
                    [
                        mount("tmpfs", "/sys/fs/cgroup"),
                        mount("cgroup", "/sys/fs/cgroup/cpu", "rw,cpu"),
                        mount("cgroup", "/sys/fs/cgroup/memory", "rw,memory"),
                        mount("cgroup2", "/sys/fs/cgroup/unified"),
                    ]
                ),
                **v1("sys/fs/cgroup/memory/slurm/job_1", str(16 * GIB), 10 * GIB, cache=GIB),
                **v1("sys/fs/cgroup/memory/slurm", UNLIMITED_V1, 20 * GIB),
                **v1("sys/fs/cgroup/memory", UNLIMITED_V1, 20 * GIB),
            },
            7 * GIB,
            id="v1 beside v2",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/docker/abc/inner",
                "proc/self/mountinfo": mount(
                    "cgroup", "/sys/fs/cgroup/memory", "rw,memory", root="/docker/abc"
                ),
                **v1("sys/fs/cgroup/memory/inner", str(5 * GIB), GIB),
                **v1("sys/fs/cgroup/memory", str(16 * GIB), 13 * GIB),
            },
            3 * GIB,
            id="a container's mount, paths of the host",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/kubepods/pod",
                "proc/self/mountinfo": mount("cgroup", "/sys/fs/cgroup/memory", "rw,memory", "/docker/abc"),
                **v1("sys/fs/cgroup/memory", str(4 * GIB), GIB),
                **v1("sys/fs/cgroup/memory/kubepods/pod", "1", 0),
            },
            3 * GIB,
            id="a container's mount, of another path",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/../elsewhere",
                "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup"),
                **v2("sys/fs/cgroup", str(4 * GIB), GIB),
                **v2("sys/fs/elsewhere", "1", 0),
                **v2("sys/fs/cgroup/elsewhere", "1", 0),
            },
            3 * GIB,
            id="a cgroup outside of what is mounted",
        ),
    ],
)
def test_available_host_memory(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert available_host_memory(write(tmp_path, {"proc/meminfo": MEMINFO, **files})) == expected


@pytest.mark.parametrize("meminfo", [None, "MemTotal: 1 kB", "MemAvailable: many kB"])
def test_unknown_where_the_system_does_not_tell(meminfo: str | None, tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/", "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup")}
    if meminfo is not None:
        files["proc/meminfo"] = meminfo
    assert available_host_memory(write(tmp_path, files)) is None


def test_this_machine() -> None:
    total = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines())
    available = available_host_memory()
    assert available is not None
    assert 0 < available <= total * 1024


@pytest.mark.parametrize(("value", "expected"), [("8", 8), (None, 1), ("", 1), ("x", 1), ("0", 1)])
def test_local_world_size(value: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert local_world_size() == expected


def test_shortage_names_what_is_needed_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(host_memory, "available_host_memory", lambda: 10 * GIB)
    assert host_shortage(10 * GIB // 4) is None
    message = host_shortage(3 * GIB)
    assert message is not None
    for part in ("3.00 GiB", "12.00 GiB for the 4 ranks", "10.00 GiB are available", "2.00 GiB too little"):
        assert part in message


def test_no_shortage_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_host_memory", lambda: None)
    assert host_shortage(10**18) is None
