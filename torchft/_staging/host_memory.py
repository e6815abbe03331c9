"""How much host memory this process can still get, within the memory limits of its cgroups.

Under SLURM, Kubernetes or Docker a process may use a part of the node only, and is killed beyond it, while
``/proc/meminfo``, and whatever reads only that, tells of the whole node.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Optional

from torchft._staging.units import GIB


def available_host_memory(root: str = "/") -> Optional[int]:
    """Returns the host memory that can be taken without swapping or being killed, in bytes.

    That is what the kernel calls available, or less where a cgroup of this process, or one around it, has a
    limit: then the limit less what its processes use, page cache that can be dropped not counted.

    Args:
        root: folder that holds ``proc`` and, by the paths that ``proc`` names, the cgroup file systems.

    Returns:
        Bytes, 0 or more. None where the system does not tell.
    """
    try:
        meminfo = _fields(Path(root, "proc/meminfo"))
        # "MemAvailable:     123 kB"
        available = [int(meminfo["MemAvailable:"]) * 1024]
        for folder, version in _memory_cgroups(root):
            left = _left_in_cgroup(folder, version)
            if left is not None:
                available.append(left)
    except (OSError, ValueError, KeyError):
        return None
    return max(0, min(available))


def local_world_size() -> int:
    """Returns how many ranks run on this host, as the launcher says in ``LOCAL_WORLD_SIZE``; 1 without it."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def host_shortage(bytes_per_rank: int) -> Optional[str]:
    """Says whether staging will run the host out of memory; to be called before the memory is taken.

    Args:
        bytes_per_rank: host memory that each rank of this host is about to take.

    Returns:
        A sentence for the log if all ranks of this host (``LOCAL_WORLD_SIZE``) together need more than is
        available, otherwise None.
    """
    ranks = local_world_size()
    available = available_host_memory()
    if available is None or bytes_per_rank * ranks <= available:
        return None
    return (
        f"CPU staging takes {bytes_per_rank / GIB:.2f} GiB of host memory per rank, "
        f"{bytes_per_rank * ranks / GIB:.2f} GiB for the {ranks} ranks of this host, and "
        f"{available / GIB:.2f} GiB are available within its memory limits: "
        f"{(bytes_per_rank * ranks - available) / GIB:.2f} GiB too little. A process that takes more than "
        "there is may be killed. Shard over more ranks, raise the limit, or run fewer ranks per host"
    )


def _fields(path: Path) -> dict[str, str]:
    """Reads a file of lines "name value ..."."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}


def _memory_cgroups(root: str) -> Iterator[tuple[Path, int]]:
    """Yields the memory cgroups of this process, itself first, then its ancestors: folder and version."""
    paths = {}
    for line in Path(root, "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in Path(root, "proc/self/mountinfo").read_text().splitlines():
        # "31 23 0:28 ROOT MOUNT_POINT options [tags] - TYPE source super-options"
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        version = 2 if kind == "cgroup2" else 1
        if version not in paths or not (
            kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))
        ):
            continue
        mount_root, mount_point = mount.split(" ")[3:5]
        parts = _parts_inside(paths[version], mount_root)
        for depth in range(len(parts), -1, -1):
            yield Path(root, mount_point.lstrip("/"), *parts[:depth]), version


def _parts_inside(path: str, mount_root: str) -> tuple[str, ...]:
    """Returns the way from a mounted cgroup to the one of this process."""
    try:
        parts = PurePosixPath(path).relative_to(mount_root).parts
    except ValueError:
        # A container that shows the host's paths and mounts its own cgroup alone: that mount is it.
        return ()
    # Outside of the cgroup namespace; the nearest that can be seen is the mount.
    return () if ".." in parts else parts


def _left_in_cgroup(folder: Path, version: int) -> Optional[int]:
    """Returns how many bytes a cgroup's processes may still take; None without a limit."""
    limit_file, usage_file, prefix = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        2: ("memory.max", "memory.current", ""),
    }[version]
    try:
        limit = (folder / limit_file).read_text().strip()
        if limit == "max":
            return None
        usage = int((folder / usage_file).read_text())
        stat = _fields(folder / "memory.stat")
    except FileNotFoundError:
        # The root cgroup has no limit, and version 2 may run without the memory controller.
        return None
    droppable = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file"))
    return int(limit) - usage + droppable
