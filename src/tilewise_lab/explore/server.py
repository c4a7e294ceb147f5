"""A small server for one reader: the page's files, and its data under /data/."""

from __future__ import annotations

import json
import threading
import traceback
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from urllib.parse import parse_qsl, urlsplit

from tilewise.errors import AttentionError
from tilewise_lab.explore.data import answer

STATIC = files("tilewise_lab.explore") / "static"
TYPES = {"index.html": "text/html", "app.css": "text/css", "app.js": "text/javascript"}
COMPUTING = threading.Lock()  # one answer at a time: torch uses all cores for each


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        name = url.path.lstrip("/") or "index.html"
        if name.startswith("data/"):
            self.answer(name.removeprefix("data/"), dict(parse_qsl(url.query, keep_blank_values=True)))
        elif name in TYPES:
            self.send(HTTPStatus.OK, (STATIC / name).read_bytes(), TYPES[name])
        else:
            self.send(HTTPStatus.NOT_FOUND, b"no such page", "text/plain")

    def answer(self, name: str, query: dict[str, str]) -> None:
        try:
            with COMPUTING:
                status, body = HTTPStatus.OK, answer(name, query)
        except AttentionError as error:
            status, body = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except Exception as error:
            traceback.print_exc()
            status, body = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}
        self.send(status, json.dumps(body, ensure_ascii=False).encode(), "application/json")

    def send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal shows the address."""


def serve(port: int) -> ThreadingHTTPServer:
    """A server on this machine only; port 0 is any free one."""
    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
