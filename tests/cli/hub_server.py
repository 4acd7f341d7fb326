"""A hub over HTTP for tests: the endpoints that the hub's client uses, and their faults."""

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + 34 * "0"
API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?")
RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
# The hub stores files of these kinds outside git.
LARGE = (".safetensors", ".bin", ".pt")


@dataclass
class Faults:
    """Faults of the hub. Counters go down with each use."""

    break_after: int | None = None
    """Bytes after which a transfer of a large file ends."""
    num_breaks: int = 0
    corrupt: bool = False
    num_server_errors: int = 0
    gated: bool = False
    etag: str | None = None
    """Sent for large files in place of their checksum."""
    token: str | None = None
    chunk_pause_s: float = 0.0
    num_added: int = 0
    """Bytes by which large files exceed their declared length; negative for shorter files."""
    info: object = None
    """Sent in place of the information about a model; bytes are sent as they are."""


@dataclass
class Hub:
    models: dict[str, Mapping[str, bytes]]
    faults: Faults = field(default_factory=Faults)
    port: int = 0
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and range of each request for a file."""

    def __enter__(self) -> "Hub":
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def downloads(self, name: str) -> list[str | None]:
        """Return the ranges that were asked for of a file."""
        return [r for method, path, r in self.requests if method == "GET" and path.endswith(name)]


def etag_of(name: str, content: bytes) -> str:
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := API.fullmatch(path):
            self._send_info(match[1], match[2] or "main")
        elif match := RESOLVE.fullmatch(path):
            self._send_file(match[1], match[2], match[3])
        else:
            self._refuse(404, "EntryNotFound")

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _is_refused(self, model: str, revision: str) -> bool:
        if model not in self.owner.models:
            self._refuse(401, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            return False
        return True

    def _send_info(self, model: str, revision: str) -> None:
        if self._is_refused(model, revision):
            return
        siblings = []
        for name, content in self.owner.models[model].items():
            sibling: dict[str, object] = {"rfilename": name, "size": len(content)}
            if name.endswith(LARGE):
                digest = self.owner.faults.etag or etag_of(name, content)
                lfs = {"sha256": digest, "size": len(content), "pointerSize": 134}
                sibling |= {"blobId": 40 * "a", "lfs": lfs}
            else:
                sibling["blobId"] = etag_of(name, content)
            siblings.append(sibling)
        info = self.owner.faults.info or {"id": model, "sha": COMMIT, "siblings": siblings}
        body = info if isinstance(info, bytes) else json.dumps(info).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, model: str, revision: str, name: str) -> None:
        faults, requested = self.owner.faults, self.headers.get("Range")
        self.owner.requests.append((self.command, name, requested))
        if self._is_refused(model, revision):
            return
        authorization = self.headers.get("Authorization")
        if faults.gated and (faults.token is None or authorization != f"Bearer {faults.token}"):
            return self._refuse(403 if authorization else 401, "GatedRepo")
        if self.command == "GET" and faults.num_server_errors > 0:
            faults.num_server_errors -= 1
            return self._refuse(503, "ServerError")
        content = self.owner.models[model].get(name)
        if content is None:
            return self._refuse(404, "EntryNotFound")
        start = int(requested.removeprefix("bytes=").removesuffix("-")) if requested else 0
        etag = etag_of(name, content)
        if name.endswith(LARGE):
            content = (content + bytes(max(0, faults.num_added)))[: len(content) + faults.num_added]
        self.send_response(206 if requested else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Linked-Etag", f'"{etag}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Content-Length", str(len(content) - start))
        if requested:
            content_range = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if self.command == "GET":
            self._send_content(name, content[start:])

    def _send_content(self, name: str, content: bytes) -> None:
        faults = self.owner.faults
        if name.endswith(LARGE):
            if faults.corrupt:
                content = content[:-1] + bytes([content[-1] ^ 1])
            if faults.num_breaks > 0 and faults.break_after is not None:
                faults.num_breaks -= 1
                content, self.close_connection = content[: faults.break_after], True
        # A client that is killed reads no more.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for first in range(0, len(content), 1 << 16):
                self.wfile.write(content[first : first + (1 << 16)])
                time.sleep(faults.chunk_pause_s)
