"""
Checks of what a rank is started with.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from urllib.parse import urlsplit

from torchft._launch.cli import LIGHTHOUSE_ENV, UserError

__all__ = ["check_environment"]


def check_environment(replicas: int) -> None:
    """Refuses an environment in which this rank would fail, or wait for ever.

    Args:
        replicas: number of replica groups.

    Raises:
        UserError: a variable is missing or can't be right.
    """
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(f"{name} is not set; start this with torchrun")
    for name, what in (
        ("REPLICA_GROUP_ID", f"this group's number, 0 to {replicas - 1}"),
        (LIGHTHOUSE_ENV, "the lighthouse's address, http://HOST:29510"),
    ):
        if not os.environ.get(name):
            raise UserError(f"{name} is not set; export it: {what}")
    group = os.environ["REPLICA_GROUP_ID"]
    if not group.isdecimal() or int(group) >= replicas:
        raise UserError(f"REPLICA_GROUP_ID is {group!r}; pass 0 to {replicas - 1}, or a larger --replicas")
    _check_master_address()


def _check_master_address() -> None:
    # The other groups connect to this group's store by this name. torchrun's default is 127.0.0.1, with
    # which groups on two machines look for each other in vain until they time out.
    master = os.environ["MASTER_ADDR"]
    lighthouse = urlsplit(os.environ[LIGHTHOUSE_ENV]).hostname or ""
    here = _addresses(master)
    elsewhere = _addresses(lighthouse)
    if (
        here
        and elsewhere
        and all(ipaddress.ip_address(address).is_loopback for address in here)
        and not any(_is_local(address) for address in elsewhere)
    ):
        raise UserError(
            f"MASTER_ADDR is {master!r}, which other machines can't reach, and the lighthouse runs on one "
            f"({lighthouse}); pass --master-addr $(hostname) to torchrun"
        )


def _addresses(host: str) -> set[str]:
    try:
        return {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def _is_local(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
