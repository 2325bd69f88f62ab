"""The fake Hub with repositories: creation, uploads as LFS files or in a commit, and faults. Without Xet."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from fake_hub import GOOD, FakeHub

READ_ONLY, FINE_GRAINED = "hf_" + "readREAD" * 4, "hf_" + "fineFINE" * 4
ROLES = {GOOD: "write", READ_ONLY: "read", FINE_GRAINED: "fineGrained"}
LFS = (".safetensors", ".gguf", "tokenizer.json")


@dataclass
class Repository:
    """Its files, and the ids of its commits."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: ["0" * 40])


@dataclass
class Hub:
    """What the server has and does. `busy`: uploads that are answered with 503; `stalls`: uploads that are never
    answered; `full`: no storage is left. `requests`: method and path of each request, `tokens`: those of uploads."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    busy: int = 0
    stalls: bool = False
    full: bool = False
    requests: list[str] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)

    def count(self, start: str) -> int:
        """How many requests begin like this."""
        return sum(request.startswith(start) for request in self.requests)


class FakeHubUploads(FakeHub):
    """Answers the requests of huggingface_hub 2.4 that create a repository and commit to it."""

    hub: Hub

    def do_GET(self) -> None:
        self.hub.requests.append(f"GET {self.path}")
        token = (self.headers["authorization"] or "").removeprefix("Bearer ")
        name = self.path.removeprefix("/api/models/").partition("?")[0].removesuffix("/revision/main")
        if self.path == "/api/whoami-v2" and token in ROLES:
            access = {"accessToken": {"role": ROLES[token]}}
            self._answer(200, {"name": "ada", "orgs": [{"name": "team"}], "auth": access})
        elif self.path.startswith("/api/models/") and name in self.hub.repositories:
            found = self.hub.repositories[name]
            siblings = [{"rfilename": file} for file in found.files]
            self._answer(200, {"id": name, "private": found.private, "sha": found.commits[-1], "siblings": siblings})
        elif token in ROLES and token != GOOD:  # which FakeHub does not know
            self._answer(404, {"error": "Repository not found"}, "RepoNotFound")
        else:
            super().do_GET()

    def do_POST(self) -> None:
        self.hub.requests.append(f"POST {self.path}")
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        if self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            is_bad = "license: unknown-license" in json.loads(body)["content"]
            errors = [{"message": '"license" must be one of the known licenses'}] if is_bad else []
            self._answer(400 if is_bad else 200, {"errors": errors, "warnings": []})
        elif "/preupload/" in self.path:
            self._answer(200, {"files": [self._mode(each) for each in json.loads(body)["files"]]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            self._answer(200, {"transfer": "basic", "objects": [self._place(o) for o in json.loads(body)["objects"]]})
        elif "/commit/" in self.path:
            self._commit([json.loads(line) for line in body.splitlines()])
        else:
            self._answer(200, {})

    def do_PUT(self) -> None:
        self.hub.requests.append(f"PUT {self.path}")
        content = self.rfile.read(int(self.headers["content-length"]))
        if self.hub.stalls:
            self.hub.stalled.set()
            time.sleep(60)
        if self.hub.busy:
            self.hub.busy -= 1
            return self._answer(503, {})
        assert not self.headers["authorization"], "the storage must not get the token"
        self.hub.stored[hashlib.sha256(content).hexdigest()] = content
        return self._answer(200, {})

    def _name(self) -> str:
        return "/".join(self.path.removeprefix("/api/models").split("/")[1:3]).removesuffix(".git")

    def _create(self, body: dict[str, Any]) -> None:
        owner = body.get("organization") or "ada"
        if owner != "ada" or self.headers["authorization"] == f"Bearer {FINE_GRAINED}":
            return self._answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        name = f"{owner}/{body['name']}"
        self.hub.repositories[name] = Repository(body["visibility"] == "private")
        return self._answer(200, {"url": f"{self.hub.address}/{name}"})

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        path = file["path"]
        known = self.hub.repositories[self._name()].files.get(path)
        is_lfs = path.endswith(LFS)
        oid = None
        if known is not None:
            git = hashlib.sha1(b"blob %d\0" % len(known) + known).hexdigest()
            oid = hashlib.sha256(known).hexdigest() if is_lfs else git
        return {"path": path, "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False, "oid": oid}

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.hub.address}/storage/{wanted['oid']}"
        actions = {"upload": {"href": href}, "verify": {"href": f"{self.hub.address}/verify"}}
        return {**wanted, **({} if wanted["oid"] in self.hub.stored else {"actions": actions})}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        if self.hub.full:
            return self._answer(403, {"error": "Private repository storage limit reached"})
        found = self.hub.repositories[self._name()]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                found.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                found.files[value["path"]] = self.hub.stored[value["oid"]]
        found.commits.append(hashlib.sha1(repr(lines).encode()).hexdigest())
        oid = found.commits[-1]
        return self._answer(200, {"commitUrl": f"{self.hub.address}/{self._name()}/commit/{oid}", "commitOid": oid})


@contextmanager
def fake_hub_uploads() -> Iterator[Hub]:
    """A running server that accepts uploads."""
    hub = Hub()
    handler = type("Handler", (FakeHubUploads,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()
