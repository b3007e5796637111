"""Servers on loopback: started for a case, ended by their process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.case import AbsentError, program

WEB = Path(__file__).with_name("web.py")
#: Helpers of the tests: emulators of the hub and of clouds.
TESTS = str(Path(__file__).resolve().parents[2] / "tests/python")
#: Servers of ranges, by what a case calls them; options of ``web.Ranges``.
RANGES: dict[str, dict[str, float]] = {
    "50 ms away": {"latency": 0.05, "rate": 100e6},
    "breaking off": {"breaks": 50},
    "100 ms away": {"latency": 0.1, "connecting": 1},
    "16 MB/s a connection": {"rate": 16e6},
    "200 MB/s": {"total": 200e6},
    "300 MB/s": {"total": 300e6},
    "unlimited": {},
}
NGINX = """{user}daemon off; pid {work}/pid; error_log {work}/error; worker_processes 2;
events {{ worker_connections 256; }}
http {{
  access_log off; sendfile on;
  client_body_temp_path {work}/a; proxy_temp_path {work}/b; fastcgi_temp_path {work}/c;
  uwsgi_temp_path {work}/d; scgi_temp_path {work}/e;
  server {{ listen 127.0.0.1:{port}; root {root}; location /bucket/ {{ alias {root}/; }} }}
}}
"""


@dataclass
class Server:
    """A server that runs: host and port, and the variables by which clients find it."""

    host: str
    env: dict[str, str] = field(default_factory=dict)
    counted: bool = False

    def counts(self) -> dict[str, float]:
        """Return what the server has counted so far."""
        if not self.counted:
            return {}
        with urllib.request.urlopen(f"http://{self.host}/counts") as answer:
            return json.loads(answer.read())


def s3_environment(host: str) -> dict[str, str]:
    """Return the variables by which clients of S3 find a server that is not Amazon's."""
    return {
        "AWS_ENDPOINT_URL": f"http://{host}",
        "AWS_ENDPOINT_URL_S3": f"http://{host}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        # Without this run:ai first waits seconds for a service that only machines of Amazon have.
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }


def command(kind: str, root: Path, work: Path, port: int) -> list[str]:
    """Return the command that starts a server.

    Raises:
        AbsentError: It is not installed.

    """
    if kind == "objects":
        return [sys.executable, str(WEB), "objects", str(port)]
    if kind in RANGES:
        return [sys.executable, str(WEB), "ranges", str(port), str(root), json.dumps(RANGES[kind])]
    path = program({"nginx": "nginx", "redis": "redis-server"}[kind])
    if kind == "redis":
        return [path, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    # Workers run as root too: another user could not read the folder.
    user = "user root;\n" if os.getuid() == 0 else ""
    (work / "conf").write_text(NGINX.format(user=user, work=work, root=root, port=port))
    return [path, "-c", str(work / "conf"), "-p", str(work)]


@contextlib.contextmanager
def started(kind: str, root: Path) -> Iterator[Server]:
    """Start a server over a folder, and end it.

    Raises:
        AbsentError: It is not installed.
        RuntimeError: It does not listen.

    """
    if not kind:
        yield Server("")
        return
    if kind in ("hub", "gs", "gs write", "az"):
        with emulated(kind, root) as server:
            yield server
        return
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as work:
        found = command(kind, root, Path(work), port)
        process = subprocess.Popen(
            found, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            for _ in range(200):
                with socket.socket() as sock:
                    if sock.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            else:
                raise RuntimeError(f"{found[0]} does not listen")
            host = f"127.0.0.1:{port}"
            yield Server(host, s3_environment(host), kind in RANGES)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def emulated(kind: str, root: Path) -> Iterator[Server]:
    """Start one of the emulators of the tests, with the safetensors file of a folder."""
    if TESTS not in sys.path:
        sys.path.append(TESTS)
    data = next(root.glob("gigabyte.safetensors")).read_bytes()
    if kind == "hub":
        from hub import Hub

        with Hub() as hub:
            revision = hub.repo("org/repo", {"model.safetensors": data}).refs["main"]
            env = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "REVISION": revision}
            yield Server(hub.endpoint.removeprefix("http://"), env)
        return
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        import pytest

        try:
            yield cloud(kind, Path(work), data, stack)
        except (pytest.skip.Exception, pytest.fail.Exception) as absent:
            raise AbsentError(str(absent)) from None


def cloud(kind: str, work: Path, data: bytes, stack: contextlib.ExitStack) -> Server:
    """Start an emulator of Google's or Azure's storage, with a bucket that has the file."""
    from emulators import Azurite, Google
    from servers import Seaweed

    if kind == "gs":
        google = Google()
        stack.callback(google.stop)
        google.put("model.safetensors", data)
        host, env = google.host, {"GOOGLE_BASE_URL": google.url}
    elif kind == "gs write":
        weed = Seaweed(work, open_to_all=True)
        stack.callback(weed.stop)
        host, env = weed.host, {"GOOGLE_BASE_URL": f"http://{weed.host}"}
    else:
        azure = Azurite(work, any_version=True)
        stack.callback(azure.stop)
        azure.make_containers()
        azure.put("model.safetensors", data)
        host, env = azure.url.removeprefix("http://"), {
            "AZURE_STORAGE_ACCOUNT_NAME": azure.account, "AZURE_STORAGE_ACCOUNT_KEY": azure.key,
            "AZURE_STORAGE_ENDPOINT": f"{azure.url}/{azure.account}",
            "SIGNED": f"{azure.url}/{azure.account}/bucket/model.safetensors?"
                      f"{azure.shared_access()}",
        }  # fmt: skip
    return Server(host, env | {"GOOGLE_SKIP_SIGNATURE": "true"})
