"""A fake model hub on loopback with real sockets: the endpoints that downloads use, and scripted failures."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LARGE = (".safetensors", ".gguf", ".bin", ".pth")
_PAGE_FILES = 3  # small, so that listings have several pages


@dataclass
class FakeHub:
    """State and script of the hub. repos: name -> path -> content. status: by repository, responses (status, headers)
    to send instead, once per entry. cut_after: path -> bytes after which the connection is cut, once per entry."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    status: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)
    cut_after: dict[str, list[int]] = field(default_factory=dict)
    token: str | None = None
    ignores_range: bool = False
    ends_early: bool = False
    endpoint: str = ""
    served: dict[str, int] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    leaked_tokens: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, repo: str, folder: Path) -> None:
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        self.repos[repo] = {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}

    def served_bytes(self, suffix: str = "") -> int:
        return sum(count for path, count in self.served.items() if path.endswith(suffix))


@contextmanager
def serve_hub(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(_Handler):
        fake = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeHub

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        hub, url = self.fake, urlsplit(self.path)
        with hub.lock:
            hub.requests.append(self.path)
        parts = unquote(url.path).strip("/").split("/")
        if parts[0] == "cdn":
            if self.headers["authorization"]:
                hub.leaked_tokens.append(self.path)
            return self._content("/".join(parts[1:3]), "/".join(parts[3:]))
        repo = "/".join(parts[2:4]) if parts[0] == "api" else "/".join(parts[:2])
        if hub.status.get(repo):
            status, headers = hub.status[repo].pop(0)
            return self._send(status, b"no", headers)
        if hub.token and self.headers["authorization"] != f"Bearer {hub.token}":
            return self._send(
                401, b"Invalid username or password.", {"X-Error-Code": "GatedRepo"} if repo == "org/gated" else {}
            )
        if repo not in hub.repos:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if parts[0] == "api" and parts[4] == "revision":
            return self._revision(parts[5])
        if parts[0] == "api":
            return self._tree(repo, int(parse_qs(url.query).get("cursor", ["0"])[0]))
        return self._resolve(repo, parts[3], "/".join(parts[4:]))

    def _revision(self, revision: str) -> None:
        if revision not in ("main", "v1.0", COMMIT):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        return self._send(200, json.dumps({"sha": COMMIT}).encode())

    def _tree(self, repo: str, cursor: int) -> None:
        entries = [_entry(path, content) for path, content in self.fake.repos[repo].items()]
        entries.insert(0, {"type": "directory", "path": "original", "oid": "0", "size": 0})
        page, following = entries[cursor : cursor + _PAGE_FILES], cursor + _PAGE_FILES
        link = f'<{self.fake.endpoint}/api/models/{repo}/tree/{COMMIT}?recursive=true&cursor={following}>; rel="next"'
        return self._send(200, json.dumps(page).encode(), {"Link": link} if following < len(entries) else {})

    def _resolve(self, repo: str, revision: str, path: str) -> None:
        assert revision == COMMIT, "files of one download must be of one commit"
        if not path.endswith(_LARGE):
            return self._content(repo, path)
        port = self.fake.endpoint.rpartition(":")[2]
        return self._send(302, b"", {"Location": f"http://localhost:{port}/cdn/{repo}/{path}"})

    def _content(self, repo: str, path: str) -> None:
        whole = self.fake.repos[repo][path]
        wanted = "" if self.fake.ignores_range else self.headers["range"] or ""
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first or 0), int(last or len(whole) - 1) + 1
        body = b"" if self.fake.ends_early and start else whole[start:stop]
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(whole)}"} if wanted else {}
        cuts = self.fake.cut_after.get(path)
        cut = cuts.pop(0) if cuts else None
        with self.fake.lock:  # before sending: the client may read the counter as soon as it has the data
            self.fake.served[path] = self.fake.served.get(path, 0) + len(body[:cut])
        self._send(206 if wanted else 200, body, headers, cut)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, cut_after: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:cut_after])
        if cut_after is not None:
            self.close_connection = True


def _entry(path: str, content: bytes) -> dict[str, object]:
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": path, "oid": git, "size": len(content)}
    if path.endswith(_LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry
