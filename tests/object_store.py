"""An S3 server (moto's, in its own process) behind a proxy that injects the faults of object storage.

The proxy forwards HTTP requests, except those that a `Fault` applies to.
"""

import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

Kind = Literal["503", "403", "cut", "slow", "silent", "changed"]


@dataclass
class Fault:
    """A fault of requests for paths that end in `suffix`."""

    kind: Kind
    suffix: str = ""
    times: int = 10**9  # requests until it ends
    rate: int = 10_000  # bytes per second of a slow body
    fraction: float = 0.5  # of the body before it is cut


class Proxy(ThreadingHTTPServer):
    """A proxy for the server at `port_behind`, which records requests; a context manager."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port_behind: int, address: str = "127.0.0.1", host_behind: str = "127.0.0.1") -> None:
        super().__init__((address, 0), _Handler)
        self.behind = (host_behind, port_behind)
        self.faults: list[Fault] = []
        self.requests: list[str] = []  # "GET /bucket/data/shard-000000.tar"
        self.released = threading.Event()  # set to end silences
        self._lock = threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_address[1]}"

    def inject(self, kind: Kind, suffix: str = "", **details: float) -> None:
        with self._lock:
            self.faults.append(Fault(kind, suffix, **details))  # type: ignore[arg-type]

    def heal(self) -> None:
        """Remove all faults, and end those in progress."""
        with self._lock:
            self.faults.clear()
            self.requests.clear()
        self.released.set()
        self.released = threading.Event()

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append(f"{method} {path}")
            for fault in self.faults:
                bodies_only = fault.kind in ("cut", "slow", "changed")
                if path.endswith(fault.suffix) and fault.times > 0 and (method == "GET" or not bodies_only):
                    fault.times -= 1
                    return fault
        return None

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that hang up."""

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _handle(self) -> None:
        fault = self.server.fault_for(self.command, self.path.split("?")[0])
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        released = self.server.released
        if fault and fault.kind == "silent":
            released.wait()
            self.close_connection = True
            return
        if fault and fault.kind in ("503", "403"):
            self._refuse(int(fault.kind))
            return
        connection = http.client.HTTPConnection(*self.server.behind, timeout=60)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        self._send(data, fault, released)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815  # the names that http.server looks for

    def _refuse(self, status: int) -> None:
        code = {503: "SlowDown", 403: "AccessDenied"}[status]
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send(self, data: bytes, fault: Fault | None, released: threading.Event) -> None:
        if fault is None:
            self.wfile.write(data)
        elif fault.kind == "changed":
            self.wfile.write(data[:-1] + bytes([data[-1] ^ 1]) if data else data)
        elif fault.kind == "cut":
            self.wfile.write(data[: int(len(data) * fault.fraction)])
            self.close_connection = True
        else:
            for start in range(0, len(data), max(1, fault.rate // 10)):
                if released.wait(0.1):
                    self.close_connection = True
                    return
                self.wfile.write(data[start : start + max(1, fault.rate // 10)])

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def s3_server(host: str = "127.0.0.1") -> Iterator[int]:
    """Start a moto server in its own process; yield its port."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    arguments = [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
    server = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_server(server, host, port)
        yield port
    finally:
        server.kill()
        server.wait()


def _wait_for_server(server: "subprocess.Popen[bytes]", host: str, port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except OSError:
            assert server.poll() is None, "the S3 server has ended"
            assert time.monotonic() < deadline, "the S3 server does not respond"
            time.sleep(0.02)


def environment(endpoint: str) -> dict[str, str]:
    """Return the variables that point S3 clients to the server."""
    return {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


def request(endpoint: str, method: str, path: str, body: bytes = b"") -> bytes:
    """Send a request to an S3 server that checks no signatures; raises AssertionError unless it succeeds."""
    host, port = endpoint.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request(
        method, path, body, {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/x"}
    )
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status < 300, content
    return content


def upload(endpoint: str, folder: Path, bucket: str, prefix: str) -> str:
    """Upload the files of a folder to a bucket, which is created if missing; return their common URL."""
    request(endpoint, "PUT", f"/{bucket}")
    for path in sorted(folder.iterdir()):
        if path.is_file():
            request(endpoint, "PUT", f"/{bucket}/{prefix}/{path.name}", path.read_bytes())
    return f"s3://{bucket}/{prefix}"
