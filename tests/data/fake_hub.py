"""A hub on this machine.

Repositories of models and data sets by revision, served as huggingface_hub asks for them.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from ssl import SSLContext
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Hub:
    """repositories: 'models/org/name' or 'datasets/org/name' -> revision -> path -> bytes.

    Heads: what main is.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.heads: dict[str, str] = {}
        self.tags: dict[tuple[str, str], str] = {}  # (repository, tag) -> revision
        self.gated: set[str] = set()
        self.token: str | None = None  # opens gated repositories
        self.renamed: dict[str, str] = {}  # former name of a repository -> its name
        self.busy: dict[
            str, int
        ] = {}  # path -> how often it is still answered with 429, to be asked a second later
        self.cut: dict[
            str, int
        ] = {}  # path -> how often the connection still breaks in the middle of its content
        self.linked: tuple[
            str, ...
        ] = ()  # endings of files that a resolved address redirects to, as of large files
        self.files: dict[str, bytes] = {}  # that are in no repository, by the path of their address
        self.tls: SSLContext | None = (
            None  # as a proxy it answers for these hosts by their certificate
        )
        self.hosts: tuple[str, ...] = ()
        self.asked: list[str] = []
        self.down = False  # 503 for whatever is asked
        self.address = ""

    def push(self, name: str, folder: Path, revision: str | None = None) -> str:
        """Push the files of a folder as a new revision of a repository, and return the revision."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        digest = hashlib.sha1(
            b"".join(key.encode() + value for key, value in files.items()), usedforsecurity=False
        )
        revision = revision or digest.hexdigest()
        self.repositories.setdefault(name, {})[revision] = files
        self.heads[name] = revision
        return revision

    def find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        revisions = self.repositories.get(name, {})
        found = (
            self.heads.get(name)
            if revision == "main"
            else self.tags.get((name, revision), revision)
        )
        return (found, revisions[found]) if found in revisions else None


API = re.compile(
    r"/api/(models|datasets)/([^/]+/[^/]+?)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?$"
)
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None: ...

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked and status == 200:
            first, last = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
            headers["Content_Range"] = f"bytes {first}-{last}/{len(body)}"
            status, body = 206, body[first : last + 1]
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command == "HEAD":
            return
        path = unquote(urlsplit(self.path).path)
        if self.hub.cut.get(path, 0) and body:
            self.hub.cut[path] -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def do_CONNECT(self) -> None:  # noqa: N802
        if self.hub.tls is None or self.path.partition(":")[0] not in self.hub.hosts:
            self.answer(502)
            return
        self.send_response(200)
        self.end_headers()
        self.connection = self.hub.tls.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = (
            self.connection.makefile("rb"),
            self.connection.makefile("wb", buffering=0),
        )
        self.close_connection = False

    def do_HEAD(self) -> None:  # noqa: N802
        self.do_GET()

    def do_POST(self) -> None:  # noqa: N802
        self.do_GET()

    def do_GET(self) -> None:  # noqa: N802
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.asked.append(f"{self.command} {path}")
        if self.hub.down:
            return self.answer(503)
        if self.hub.busy.get(path, 0):
            self.hub.busy[path] -= 1
            return self.answer(429, Retry_After="1")
        if path in self.hub.files:
            return self.answer(200, self.hub.files[path])
        for old, new in self.hub.renamed.items():
            if f"/{old}/" in f"{self.path}/":
                return self.answer(307, Location=self.path.replace(old, new, 1))
        if match := API.match(path):
            return self.api(match, body)
        if match := FILE.match(path):
            return self.file(match)
        return self.answer(404, X_Error_Code="RepoNotFound")

    def api(self, match: re.Match[str], body: bytes) -> None:
        kind, name, what, revision, inside = match.groups()
        found = self.hub.find(f"{kind}/{name}", revision or "main")
        if found is None:
            there = f"{kind}/{name}" in self.hub.repositories
            return self.answer(404, X_Error_Code="RevisionNotFound" if there else "RepoNotFound")
        revision, files = found
        entries = {
            path: {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
            for path, data in files.items()
        }
        folders = {
            str(parent) for path in files for parent in Path(path).parents if str(parent) != "."
        }
        entries |= {path: {"type": "directory", "path": path, "oid": "0" * 40} for path in folders}
        if what == "tree":
            prefix = f"{inside}/" if inside else ""
            chosen = [entry for path, entry in entries.items() if path.startswith(prefix)]
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[
                0
            ].lower() in ("true", "1")
            chosen = (
                chosen
                if recursive
                else [one for one in chosen if "/" not in one["path"][len(prefix) :]]
            )
            if inside and not chosen:
                return self.answer(404, X_Error_Code="EntryNotFound")
            reply: Any = chosen
        elif what == "paths-info":
            text = body.decode()
            asked = (
                json.loads(text)["paths"]
                if text.startswith("{")
                else parse_qs(text).get("paths", [])
            )
            reply = [entries[path] for path in asked if path in entries]
        else:
            gated = "auto" if f"{kind}/{name}" in self.hub.gated else False
            siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
            reply = {
                "id": name,
                "sha": revision,
                "siblings": siblings,
                "private": False,
                "gated": gated,
                "tags": [],
            }
            reply |= {
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "lastModified": "2026-01-01T00:00:00.000Z",
            }
        return self.answer(200, json.dumps(reply).encode(), Content_Type="application/json")

    def file(self, match: re.Match[str]) -> None:
        dataset, name, revision, path = match.groups()
        name = f"{'datasets' if dataset else 'models'}/{name}"
        found = self.hub.find(name, revision)
        if found is None:
            there = name in self.hub.repositories
            return self.answer(404, X_Error_Code="RevisionNotFound" if there else "RepoNotFound")
        known = self.hub.token and self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if name in self.hub.gated and not known:
            return self.answer(401, X_Error_Code="GatedRepo", X_Repo_Commit=found[0])
        if path not in found[1]:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=found[0])
        data = found[1][path]
        etag = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        if path.endswith(self.hub.linked):
            elsewhere = f"/files/{etag}"
            self.hub.files[elsewhere] = data
            told = {
                "X_Linked_Size": str(len(data)),
                "X_Linked_ETag": f'"{etag}"',
                "X_Repo_Commit": found[0],
            }
            host = self.hub.address.replace(
                "127.0.0.1", "localhost"
            )  # another one, as the Hub's store is
            return self.answer(302, Location=f"{host}{elsewhere}", **told)
        return self.answer(
            200, data, ETag=f'"{etag}"', X_Repo_Commit=found[0], Accept_Ranges="bytes"
        )


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
