"""Three hosts as network namespaces of this machine, and a link between two of them that can go down."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_LACKS = ("not permitted", "Permission denied", "Read-only", "Unknown device type", "not supported")


class NoNamespaces(Exception):
    """They can't be made here; the message says why."""


class Network:
    """Hosts 0 and 1 are joined by a veth pair; each has another one to a third host, which stays reachable.

    Use it as a context manager: inside, this thread is on the third host.

    Attributes:
        device: the name that the link has on hosts 0 and 1.
        hosts: their addresses on that link.
        third: the address of the third host, for both.

    Raises:
        NoNamespaces: on entering.
    """

    device = "wire"
    hosts = ("10.213.0.1", "10.213.0.2")
    third = "10.213.1.1"

    def __init__(self) -> None:
        self._names = [f"torchft-test-{os.getpid()}-{number}" for number in range(3)]
        self._exit = ExitStack()

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            for name in self._names:
                _ip("netns", "add", name)
                # Its interfaces, and their peers, go with the last process inside.
                stack.callback(_ip, "netns", "delete", name)
                _ip("-n", name, "link", "set", "dev", "lo", "up")
            first, second, third = self._names
            self._join(first, self.device, f"{self.hosts[0]}/24", second, self.device, f"{self.hosts[1]}/24")
            for number, name in enumerate((first, second), 1):
                here = f"10.213.{number}.1"
                self._join(third, f"host{number}", f"{here}/24", name, "third", f"10.213.{number}.2/24")
                _ip("-n", name, "route", "add", "default", "via", here)
            stack.enter_context(_inside(third))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exit.close()

    @staticmethod
    def _join(a: str, a_device: str, a_address: str, b: str, b_device: str, b_address: str) -> None:
        _ip("-n", a, "link", "add", "name", a_device, "type", "veth", "peer", "name", b_device, "netns", b)
        for name, device, address in [(a, a_device, a_address), (b, b_device, b_address)]:
            _ip("-n", name, "address", "add", address, "dev", device)
            _ip("-n", name, "link", "set", "dev", device, "up")

    @contextmanager
    def on(self, host: int) -> Iterator[None]:
        """Inside, this thread and what it starts is on host 0 or 1."""
        with _inside(self._names[host]):
            yield

    def set_link(self, up: bool) -> None:
        """Switches the link between hosts 0 and 1."""
        _ip("-n", self._names[0], "link", "set", "dev", self.device, "up" if up else "down")


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        raise NoNamespaces("there is no ip command") from None
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode(errors="replace").strip()
        # Anything else is a mistake in here, and must not read as a machine that lacks something.
        if any(lack in words for lack in _LACKS):
            raise NoNamespaces(f"ip {' '.join(arguments)}: {words}") from None
        raise RuntimeError(f"ip {' '.join(arguments)}: {words}") from None


@contextmanager
def _inside(name: str) -> Iterator[None]:
    own = Path("/proc/thread-self/ns/net")
    with own.open() as before, Path("/run/netns", name).open() as other:
        _setns(other.fileno())
        try:
            yield
        finally:
            _setns(before.fileno())


def _setns(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise NoNamespaces(os.strerror(ctypes.get_errno()))
