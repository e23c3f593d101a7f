"""A fake Hugging Face Hub for tests without a network: serves a folder as the dataset `headrace/corpus`.

It implements the part of the Hub's HTTP API that `huggingface_hub`'s file system uses; the client is the real one.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.http_responses import respond, respond_json

COMMIT = "0" * 40
_API, _FILES = "/api/datasets/headrace/corpus", "/datasets/headrace/corpus/resolve/"


@contextmanager
def serve_hub(folder: Path) -> Iterator[str]:

    class Handler(_Handler):
        root = folder

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(_FILES):
            self._file(path.removeprefix(_FILES).partition("/")[2])
        elif path.startswith(f"{_API}/tree/"):
            self._tree(path.removeprefix(f"{_API}/tree/").partition("/")[2])
        elif path in (_API, f"{_API}/revision/main", f"{_API}/revision/{COMMIT}"):
            respond_json(
                self, 200, {"id": "headrace/corpus", "sha": COMMIT, "private": False, "tags": [], "siblings": []}
            )
        else:
            self._missing()

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if not self.path.startswith(f"{_API}/paths-info/"):
            return self._missing()
        names = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        return respond_json(self, 200, [self._entry(self.root / name) for name in names if (self.root / name).exists()])

    def log_message(self, *_: Any) -> None:
        """Suppresses the access log."""

    def _tree(self, name: str) -> None:
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        folder = self.root / name
        if not folder.is_dir():
            return self._missing()
        return respond_json(
            self, 200, [self._entry(path) for path in sorted(folder.rglob("*") if recursive else folder.iterdir())]
        )

    def _entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.root).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": _oid(name.encode()), "size": 0, "path": name}
        return {"type": "file", "oid": _oid(path.read_bytes()), "size": path.stat().st_size, "path": name}

    def _file(self, name: str) -> None:
        if not (self.root / name).is_file():
            return self._missing()
        content = (self.root / name).read_bytes()
        first, last = 0, len(content) - 1
        if byte_range := self.headers.get("Range"):
            low, _, high = byte_range.removeprefix("bytes=").partition("-")
            first, last = int(low), min(int(high), last) if high else last
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if byte_range:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return respond(self, 206 if byte_range else 200, content[first : last + 1], headers)

    def _missing(self) -> None:
        respond(self, 404, b'{"error": "EntryNotFound"}', {"X-Error-Code": "EntryNotFound"})


def _oid(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
