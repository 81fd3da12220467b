"""A stand-in for the Hugging Face Hub on this machine: what huggingface_hub asks for models, and nothing more."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


class HubServer:
    """Serves from its creation on; a context manager."""

    def __init__(self) -> None:
        self.models: dict[str, Files] = {}
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hub.answer(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

            do_GET = do_HEAD = do_POST  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def __enter__(self) -> "HubServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        path = unquote(urlsplit(request.path).path).strip("/")
        self.requests.append(f"{request.command} {path}")
        words = path.removeprefix("api/models/").split("/")
        model, action, rest = "/".join(words[:2]), words[2:3], words[3:]
        if path == "api/repos/create":
            asked = json.loads(body)
            if "Authorization" not in request.headers:
                return self._send(request, 401, {"error": "Invalid username or password."})
            name = f"{asked['organization']}/{asked['name']}"
            self.models.setdefault(name, {})
            return self._send(request, 200, {"url": f"{self.url}/{name}"})
        if path == "api/validate-yaml":
            return self._send(request, 200, {"errors": [], "warnings": []})
        if model not in self.models:
            return self._send(request, 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        files = self.models[model]
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        if action == ["revision"] or not action:
            if rest not in ([], ["main"], [sha]):
                return self._send(request, 404, {"error": "Invalid rev"}, {"X-Error-Code": "RevisionNotFound"})
            return self._send(request, 200, {"id": model, "sha": sha, "siblings": [{"rfilename": n} for n in files]})
        if action == ["tree"]:
            return self._send(request, 200, [_describe(name, data) for name, data in files.items()])
        if action == ["preupload"]:
            asked = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
            return self._send(request, 200, {"files": modes})
        if action == ["commit"]:
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return self._send(
                request, 200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/{model}"}
            )
        name = "/".join(rest[1:])
        if action == ["resolve"] and name in files:
            headers = {"X-Repo-Commit": sha, "ETag": f'"{_describe(name, files[name])["oid"]}"'}
            return self._send(request, 200, files[name], headers)
        return self._send(request, 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})

    def _send(self, request: BaseHTTPRequestHandler, code: int, answer: object, headers: Files | None = None) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        request.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            request.send_header(name, str(value))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)


def _describe(name: str, data: bytes) -> dict[str, object]:
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"type": "file", "path": name, "size": len(data), "oid": oid}
