"""
A lighthouse of one's own, as a process on this machine, and a look at somebody else's.
"""

from __future__ import annotations

import importlib.util
import os
import select
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from typing import Optional

from torchft._launch import child_process

__all__ = ["LighthouseProcess", "check_host", "check_lighthouse"]

# The extension module by its file: importing the package would import PyTorch, for seconds and a lot of
# memory.
_SERVER = """\
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("_torchft", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
min_replicas, join_ms, heartbeat_ms = map(int, sys.argv[3:])
server = module.LighthouseServer(
    bind=sys.argv[2],
    min_replicas=min_replicas,
    join_timeout_ms=join_ms,
    heartbeat_timeout_ms=heartbeat_ms,
)
print(server.address(), flush=True)
while True:
    time.sleep(3600)
"""


class LighthouseProcess:
    """Runs a lighthouse in a process that dies with this one.

    A process, because a lighthouse in this one would log every quorum to stderr: its extension module reads
    RUST_LOG when torchft is imported, which is before anybody here can set it.

    Args:
        min_replicas: the number of replica groups without which there is no quorum.
        join_timeout: seconds to wait for groups that are alive but have not asked for a quorum.
        heartbeat_timeout: seconds of silence after which a group counts as dead. Shorter than TorchFT's
            default of 5, since on one machine a group is started again faster than that.
        port: the port to listen on; 0 takes a free one.

    Raises:
        RuntimeError: it did not start; the message has its last words.
    """

    def __init__(
        self,
        min_replicas: int,
        *,
        join_timeout: float = 60.0,
        heartbeat_timeout: float = 2.0,
        port: int = 0,
    ) -> None:
        extension = importlib.util.find_spec("torchft._torchft")
        assert extension is not None
        assert extension.origin is not None
        self._process = child_process.spawn(
            [
                "-c",
                _SERVER,
                extension.origin,
                f"[::]:{port}",
                str(min_replicas),
                str(round(join_timeout * 1000)),
                str(round(heartbeat_timeout * 1000)),
            ],
            env={"RUST_LOG": "warn", **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            self.address: str = self._read_address(timeout=60.0)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def _read_address(self, timeout: float) -> str:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            raise RuntimeError(f"the lighthouse did not start within {timeout:.0f} seconds")
        address = self._process.stdout.readline().decode().strip()
        if not address:
            words = self._process.stderr.read().decode(errors="replace").strip()
            raise RuntimeError(f"the lighthouse did not start: {words[-1000:]}")
        return address

    def stop(self) -> None:
        """Ends the process; groups that ask it for a quorum afterwards fail. May be called twice."""
        child_process.stop([self._process])
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def __enter__(self) -> LighthouseProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def check_lighthouse(url: str, timeout: float = 5.0) -> None:
    """Refuses an address at which no lighthouse answers.

    Args:
        url: ``http://HOST:PORT``.
        timeout: seconds to wait for an answer.

    Raises:
        ValueError: it is no such URL, nothing answers there, or what answers is no lighthouse.
    """
    netloc = ""
    try:
        parts = urllib.parse.urlsplit(url)
        netloc = parts.netloc
        complete = parts.scheme == "http" and bool(parts.hostname) and bool(parts.port)
    except ValueError:  # brackets without an end, a port that is no number
        complete = False
    if not complete:
        raise ValueError(f"lighthouse {url!r} is no address; pass http://HOST:PORT")
    # The managers connect straight to it, so a proxy's answer would say nothing.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{netloc}/", timeout=timeout) as response:
            answer = response.read(4096)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(
            f"no lighthouse answers at {url!r} ({reason}); start one with torchft_lighthouse, or leave the "
            "address out"
        ) from None
    if b"Lighthouse" not in answer:
        raise ValueError(f"what answers at {url!r} is no lighthouse; pass the address of one")


def check_host(host: Optional[str] = None) -> None:
    """Refuses a machine on which a Manager cannot serve its peers.

    Args:
        host: the name under which it is reached; default: this machine's.

    Raises:
        ValueError: the name does not resolve, or IPv6 sockets, which TorchFT listens on, are off.
    """
    host = host or socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ValueError(
            f"this machine's name {host!r} does not resolve ({error}), and replica groups reach one another "
            "by it; add it to /etc/hosts"
        ) from None
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError as error:
        raise ValueError(
            f"IPv6 sockets are off on this machine ({error}), and TorchFT listens on them; switch them on "
            "(no IPv6 network is needed)"
        ) from None
