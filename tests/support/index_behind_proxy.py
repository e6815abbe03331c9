"""A package index that only a proxy leads to, for the tests of the distribution."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextmanager
def index_behind_proxy(wheel: Path) -> Iterator[tuple[str, str]]:
    """Serves one wheel. Yields the addresses of the proxy and of the index, which no name server knows."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_file = self.path.endswith(wheel.name)
            body = wheel.read_bytes() if is_file else f'<a href="/{wheel.name}">{wheel.name}</a>'.encode()
            # A proxy is asked for whole addresses; a path alone means that somebody took it for the index.
            self.send_response(200 if self.path.startswith("http://index.invalid/") else 404)
            self.send_header("Content-Type", "application/zip" if is_file else "text/html")
            self.send_header("Cache-Control", "max-age=600")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", "http://index.invalid/simple"
        finally:
            server.shutdown()
            thread.join()
