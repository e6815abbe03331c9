"""A lighthouse of one's own, and a look at somebody else's and at this machine."""

from __future__ import annotations

import http.server
import socket
import threading

import pytest

from torchft._launch.lighthouse import LighthouseProcess, check_host, check_lighthouse


def test_a_lighthouse_is_told_from_other_servers() -> None:
    with LighthouseProcess(min_replicas=1) as lighthouse:
        check_lighthouse(lighthouse.address)
    with http.server.HTTPServer(("localhost", 0), http.server.SimpleHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        try:
            with pytest.raises(ValueError, match="no lighthouse"):
                check_lighthouse(f"http://localhost:{other.server_port}")
        finally:
            other.shutdown()


@pytest.mark.parametrize(
    "url", ["localhost:29510", "http://localhost", "http://x:port", "http://[::1", "", "grpc://a:1"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"pass http://HOST:PORT"):
        check_lighthouse(url)


def test_a_lighthouse_that_cannot_start_says_why() -> None:
    with LighthouseProcess(min_replicas=1) as lighthouse:
        port = int(lighthouse.address.rpartition(":")[2])
        with pytest.raises(RuntimeError, match="the lighthouse did not start"):
            LighthouseProcess(min_replicas=1, port=port)


def test_a_proxy_is_not_asked_for_the_lighthouse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://localhost:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with LighthouseProcess(min_replicas=1) as lighthouse:
        check_lighthouse(lighthouse.address)


def test_a_machine_without_a_name_is_refused() -> None:
    check_host()
    with pytest.raises(ValueError, match="does not resolve"):
        check_host("no-such-host.invalid")


def test_a_machine_without_ipv6_sockets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Switching IPv6 off for real takes a reboot.
    def no_ipv6(*args: object) -> socket.socket:
        raise OSError("Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", no_ipv6)
    with pytest.raises(ValueError, match="IPv6 sockets are off"):
        check_host("localhost")
