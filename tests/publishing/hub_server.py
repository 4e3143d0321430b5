"""A model hub as a process of its own, as far as huggingface_hub speaks to it for publishing and fetching a model.

    python -m tests.publishing.hub_server READY [--page N] [--part BYTES]

READY is a file that receives the address once the server listens. Repositories live in memory and die with it.

Rights: `hf_writer` owns the namespace `me`; `hf_reader` may read; any other token is unknown.
Faults: POST /_control/faults takes a list of {"on": "METHOD regex", "status": 503, "times": 1}; with "after": true the
request is carried out and only its answer is lost; with "cut": true the connection is closed instead of an answer.
POST /_control/reset forgets everything, and takes {"page": entries of a listing, "part": bytes of an upload}.
GET /_control/log returns every request as [method, path, answer]; GET /_control/tokens the tokens seen.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

WRITER, READER = "hf_writer", "hf_reader"
LARGE = (".safetensors", ".bin", ".gguf")
ID = r"/(?P<repo>[\w.-]+/[\w.-]+)"
RELATIONS = ("adapter", "merge", "quantized", "finetune")


@dataclass(frozen=True)
class Stored:
    """One file of a revision."""

    data: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def blob(self) -> str:
        """The git id of what is in the tree: the content, or the pointer of a large file."""
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n"
        data = pointer.encode() if self.large else self.data
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        """As the tree lists it."""
        found: dict[str, Any] = {"type": "file", "oid": self.blob, "size": len(self.data), "path": path}
        if self.large:
            found["lfs"] = {"oid": self.sha256, "size": len(self.data), "pointerSize": 134}
        return found


Tree = dict[str, Stored]


@dataclass
class Repository:
    """Commits by id, and the names that point to them."""

    private: bool
    commits: dict[str, Tree] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def add(self, branch: str, tree: Tree, message: str) -> str:
        """A commit at the end of a branch."""
        state = json.dumps([self.branches.get(branch), message, {path: file.blob for path, file in tree.items()}])
        commit = hashlib.sha1(state.encode()).hexdigest()
        self.commits[commit] = tree
        self.branches[branch] = commit
        self.messages.append(message)
        return commit

    def find(self, revision: str) -> str | None:
        """The commit that a branch, a tag or an id names."""
        named = self.branches.get(revision) or self.tags.get(revision)
        return named or (revision if revision in self.commits else None)


@dataclass
class State:
    """Everything that the hub knows."""

    page: int = 1000
    part: int = 5 * 2**30
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    log: list[list[Any]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Refused(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, message: str, code: str = "", body: Any = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.body = status, message, code, body


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body after its head would wait for the client's late acknowledgement
    state: State

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @property
    def base(self) -> str:
        return f"http://{self.headers['Host']}"

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.data = self._body()
        path = unquote(parts.path)
        with self.state.lock:
            fault = None if path.startswith("/_control/") else self._fault(path)
            if fault and not fault.get("after"):
                return self._fail(fault, path)
            try:
                for method, pattern, serve in ROUTES:
                    match = re.fullmatch(pattern, path)
                    if match and self.command in method:
                        status, headers, body = 200, {}, serve(self, **match.groupdict())
                        break
                else:
                    raise Refused(404, f"no such place: {path}")
                if isinstance(body, tuple):
                    headers, body = body
            except Refused as refused:
                status, body = refused.status, refused.body or {"error": refused.message}
                headers = {
                    "X-Error-Message": refused.message,
                    **({"X-Error-Code": refused.code} if refused.code else {}),
                }
            if fault:
                return self._fail(fault, path)
            self._answer(status, headers, body, path)

    def _fault(self, path: str) -> dict[str, Any] | None:
        for fault in self.state.faults:
            if fault["times"] > 0 and re.fullmatch(fault["on"], f"{self.command} {path}"):
                if fault.get("skip", 0) > 0:
                    fault["skip"] -= 1
                    continue
                fault["times"] -= 1
                return fault
        return None

    def _fail(self, fault: dict[str, Any], path: str) -> None:
        if fault.get("cut"):
            self.state.log.append([self.command, path, "cut"])
            self.close_connection = True
            return
        self._answer(fault["status"], {"X-Error-Message": "told to fail"}, {"error": "told to fail"}, path)

    def _answer(self, status: int, headers: dict[str, str], body: Any, path: str) -> None:
        if not path.startswith("/_control/"):
            self.state.log.append([self.command, path, status])
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    # Rights

    @property
    def token(self) -> str:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.state.tokens.add(token)
        return token

    def _writer(self, namespace: str) -> None:
        if self.token not in (WRITER, READER):
            raise Refused(401, "Invalid credentials in Authorization header")
        if self.token != WRITER or namespace != "me":
            raise Refused(403, f"You don't have the rights to create a model under the namespace {namespace!r}")

    def _repository(self, repo: str, *, write: bool = False) -> Repository:
        found = self.state.repositories.get(repo)
        if found is None or (found.private and self.token != WRITER):
            raise Refused(401 if not self.token else 404, "Repository not found", "RepoNotFound")
        if write:
            self._writer(repo.split("/")[0])
        return found

    def _tree(self, repo: str, revision: str) -> tuple[str, Tree]:
        found = self._repository(repo)
        commit = found.find(revision)
        if commit is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, found.commits[commit]

    # The interface

    def control(self, what: str) -> Any:
        if what == "reset":
            Handler.state = State(**json.loads(self.data))
        if what == "faults":
            self.state.faults = [{"times": 1, **fault} for fault in json.loads(self.data)]
        if what == "objects":
            return {oid: len(data) for oid, data in self.state.objects.items()}
        if what == "messages":
            return {name: found.messages for name, found in self.state.repositories.items()}
        return {"log": self.state.log, "tokens": sorted(self.state.tokens)}.get(what, {})

    def whoami(self) -> Any:
        if self.token not in (WRITER, READER):
            raise Refused(401, "Invalid credentials in Authorization header")
        return {"type": "user", "name": "me", "auth": {"accessToken": {"role": "write"}}}

    def create(self) -> Any:
        asked = json.loads(self.data)
        namespace = asked.get("organization") or "me"
        self._writer(namespace)
        repo = f"{namespace}/{asked['name']}"
        if repo in self.state.repositories:
            told = "You already created this model repo"
            raise Refused(409, told, body={"error": told, "url": f"{self.base}/{repo}"})
        made = Repository(asked.get("visibility") == "private")
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LARGE).encode()
        made.add("main", {".gitattributes": Stored(attributes, False)}, "initial commit")
        self.state.repositories[repo] = made
        return {"url": f"{self.base}/{repo}"}

    def validate(self) -> Any:
        errors = list(metadata_faults(json.loads(self.data)["content"]))
        if errors:
            raise Refused(400, "Invalid metadata", body={"errors": [{"message": e} for e in errors], "warnings": []})
        return {"errors": [], "warnings": []}

    def info(self, repo: str, revision: str = "main") -> Any:
        commit, tree = self._tree(repo, revision)
        private = self.state.repositories[repo].private
        siblings = [{"rfilename": path} for path in tree]
        return {"_id": repo, "id": repo, "modelId": repo, "sha": commit, "private": private, "siblings": siblings}

    def tree(self, repo: str, revision: str) -> Any:
        _, tree = self._tree(repo, revision)
        start = int(self.query.get("cursor", 0))
        entries = [tree[path].entry(path) for path in sorted(tree)]
        more = {}
        if start + self.state.page < len(entries):
            address = f"{self.base}/api/models/{repo}/tree/{revision}?recursive=true&cursor={start + self.state.page}"
            more = {"Link": f'<{address}>; rel="next"'}
        return more, entries[start : start + self.state.page]

    def refs(self, repo: str) -> Any:
        found = self._repository(repo)

        def listed(kind: str, names: dict[str, str]) -> list[dict[str, str]]:
            return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": c} for n, c in names.items()]

        return {"branches": listed("heads", found.branches), "tags": listed("tags", found.tags), "converts": []}

    def preupload(self, repo: str, revision: str) -> Any:
        self._repository(repo, write=True)
        _, tree = self._tree(repo, revision)
        found = []
        for file in json.loads(self.data)["files"]:
            path, old = file["path"], tree.get(file["path"])
            large = path.endswith(LARGE) or file["size"] > 10 * 2**20
            told = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            found.append({**told, **({"oid": old.sha256 if old.large else old.blob} if old else {})})
        return {"files": found}

    def batch(self, repo: str) -> Any:
        self._repository(repo, write=True)
        objects = []
        for asked in json.loads(self.data)["objects"]:
            oid, size = asked["oid"], asked["size"]
            entry: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.state.objects:
                # A signed address: whoever has it may write there, so it must not be shown either.
                place = f"{self.base}/_objects/{oid}?X-Signature=secret"
                upload: dict[str, Any] = {"href": place}
                if size > self.state.part:
                    count = -(-size // self.state.part)
                    links = {str(n): f"{place}&part={n}" for n in range(1, count + 1)}
                    upload = {
                        "href": f"{self.base}/_complete/{oid}?X-Signature=secret",
                        "header": {"chunk_size": str(self.state.part), **links},
                    }
                entry["actions"] = {"upload": upload, "verify": {"href": f"{self.base}/_verify/{oid}"}}
            objects.append(entry)
        return {"transfer": "multipart", "objects": objects}

    def put(self, oid: str) -> Any:
        if self.query.get("X-Signature") != "secret":
            raise Refused(403, "the address is not signed")
        if "part" in self.query:
            self.state.parts[oid, int(self.query["part"])] = self.data
            return {"ETag": f'"{hashlib.md5(self.data).hexdigest()}"'}, {}
        self._store(oid, self.data)
        return {}

    def complete(self, oid: str) -> Any:
        numbers = [part["partNumber"] for part in json.loads(self.data)["parts"]]
        self._store(oid, b"".join(self.state.parts.pop((oid, number)) for number in numbers))
        return {}

    def _store(self, oid: str, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != oid:
            raise Refused(400, "the content is not what its address says")
        self.state.objects[oid] = data

    def verify(self, oid: str) -> Any:
        asked = json.loads(self.data)
        if len(self.state.objects.get(oid, b"")) != asked["size"]:
            raise Refused(404, "the object is not there")
        return {}

    def commit(self, repo: str, revision: str) -> Any:
        found = self._repository(repo, write=True)
        lines = [json.loads(line) for line in self.data.splitlines()]
        header = lines[0]["value"]
        head = found.branches.get(revision)
        if head is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        if header.get("parentCommit") not in (None, head):
            raise Refused(412, "The branch has changed since the parent commit")
        tree = dict(found.commits[head])
        for line in lines[1:]:
            self._apply(tree, line["key"], line["value"])
        commit = found.add(revision, tree, header["summary"])
        return {"commitUrl": f"{self.base}/{repo}/commit/{commit}", "commitOid": commit}

    def _apply(self, tree: Tree, key: str, value: dict[str, Any]) -> None:
        path = value["path"]
        if key == "file":
            tree[path] = Stored(base64.b64decode(value["content"]), False)
        elif key == "lfsFile":
            if value["oid"] not in self.state.objects:
                raise Refused(400, f"LFS pointer pointed to a file that does not exist: {path}")
            tree[path] = Stored(self.state.objects[value["oid"]], True)
        elif key == "deletedFile":
            if path not in tree:
                raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
            del tree[path]
        else:
            raise Refused(400, f"unknown operation {key}")

    def branch(self, repo: str, name: str) -> Any:
        found = self._repository(repo, write=True)
        if name in found.branches:
            raise Refused(409, "Reference already exists")
        start = found.find(json.loads(self.data or b"{}").get("startingPoint", "main"))
        found.branches[name] = str(start)
        return {}

    def tag(self, repo: str, revision: str) -> Any:
        found = self._repository(repo, write=True)
        if self.command == "DELETE":
            if found.tags.pop(revision, None) is None:
                raise Refused(404, "no such tag", "RevisionNotFound")
            return {}
        name, commit = json.loads(self.data)["tag"], found.find(revision)
        if name in found.tags:
            raise Refused(409, "Tag reference exists already")
        if commit is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        found.tags[name] = commit
        return {}

    def resolve(self, repo: str, revision: str, path: str) -> Any:
        commit, tree = self._tree(repo, revision)
        if path not in tree:
            raise Refused(404, "Entry not found", "EntryNotFound")
        file = tree[path]
        etag = file.sha256 if file.large else file.blob
        return {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}, file.data


def metadata_faults(card: str) -> Iterator[str]:
    """What the hub refuses in the front matter of a card, as far as its documentation says."""
    match = re.match(r"\s*---\n(.*?)\n---(\n|$)", card, re.DOTALL)
    if match is None:
        return
    try:
        fields = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        yield f"the metadata is no YAML: {error}"
        return
    if not isinstance(fields, dict):
        yield "the metadata is no map"
        return
    base = fields.get("base_model", [])
    for name in base if isinstance(base, list) else [base]:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            yield f"base_model {name!r} is no model id"
    if fields.get("base_model_relation", "quantized") not in RELATIONS:
        yield "base_model_relation is unknown"
    for key in ("license", "license_name", "license_link", "pipeline_tag", "library_name"):
        if not isinstance(fields.get(key, ""), str):
            yield f"{key} is no text"
    for key in ("tags", "language"):
        value = fields.get(key, [])
        if not all(isinstance(item, str) for item in (value if isinstance(value, list) else [value])):
            yield f"{key} is no list of text"
    if fields.get("license") == "other" and not fields.get("license_name"):
        yield "license other needs a license_name"


REPO = rf"/api/models{ID}"
ROUTES: tuple[tuple[tuple[str, ...], str, Callable[..., Any]], ...] = (
    (("GET", "POST"), r"/_control/(?P<what>\w+)", Handler.control),
    (("GET",), r"/api/whoami-v2", Handler.whoami),
    (("POST",), r"/api/repos/create", Handler.create),
    (("POST",), r"/api/validate-yaml", Handler.validate),
    (("GET",), REPO, Handler.info),
    (("GET",), rf"{REPO}/revision/(?P<revision>.+)", Handler.info),
    (("GET",), rf"{REPO}/tree/(?P<revision>[^/]+)", Handler.tree),
    (("GET",), rf"{REPO}/refs", Handler.refs),
    (("POST",), rf"{REPO}/preupload/(?P<revision>.+)", Handler.preupload),
    (("POST",), rf"{REPO}/commit/(?P<revision>.+)", Handler.commit),
    (("POST",), rf"{REPO}/branch/(?P<name>.+)", Handler.branch),
    (("POST", "DELETE"), rf"{REPO}/tag/(?P<revision>.+)", Handler.tag),
    (("POST",), rf"{ID}\.git/info/lfs/objects/batch", Handler.batch),
    (("PUT",), r"/_objects/(?P<oid>\w+)", Handler.put),
    (("POST",), r"/_complete/(?P<oid>\w+)", Handler.complete),
    (("POST",), r"/_verify/(?P<oid>\w+)", Handler.verify),
    (("GET", "HEAD"), rf"{ID}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
)


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ready", type=Path)
    options = parser.parse_args()
    Handler.state = State()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    part = options.ready.with_suffix(".part")
    part.write_text(f"http://127.0.0.1:{server.server_address[1]}")
    part.replace(options.ready)
    server.serve_forever()


if __name__ == "__main__":
    main()
