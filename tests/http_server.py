"""A WSGI application served by threads of this process."""

import threading
from typing import Any, Self

from werkzeug.serving import WSGIRequestHandler, make_server


class QuietHandler(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        pass


class HttpServer:
    """Serves from its creation on; a context manager."""

    def __init__(self, application: Any, address: str = "127.0.0.1") -> None:
        self._server = make_server(
            address, 0, application, threaded=True, request_handler=QuietHandler
        )
        self.url = f"http://{address}:{self._server.port}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
