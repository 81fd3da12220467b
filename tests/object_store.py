"""An S3 server (moto's, on threads of this process) that injects the faults of object storage."""

import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.request import Request, urlopen
from wsgiref.types import StartResponse

from http_server import HttpServer
from werkzeug.wrappers import Response

Kind = Literal["503", "403", "cut", "slow", "silent", "changed"]


@dataclass
class Fault:
    """A fault of requests for paths that end in `suffix`."""

    kind: Kind
    suffix: str = ""
    # Such requests that are answered before it begins.
    skipped: int = 0
    # Requests until it ends.
    times: int = 10**9
    # In the answers of a 503 or 403; by default SlowDown or AccessDenied.
    code: str = ""
    # Bytes per second of a slow body.
    rate: int = 10_000


class S3Server(HttpServer):
    """An S3 server that records the requests."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        # The import takes seconds, and few tests need it.
        from moto.server import DomainDispatcherApplication, create_backend_app

        self.faults: list[Fault] = []
        # Such as "GET /bucket/data/shard-000000.tar".
        self.requests: list[str] = []
        # Set to end silent and slow answers.
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._moto = DomainDispatcherApplication(create_backend_app)
        super().__init__(self._answer, address)

    def __exit__(self, *_: object) -> None:
        self._released.set()
        super().__exit__()

    def inject(self, kind: Kind, suffix: str = "", **details: float | str) -> None:
        """Add a fault; see Fault."""
        with self._lock:
            self.faults.append(Fault(kind, suffix, **details))  # type: ignore[arg-type]

    def heal(self) -> None:
        """Remove all faults, and end those in progress."""
        with self._lock:
            self.faults.clear()
            self.requests.clear()
        self._released.set()
        self._released = threading.Event()

    def _find_fault(self, method: str, path: str) -> Fault | None:
        """Record a request, and return the first fault that it meets."""
        with self._lock:
            self.requests.append(f"{method} {path}")
            for fault in self.faults:
                if not path.endswith(fault.suffix) or fault.times <= 0:
                    continue
                # Only answers to GET have a body to damage.
                if fault.kind in ("cut", "slow", "changed") and method != "GET":
                    continue
                if fault.skipped > 0:
                    fault.skipped -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def _answer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        released = self._released
        fault = self._find_fault(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if fault and fault.kind == "silent":
            released.wait()
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError
        if fault and fault.kind in ("503", "403"):
            code = fault.code or ("SlowDown" if fault.kind == "503" else "AccessDenied")
            body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
            return Response(body, int(fault.kind))(environ, start_response)
        response = Response.from_app(self._moto, environ, buffered=True)
        if fault:
            response.response = _damage(
                response.get_data(), fault, released, environ["werkzeug.socket"]
            )
        return response(environ, start_response)


def _damage(
    data: bytes, fault: Fault, released: threading.Event, connection: socket.socket
) -> Iterator[bytes]:
    """Yield the body of an answer with a fault."""
    if fault.kind == "changed":
        if data:
            yield data[:-1] + bytes([data[-1] ^ 1])
    elif fault.kind == "cut":
        yield data[: len(data) // 2]
        connection.shutdown(socket.SHUT_RDWR)
    else:
        bytes_per_pause = max(1, fault.rate // 10)
        for start in range(0, len(data), bytes_per_pause):
            if released.wait(0.1):
                connection.shutdown(socket.SHUT_RDWR)
                return
            yield data[start : start + bytes_per_pause]


def environment(endpoint: str) -> dict[str, str]:
    """Return the variables that point S3 clients to the server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def request(endpoint: str, method: str, path: str, body: bytes = b"") -> bytes:
    """Send a request to an S3 server that checks no signatures; raise HTTPError if it fails."""
    credential = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/x"
    headers = {"Authorization": credential, "Content-Type": "application/octet-stream"}
    with urlopen(Request(endpoint + path, body, headers, method=method), timeout=60) as answer:
        return answer.read()


def upload(endpoint: str, folder: Path, bucket: str, prefix: str) -> str:
    """Upload the files of a folder to a bucket; return their common URL.

    The bucket is created if it does not exist.
    """
    request(endpoint, "PUT", f"/{bucket}")
    for path in sorted(folder.iterdir()):
        if path.is_file():
            request(endpoint, "PUT", f"/{bucket}/{prefix}/{path.name}", path.read_bytes())
    return f"s3://{bucket}/{prefix}"
