"""A real S3 server on this machine (moto), with faults between it and its clients where a test wants them."""

from __future__ import annotations

import base64
import logging
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from typing import Any

import fsspec
import pytest

from tests.support import wait_until

Application = Callable[[dict[str, Any], Any], Any]
"""A WSGI application: environment and start_response -> the response's parts."""


class Faulty:
    """Faults between clients and a server, drawn by a seed.

    Attributes:
        rate: share of requests that fail, while it is above zero.
        down: all requests fail.
        down_after: method and path of a request after which all fail, as a pattern.
        forbidden: methods that are answered with 403, with spaces between.
        overwrites: conditions of writes are lost on the way.
        seconds: duration of every write.
        held: writes of this path wait while it is set, as a pattern.
        requests: method and path of all.
        injected: number of faults by kind.
    """

    def __init__(self, seed: int = 0, rate: float = 0.0) -> None:
        self.rate, self.down, self.seconds = rate, False, 0.0
        self.held: str | None = None
        self.down_after: str | None = None
        self.forbidden, self.overwrites = "", False
        self.requests: list[tuple[str, str]] = []
        self.injected: Counter[str] = Counter()
        self._random, self._lock = random.Random(seed), threading.Lock()

    def between(self, app: Application) -> Application:
        """Wraps the server's application."""

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            with self._lock:
                self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
                failing = self._random.random() < self.rate
                kind = self._random.choice(["503", "reset", "stall", "lost"]) if failing else "none"
                kind = "503" if self.down else kind
                self.injected[kind] += 1
            if self.overwrites:
                environ.pop("HTTP_IF_NONE_MATCH", None)
            if environ["REQUEST_METHOD"] in self.forbidden.split():
                _read_body(environ)
                start_response("403 Forbidden", [("Content-Type", "application/xml")])
                return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
            if environ["REQUEST_METHOD"] == "PUT":
                self._delay(environ["PATH_INFO"])
            if kind == "stall":
                time.sleep(1.0)
            if kind == "503":
                _read_body(environ)
                start_response("503 Slow Down", [("Content-Type", "application/xml")])
                return [b"<Error><Code>SlowDown</Code><Message>reduce your request rate</Message></Error>"]
            if kind == "reset":
                _hang_up(environ)
            found = app(environ, start_response)
            if self.down_after and fnmatch(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}", self.down_after):
                self.down = True
            if kind == "lost":  # the store has done it, and its answer does not arrive
                b"".join(found)
                _hang_up(environ)
            return found

        return answer

    def _delay(self, path: str) -> None:
        time.sleep(self.seconds)
        while self.held and fnmatch(path, self.held):
            time.sleep(0.01)


def _read_body(environ: dict[str, Any]) -> None:
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))


def _hang_up(environ: dict[str, Any]) -> None:
    with suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables of this process, and has fsspec read its own."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in variables.items():
            patch.setenv(key, value)
        fsspec.config.conf.clear()
        fsspec.config.set_conf_env(fsspec.config.conf)
        yield


@contextmanager
def azure_server(container: str) -> Iterator[Any]:
    """Serves an empty container by Azurite, Microsoft's emulator; see `s3_server`."""
    adlfs = pytest.importorskip("adlfs", reason="needs adlfs")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("needs Azurite (npm install azurite) in the PATH")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    account, key = "devstoreaccount1", base64.b64encode(b"headrace").decode()
    options = ("--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry")
    command = [program, *options, "--blobPort", str(port)]
    process = subprocess.Popen(command, env=os.environ | {"AZURITE_ACCOUNTS": f"{account}:{key}"})
    endpoint = f"http://127.0.0.1:{port}/{account}"
    connection = f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};BlobEndpoint={endpoint};"
    try:
        wait_until(lambda: _listens(port), process=process)
        with environment({"AZURE_STORAGE_CONNECTION_STRING": connection}):
            adlfs.AzureBlobFileSystem.clear_instance_cache()
            files = adlfs.AzureBlobFileSystem(connection_string=connection, use_listings_cache=False)
            files.mkdir(container)
            yield files
            adlfs.AzureBlobFileSystem.clear_instance_cache()
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextmanager
def s3_server(bucket: str, *, between: Callable[[Application], Application] = lambda app: app) -> Iterator[Any]:
    """Serves an empty bucket; its address and keys are in the environment, for child processes, too.

    Args:
        bucket: its name.
        between: wraps the server's application.

    Yields:
        The `s3fs.S3FileSystem` of the server.
    """
    moto = pytest.importorskip("moto.server", reason="needs moto and flask, an S3 server for tests")
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs")
    from werkzeug.serving import make_server  # noqa: PLC0415

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # a line per request, and the tracebacks of our faults
    app = moto.DomainDispatcherApplication(moto.create_backend_app)
    server = make_server("127.0.0.1", 0, between(app), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with environment(variables):
        s3fs.S3FileSystem.clear_instance_cache()
        files = s3fs.S3FileSystem(use_listings_cache=False)
        files.mkdir(bucket)
        yield files
        files.rm(bucket, recursive=True)
        s3fs.S3FileSystem.clear_instance_cache()
    server.shutdown()
