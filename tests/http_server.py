"""A WSGI application served by threads of this process."""

import threading
from typing import Self
from wsgiref.types import WSGIApplication

from werkzeug.serving import WSGIRequestHandler, make_server


class QuietHandler(WSGIRequestHandler):
    """Handle requests without a line on stderr for each."""

    def log(self, *_: object) -> None:
        pass


class HttpServer:
    """A server that runs from its creation until the end of its context."""

    def __init__(self, application: WSGIApplication, address: str = "127.0.0.1") -> None:
        """Serve the application at a free port of an address."""
        self._server = make_server(
            address, 0, application, threaded=True, request_handler=QuietHandler
        )
        self.url = f"http://{address}:{self._server.port}"
        # Polled often, as every test waits for the end of its server.
        thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
