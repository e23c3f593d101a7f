"""A Hugging Face Hub in memory, over HTTP, that takes commits, as `huggingface_hub` pushes and reads them."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support import respond, respond_json

TOKEN, READ_ONLY = "hf_may_write", "hf_may_read"
_LARGE = 10_000
"""Bytes from which a file goes by LFS."""


@dataclass
class Repository:
    """Branch -> commits, the newest last; a commit is path -> content."""

    private: bool
    branches: dict[str, list[dict[str, bytes]]] = field(default_factory=lambda: {"main": [{".gitattributes": b""}]})


@dataclass
class WritableHub:
    """What was stored and asked for.

    With `hang_after` uploads the next waits, and sets `stuck`; with `moves` another writer commits first.
    """

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: list[str] = field(default_factory=list)
    hang_after: int | None = None
    moves: bool = False
    started: Iterator[int] = field(default_factory=itertools.count)
    stuck: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


@contextmanager
def writable_hub() -> Iterator[WritableHub]:
    """A server on a free port of this host."""
    hub = WritableHub()
    handler = type("Handler", (_CommitHandler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        server.server_close()


def commit_id(files: dict[str, bytes]) -> str:
    """The name of a commit: of its files alone."""
    digest = hashlib.sha1(usedforsecurity=False)
    for name, content in sorted(files.items()):
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


class _CommitHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: WritableHub

    def do_POST(self) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        if not self._may_write():
            return
        if path == "/api/validate-yaml":
            respond_json(self, 200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        else:
            self._to_branch(body, *path.removeprefix("/api/").split("/", 4))

    def _to_branch(self, body: bytes, kind: str, owner: str, name: str, verb: str, branch: str) -> None:
        repository = self.hub.repositories[f"{kind}/{owner}/{name}"]
        if verb == "branch":
            taken = branch in repository.branches
            repository.branches.setdefault(branch, [repository.branches["main"][-1]])
            respond_json(self, 409 if taken else 200, {"error": "exists"} if taken else {})
        elif verb == "preupload":
            self._preupload(repository.branches[branch][-1], json.loads(body))
        else:
            assert verb == "commit"
            url = f"{self.hub.address}/{f'{kind}/{owner}/{name}'.removeprefix('models/')}"
            self._commit(repository, branch, [json.loads(line) for line in body.splitlines()], url)

    def do_PUT(self) -> None:
        if self.hub.hang_after is not None and next(self.hub.started) >= self.hub.hang_after:
            while len(self.hub.uploads) < self.hub.hang_after:
                time.sleep(0.01)
            self.hub.stuck.set()
            self.hub.release.wait(30)
        body, oid = self._body(), self.path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self.hub.uploads.append(oid)
        respond(self, 200, b"", {})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/"):
            kind, *rest = path.removeprefix("/api/").split("/")
        else:
            kind, _, path = path[1:].partition("/") if path.startswith("/datasets/") else ("models", "", path[1:])
            rest = path.split("/")
        owner, name = (*rest[:2], "", "")[:2]
        rest, repository = rest[2:], self.hub.repositories.get(f"{kind}/{owner}/{name}")
        if repository is None:
            return respond_json(self, 404, {"error": "none"}, {"X-Error-Code": "RepoNotFound"})
        revision = rest[1] if len(rest) > 1 else "main"
        every = [commit for commits in repository.branches.values() for commit in commits]
        files = next((commit for commit in every if commit_id(commit) == revision), None)
        files = repository.branches[revision][-1] if files is None else files
        if rest and rest[0] == "resolve":
            content = files["/".join(rest[2:])]
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit_id(files)}
            return respond(self, 200, content, headers)
        if rest and rest[0] == "tree":
            blobs = [{"type": "file", "path": n, "size": len(c), "oid": _git_oid(c)} for n, c in files.items()]
            return respond_json(self, 200, blobs)
        siblings = [{"rfilename": each} for each in files]
        about = {"id": f"{owner}/{name}", "sha": commit_id(files), "private": repository.private, "tags": []}
        return respond_json(self, 200, about | {"siblings": siblings})

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def log_message(self, *_: Any) -> None:
        """Suppresses the access log."""

    def _body(self) -> bytes:
        if (size := self.headers.get("Content-Length")) is not None:
            return self.rfile.read(int(size))
        parts = []
        while count := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(count))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _may_write(self) -> bool:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token != TOKEN:
            respond_json(self, 403 if token == READ_ONLY else 401, {"error": "refused"})
        return token == TOKEN

    def _create(self, asked: dict[str, Any]) -> None:
        key = f"{asked.get('type', 'model')}s/{asked['organization']}/{asked['name']}"
        taken = key in self.hub.repositories
        self.hub.repositories.setdefault(key, Repository(private=asked.get("visibility") == "private"))
        respond_json(self, 409 if taken else 200, {"url": f"{self.hub.address}/{key.removeprefix('models/')}"})

    def _preupload(self, files: dict[str, bytes], asked: dict[str, Any]) -> None:
        answer = []
        for each in asked["files"]:
            mode = "lfs" if each["size"] >= _LARGE else "regular"
            there = files.get(each["path"])
            known = None if there is None else hashlib.sha256(there).hexdigest() if mode == "lfs" else _git_oid(there)
            answer.append({"path": each["path"], "uploadMode": mode, "shouldIgnore": False, "oid": known})
        respond_json(self, 200, {"files": answer})

    def _batch(self, asked: dict[str, Any]) -> None:
        def entry(each: dict[str, Any]) -> dict[str, Any]:
            if each["oid"] in self.hub.objects:
                return each
            return each | {"actions": {"upload": {"href": f"{self.hub.address}/upload/{each['oid']}"}}}

        respond_json(self, 200, {"transfer": "basic", "objects": [entry(each) for each in asked["objects"]]})

    def _commit(self, repository: Repository, branch: str, lines: list[dict[str, Any]], url: str) -> None:
        if self.hub.moves:
            repository.branches[branch].append(repository.branches[branch][-1] | {"old.bin": b"1"})
        files = dict(repository.branches[branch][-1])
        if lines[0]["value"].get("parentCommit") != commit_id(files):
            return respond_json(self, 412, {"error": "the branch has moved"})
        for line in lines[1:]:
            value = line["value"]
            large = line["key"] == "lfsFile"
            files[value["path"]] = self.hub.objects[value["oid"]] if large else base64.b64decode(value["content"])
        repository.branches[branch].append(files)
        return respond_json(self, 200, {"commitUrl": f"{url}/commit/{commit_id(files)}", "commitOid": commit_id(files)})


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
