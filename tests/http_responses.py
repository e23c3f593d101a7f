"""Answers of the tests' own HTTP servers."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any


def respond(handler: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str]) -> None:
    """Sends a whole body of a known length; none to HEAD."""
    handler.send_response(status)
    for key, value in (headers | {"Content-Length": str(len(content))}).items():
        handler.send_header(key, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(content)


def respond_json(
    handler: BaseHTTPRequestHandler, status: int, value: Any, headers: dict[str, str] | None = None
) -> None:
    respond(handler, status, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))
