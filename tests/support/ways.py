"""How a group stages, in one word: a host all-reduce, or a window of so many MiB."""

from __future__ import annotations

from typing import Any, Union

ON_HOST = "host all-reduce"
# None: one parameter at a time.
Way = Union[float, str, None]


def arguments_of(way: Way) -> dict[str, Any]:
    """Returns the arguments of LocalSGD, beside the one that switches staging on."""
    return {"offload_allreduce_to_cpu": True} if way == ON_HOST else {"offload_window_mb": way}
