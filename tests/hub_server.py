"""A stand-in for the Hugging Face Hub: what huggingface_hub asks for models, and nothing more."""

import base64
import hashlib
import json

from http_server import HttpServer
from werkzeug.wrappers import Request, Response

# Contents by name.
Files = dict[str, bytes]


class HubServer(HttpServer):
    """A Hub that keeps models in memory and records the requests."""

    def __init__(self) -> None:
        # By "organization/name".
        self.models: dict[str, Files] = {}
        # Such as "GET api/models/organization/name".
        self.requests: list[str] = []
        super().__init__(Request.application(self.answer))

    def answer(self, request: Request) -> Response:
        """Answer a request for a model, or for the Hub as a whole."""
        path = request.path.strip("/")
        self.requests.append(f"{request.method} {path}")
        if path == "api/repos/create":
            return self._create(request)
        if path == "api/validate-yaml":
            return reply({"errors": [], "warnings": []})
        # A file is at organization/name/resolve/revision/file, without the prefix.
        words = path.removeprefix("api/models/").split("/")
        model = "/".join(words[:2])
        if model not in self.models:
            return missing("RepoNotFound")
        return self._answer_model(request, model, words[2:])

    def _create(self, request: Request) -> Response:
        if "Authorization" not in request.headers:
            return reply({"error": "Invalid username or password."}, 401)
        name = "{organization}/{name}".format(**request.get_json(force=True))
        self.models.setdefault(name, {})
        return reply({"url": f"{self.url}/{name}"})

    def _answer_model(self, request: Request, model: str, words: list[str]) -> Response:
        """Answer a request for a model; words: the parts of its path behind the model."""
        files = self.models[model]
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        match words:
            case [] | ["revision", "main"]:
                return describe_model(model, sha, files)
            case ["revision", revision] if revision == sha:
                return describe_model(model, sha, files)
            case ["revision", *_]:
                return missing("RevisionNotFound")
            case ["tree", *_]:
                return reply([describe(name, data) for name, data in files.items()])
            case ["preupload", *_]:
                return choose_upload_modes(request)
            case ["commit", *_]:
                files.update(read_commit(request))
                url = f"{self.url}/{model}"
                return reply({"success": True, "commitOid": "0" * 40, "commitUrl": url})
            case ["resolve", _, *parts] if "/".join(parts) in files:
                name = "/".join(parts)
                etag = f'"{describe(name, files[name])["oid"]}"'
                return Response(files[name], headers={"X-Repo-Commit": sha, "ETag": etag})
        return missing("EntryNotFound")


def describe_model(model: str, sha: str, files: Files) -> Response:
    """Answer what a revision of a model holds."""
    siblings = [{"rfilename": name} for name in files]
    return reply({"id": model, "sha": sha, "siblings": siblings})


def choose_upload_modes(request: Request) -> Response:
    """Answer that all files come inside of the commit, none by LFS."""
    asked = request.get_json(force=True)["files"]
    modes = [
        {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked
    ]
    return reply({"files": modes})


def read_commit(request: Request) -> Files:
    """Return the files of a commit, which is a line of JSON for each entry."""
    files = {}
    for line in request.data.splitlines():
        entry = json.loads(line)
        if entry["key"] == "file":
            file = entry["value"]
            files[file["path"]] = base64.b64decode(file["content"])
    return files


def reply(answer: object, code: int = 200) -> Response:
    """Return an answer in JSON."""
    return Response(json.dumps(answer), code, content_type="application/json")


def missing(error_code: str) -> Response:
    """Return the Hub's answer about something that does not exist."""
    return Response("{}", 404, {"X-Error-Code": error_code})


def describe(name: str, data: bytes) -> dict[str, object]:
    """Return the Hub's entry of a file, whose id is that of a Git blob."""
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"type": "file", "path": name, "size": len(data), "oid": oid}
