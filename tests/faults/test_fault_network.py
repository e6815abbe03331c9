"""The link between two hosts goes down in the middle of a staged synchronization, and comes back."""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Iterator

import pytest
from fault_groups import COLLECTIVE_TIMEOUT, MIDDLE, Fault, FaultGroups
from fault_network import Network, NoNamespaces

from torchft._launch.lighthouse import LighthouseProcess


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    try:
        network.__enter__()
    except NoNamespaces as error:
        pytest.skip(f"no network namespaces ({error})")
    try:
        yield network
    finally:
        network.__exit__()


@pytest.mark.slow
def test_link_goes_down_and_comes_back(network: Network) -> None:
    with LighthouseProcess(2) as lighthouse:
        port = urllib.parse.urlsplit(lighthouse.address).port
        with FaultGroups(
            hosts=network.hosts,
            control_host=network.third,
            entering=network.on,
            lighthouse=f"http://{network.third}:{port}",
            env={"GLOO_SOCKET_IFNAME": network.device},
        ) as groups:
            groups.commit_together()
            seen = groups.provoke(Fault(0, "in_flight", "hold", index=MIDDLE))
            network.set_link(up=False)
            down = time.monotonic()
            groups.go(seen, 0, "in_flight")
            groups.finish(seen)
            lasted = time.monotonic() - down
            assert COLLECTIVE_TIMEOUT.total_seconds() - 1 < lasted < COLLECTIVE_TIMEOUT.total_seconds() + 5
            assert [seen.decision(group) for group in range(2)] == ["kept"] * 2
            assert not seen.exits
            network.set_link(up=True)
            groups.commit_together()
