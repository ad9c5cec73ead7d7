"""A hub on loopback: enough of the hub's HTTP API for huggingface_hub to create, commit, list and download.

It checks what the real one checks (LFS bytes against their oid, the parent of a commit) and can fail every n-th
call in turn with 500, 503, a connection reset before the call is served, and one after it was served.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

PART = 1 << 18
PAGE = 5
FAILURES = ("500", "reset", "503", "lost")


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class Entry:
    data: bytes
    lfs: bool

    def listed(self, path: str) -> dict[str, Any]:
        sha256 = hashlib.sha256(self.data).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(self.data)}\n".encode()
        row = {"type": "file", "path": path, "size": len(self.data), "oid": git_id(pointer if self.lfs else self.data)}
        return row | ({"lfs": {"oid": sha256, "size": len(self.data), "pointerSize": len(pointer)}} if self.lfs else {})


@dataclass
class State:
    """Everything the hub holds, and what was asked of it. `fail_every` 0 is a good day."""

    fail_every: int = 0
    commits: list[tuple[str, dict[str, Entry]]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    received: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def head(self) -> str:
        return f"{len(self.commits):040x}"

    @property
    def files(self) -> dict[str, Entry]:
        return self.commits[-1][1]

    def at(self, revision: str) -> tuple[str, dict[str, Entry]]:
        if revision == "main":
            return self.head, self.files
        return revision, self.commits[int(revision, 16) - 1][1]

    def put(self, title: str, files: dict[str, Entry]) -> None:
        self.commits.append((title, files))

    def enter(self, method: str, path: str) -> str:
        """Count a call and say how it is to fail, "" if it is to succeed."""
        with self.changed:
            number = len(self.calls) + 1
            failure = ""
            if self.fail_every and number % self.fail_every == 0:
                failure = FAILURES[number // self.fail_every % len(FAILURES)]
            self.calls.append((method, path, failure))
            self.changed.notify_all()
            return failure

    def asked(self, pattern: str) -> list[str]:
        return [path for method, path, _ in self.calls if re.search(pattern, f"{method} {path}")]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize, disable_nagle_algorithm = -1, True  # one packet an answer, at once
    server: "FakeHub"

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                self.body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        state, path = self.server.state, unquote(urlsplit(self.path).path)
        self.failure = state.enter(self.command, path)
        if self.failure in ("500", "503"):
            return self._answer(int(self.failure), {"error": "the hub has a bad day"})
        if self.failure == "reset" and not (self.command == "GET" and "/resolve/" in path):
            return self._reset()
        for method, pattern, handle in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                with state.changed:
                    reply = handle(self, state, *match.groups())
                return self._answer(*reply) if reply else None
        self._answer(404, {"error": f"no route for {self.command} {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None, size: int | None = None) -> None:
        if self.failure == "lost":
            return self._reset()
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        self.end_headers()
        if self.command != "HEAD":
            half = self.failure == "reset"  # a body that breaks off: the client has to ask for the rest
            self.wfile.write(body[: len(body) // 2] if half else body)
            self.wfile.flush()
            if half:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
        return None

    # One method per call of the hub's API.
    def create(self, state: State) -> Any:
        url = f"{self.server.url}/{self.server.repo}"
        if state.commits:
            return 409, {"url": url, "error": "You already created this model repo"}
        state.put("initial commit", {".gitattributes": Entry(b"*.safetensors filter=lfs\n", False)})
        return 200, {"url": url}

    def validate_yaml(self, state: State) -> Any:
        if json.loads(self.body)["content"].startswith("---\nbroken: ["):
            return 400, {"errors": [{"message": "bad indentation"}], "warnings": []}
        return 200, {"errors": [], "warnings": []}

    def info(self, state: State, revision: str | None) -> Any:
        if not state.commits:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if revision not in (None, "main") and not re.fullmatch(r"[0-9a-f]{40}", revision):
            return 404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"}
        sha, files = state.at(revision or "main")
        return 200, {"id": self.server.repo, "sha": sha, "siblings": [{"rfilename": name} for name in files]}

    def tree(self, state: State, revision: str) -> Any:
        rows = [entry.listed(path) for path, entry in sorted(state.at(revision)[1].items())]
        first = int((re.search(r"cursor=(\d+)", self.path) or [0, 0])[1])
        more = f"{self.server.url}{urlsplit(self.path).path}?recursive=True&cursor={first + PAGE}"
        headers = {"Link": f'<{more}>; rel="next"'} if first + PAGE < len(rows) else {}
        return 200, rows[first : first + PAGE], headers

    def preupload(self, state: State, revision: str) -> Any:
        held = state.at(revision)[1]
        answer = []
        for file in json.loads(self.body)["files"]:
            lfs = file["path"].endswith(".safetensors") or file["size"] > 10_000_000
            row = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
            if file["path"] in held:
                entry = held[file["path"]]
                row["oid"] = hashlib.sha256(entry.data).hexdigest() if entry.lfs else git_id(entry.data)
            answer.append(row)
        return 200, {"files": answer}

    def batch(self, state: State) -> Any:
        answer = []
        for wanted in json.loads(self.body)["objects"]:
            row = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in state.objects:
                base = f"{self.server.url}/lfs/{wanted['oid']}"
                upload: dict[str, Any] = {"href": base, "header": {}}
                if wanted["size"] > PART:
                    count = -(-wanted["size"] // PART)
                    upload = {"href": f"{base}/complete", "header": {"chunk_size": str(PART)} | {
                        str(number + 1): f"{base}/{number + 1}" for number in range(count)}}
                row["actions"] = {"upload": upload, "verify": {"href": f"{self.server.url}/lfs-verify"}}
            answer.append(row)
        return 200, {"transfer": "basic", "objects": answer}, {"Content-Type": "application/vnd.git-lfs+json"}

    def put_object(self, state: State, oid: str) -> Any:
        state.received += len(self.body)
        if hashlib.sha256(self.body).hexdigest() != oid:
            return 400, {"error": "checksum mismatch"}
        state.objects[oid] = self.body
        return 200, {}

    def put_part(self, state: State, oid: str, number: str) -> Any:
        state.received += len(self.body)
        state.parts[oid, int(number)] = self.body
        return 200, {}, {"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'}

    def complete(self, state: State, oid: str) -> Any:
        numbers = [part["partNumber"] for part in json.loads(self.body)["parts"]]
        data = b"".join(state.parts[oid, number] for number in numbers)
        if hashlib.sha256(data).hexdigest() != oid:
            return 400, {"error": "checksum mismatch"}
        state.objects[oid] = data
        return 200, {}

    def verify(self, state: State) -> Any:
        wanted = json.loads(self.body)
        right = len(state.objects.get(wanted["oid"], b"")) == wanted["size"]
        return (200, {}) if right else (404, {"error": "no such object"})

    def commit(self, state: State) -> Any:
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit", state.head) != state.head:
            return 412, {"error": "A commit has happened since. Please refresh and try again."}
        files = dict(state.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = Entry(base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in state.objects:
                    return 400, {"error": f"LFS object {value['oid']} does not exist"}
                files[value["path"]] = Entry(state.objects[value["oid"]], True)
            elif line["key"] == "deletedFile" and value["path"] in files:
                del files[value["path"]]
            else:
                return 400, {"error": f"cannot do {line}"}
        state.put(header["summary"], files)
        url = f"{self.server.url}/{self.server.repo}/commit/{state.head}"
        return 200, {"commitUrl": url, "commitOid": state.head, "pullRequestUrl": None}

    def resolve(self, state: State, revision: str, path: str) -> Any:
        sha, files = state.at(revision)
        if path not in files:
            return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"}
        entry, row = files[path], files[path].listed(path)
        served = self.server.serve_instead.get(path, entry.data)
        headers = {"ETag": f'"{row["lfs"]["oid"] if entry.lfs else row["oid"]}"', "X-Repo-Commit": sha}
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if wanted:
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(served) - 1}/{len(served)}"
            return 206, served[start:], headers
        return 200, served, headers


API = r"/api/models/[^/]+/[^/]+"
ROUTES = [
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", r"/api/validate-yaml", Handler.validate_yaml),
    ("GET", API + r"(?:/revision/(.+))?", Handler.info),
    ("GET", API + r"/tree/([^/]+)", Handler.tree),
    ("POST", API + r"/preupload/(.+)", Handler.preupload),
    ("POST", API + r"/commit/main", Handler.commit),
    ("POST", r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", Handler.batch),
    ("POST", r"/lfs-verify", Handler.verify),
    ("POST", r"/lfs/([0-9a-f]{64})/complete", Handler.complete),
    ("PUT", r"/lfs/([0-9a-f]{64})", Handler.put_object),
    ("PUT", r"/lfs/([0-9a-f]{64})/(\d+)", Handler.put_part),
    ("GET HEAD", r"/[^/]+/[^/]+/resolve/([^/]+)/(.+)", Handler.resolve),
]


class FakeHub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, repo: str = "someone/tiny"):
        super().__init__(("127.0.0.1", 0), Handler)
        self.state, self.repo = State(), repo
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.serve_instead: dict[str, bytes] = {}

    def handle_error(self, *_: Any) -> None:
        """Clients that are killed leave broken pipes; nothing to report."""

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()
