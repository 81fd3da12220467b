"""A stand-in for the Hugging Face Hub on this machine: what huggingface_hub asks for models, and nothing more."""

import base64
import hashlib
import json
from typing import Any

from http_server import HttpServer
from werkzeug.wrappers import Request, Response

Files = dict[str, bytes]


class HubServer(HttpServer):
    def __init__(self) -> None:
        self.models: dict[str, Files] = {}
        self.requests: list[str] = []
        super().__init__(Request.application(self.answer))

    def answer(self, request: Request) -> Response:
        path = request.path.strip("/")
        self.requests.append(f"{request.method} {path}")
        if path == "api/repos/create":
            if "Authorization" not in request.headers:
                return reply({"error": "Invalid username or password."}, 401)
            name = "{organization}/{name}".format(**request.get_json(force=True))
            self.models.setdefault(name, {})
            return reply({"url": f"{self.url}/{name}"})
        if path == "api/validate-yaml":
            return reply({"errors": [], "warnings": []})
        words = path.removeprefix("api/models/").split("/")
        model, action, rest = "/".join(words[:2]), "".join(words[2:3]), words[3:]
        if model not in self.models:
            return missing("RepoNotFound")
        files = self.models[model]
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        match action:
            case "" | "revision" if rest in ([], ["main"], [sha]):
                return reply(
                    {"id": model, "sha": sha, "siblings": [{"rfilename": name} for name in files]}
                )
            case "" | "revision":
                return missing("RevisionNotFound")
            case "tree":
                return reply([describe(name, data) for name, data in files.items()])
            case "preupload":
                asked = request.get_json(force=True)["files"]
                modes = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in asked
                ]
                return reply({"files": modes})
            case "commit":
                entries = [
                    entry["value"]
                    for entry in map(json.loads, request.data.splitlines())
                    if entry["key"] == "file"
                ]
                files |= {entry["path"]: base64.b64decode(entry["content"]) for entry in entries}
                return reply(
                    {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/{model}"}
                )
        name = "/".join(rest[1:])
        if action != "resolve" or name not in files:
            return missing("EntryNotFound")
        return Response(
            files[name],
            headers={"X-Repo-Commit": sha, "ETag": f'"{describe(name, files[name])["oid"]}"'},
        )


def reply(answer: Any, code: int = 200) -> Response:
    return Response(json.dumps(answer), code, content_type="application/json")


def missing(what: str) -> Response:
    return Response("{}", 404, {"X-Error-Code": what})


def describe(name: str, data: bytes) -> dict[str, object]:
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"type": "file", "path": name, "size": len(data), "oid": oid}
