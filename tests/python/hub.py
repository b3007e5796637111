"""A stand-in for Hugging Face's hub, and the second server with its large files, on loopback."""

import functools
import hashlib
import json
import re
from urllib.parse import parse_qs, unquote, urlsplit

from scripted import Scripted

#: Suffixes of files that the real hub keeps in LFS, whatever their size.
LFS = (".safetensors", ".bin", ".tensors", ".pt")


@functools.lru_cache(maxsize=16)
def sha256(data):
    """Return the digest, which of a large file takes seconds, and is asked for at each request."""
    return hashlib.sha256(data).hexdigest()


def fields_of(handler):
    """Return the fields of a request, their names in lower case."""
    return {name.lower(): value for name, value in handler.headers.items()}


class Repo:
    """A repository: what each commit holds, and where branches and tags are."""

    def __init__(self):
        self.commits, self.refs = {}, {}
        #: The tokens that may read it; None if it is public.
        self.readers = None
        self.gated = False
        #: Paths that are in git itself.
        self.small = set()

    def commit(self, files, branch="main"):
        """Add a commit with these files, move a branch to it, and return its name."""
        name = hashlib.sha1(f"{len(self.commits)} {branch}".encode()).hexdigest()
        self.commits[name] = files
        self.refs[branch] = name
        return name


class Files(Scripted):
    """The server of the large files: each signed address is good for some requests."""

    def __init__(self):
        super().__init__()
        self.blobs, self.uses, self.signed = {}, {}, 0
        self.good_for = 1 << 30
        #: Each request: method, path and query, and the fields that were sent.
        self.requests = []

    def sign(self, data):
        """Return the address of some bytes."""
        digest = sha256(data)
        with self.lock:
            self.blobs.setdefault(digest, data)
            self.signed += 1
            return f"http://127.0.0.1:{self.port}/{digest}?Expires=9&Signature=signed{self.signed}"

    def answer(self, handler):
        url = urlsplit(handler.path)
        (signature,) = parse_qs(url.query).get("Signature", [""])
        with self.lock:
            self.requests.append((handler.command, handler.path, fields_of(handler)))
            self.uses[signature] = self.uses.get(signature, 0) + 1
            expired = self.uses[signature] > self.good_for
        data = self.blobs.get(url.path[1:])
        if expired or not signature:
            send(handler, 403, {}, b"<Error>Request has expired</Error>")
        elif data is None:
            send(handler, 404, {}, b"")
        else:
            send_range(handler, data, {"ETag": f'"file-{url.path[1:9]}"'})


class Hub(Scripted):
    """The hub itself. ``watch`` is told of each request before it is answered."""

    def __init__(self):
        super().__init__()
        self.repos = {}
        self.requests = []
        self.watch = lambda method, path: None
        #: New names of repositories, by their old ones.
        self.renamed = {}
        #: The number of requests that are still to be answered with 503.
        self.busy = 0
        #: The address that all requests are redirected to, or None.
        self.elsewhere = None
        #: Values of the Authorization field that the hub does not know.
        self.unknown = set()
        self.files = Files()

    def __exit__(self, *exc):
        self.files.__exit__(*exc)
        super().__exit__(*exc)

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    def repo(self, name, files=None):
        """Add a repository."""
        repo = self.repos[name] = Repo()
        if files is not None:
            repo.commit(files)
        return repo

    def asked(self):
        """Return methods and paths of the requests since the last call."""
        with self.lock:
            found = [(method, path) for method, path, _ in self.requests]
            self.requests.clear()
        return found

    def answer(self, handler):
        method, path = handler.command, urlsplit(handler.path).path
        with self.lock:
            self.requests.append((method, path, fields_of(handler)))
            busy, self.busy = self.busy > 0, max(0, self.busy - 1)
        self.watch(method, path)
        if busy:
            return send(handler, 503, {"Retry-After": "0"}, b"busy")
        if self.elsewhere is not None:
            return send(handler, 301, {"Location": self.elsewhere + path}, b"")
        if handler.headers.get("Authorization") in self.unknown:
            said = "Invalid credentials in Authorization header"
            return send(handler, 401, {"X-Error-Message": said}, b"no")
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        about = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path)
        named = found or about
        parts = named.groups() if named is not None else ("", "", "")
        name, revision, *rest = map(unquote, parts)
        if name in self.renamed:
            place = path.replace(name, self.renamed[name], 1)
            return send(handler, 307, {"Location": place}, b"")
        repo, token = self.repos.get(name), handler.headers.get("Authorization")
        if repo is None or (
            repo.readers is not None and token not in repo.readers and not repo.gated
        ):
            return refuse(handler, 404 if token else 401, "RepoNotFound")
        if repo.gated and token not in (repo.readers or ()):
            return refuse(handler, 403 if token else 401, "GatedRepo")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return refuse(handler, 404, "RevisionNotFound")
        if about:
            siblings = [{"rfilename": file} for file in repo.commits[commit]]
            said = {"id": name, "sha": commit, "siblings": siblings, "private": False}
            return send(
                handler, 200, {"Content-Type": "application/json"}, json.dumps(said).encode()
            )
        said, data = {"X-Repo-Commit": commit}, repo.commits[commit].get(rest[0])
        if data is None:
            return refuse(handler, 404, "EntryNotFound", said)
        if rest[0].endswith(LFS) and rest[0] not in repo.small:
            said |= {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
            said["Location"] = self.files.sign(data)
            return send(handler, 302, said, b"Found. Redirecting")
        blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        return send_range(handler, data, said | {"ETag": f'"{blob}"'})


def refuse(handler, status, code, more=()):
    send(handler, status, {"X-Error-Code": code, "X-Error-Message": code, **dict(more)}, b"no")


def send_range(handler, data, fields):
    """Answer with the bytes that a request asks for."""
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
    fields = {"Accept-Ranges": "bytes", **fields}
    if asked is None:
        return send(handler, 200, fields, data)
    if int(asked[1]) >= len(data):
        return send(handler, 416, {**fields, "Content-Range": f"bytes */{len(data)}"}, b"")
    start, end = int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))
    fields["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
    return send(handler, 206, fields, data[start:end])


def send(handler, status, fields, body):
    handler.send_response(status)
    for name, value in fields.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
