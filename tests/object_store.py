"""A real S3 server on this machine (moto), with faults between it and its clients where a test wants them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest

Application = Callable[[dict[str, Any], Any], Any]
"""A WSGI application: environment and start_response -> the response's parts."""


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
