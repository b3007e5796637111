"""Servers on loopback for the benchmarks of network sources and sinks."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CONF = """daemon off; pid {work}/pid; error_log {work}/error; worker_processes 2;
events {{ worker_connections 256; }}
http {{
  access_log off; sendfile on;
  client_body_temp_path {work}/a; proxy_temp_path {work}/b; fastcgi_temp_path {work}/c;
  uwsgi_temp_path {work}/d; scgi_temp_path {work}/e;
  server {{ listen 127.0.0.1:{port}; root {root}; location /bucket/ {{ alias {root}/; }} }}
}}
"""


def command(kind: str, root: Path, work: Path, port: int) -> list[str] | None:
    """Return the command that starts a server; None if it is not installed."""
    if kind == "objects":
        return [sys.executable, str(Path(__file__).with_name("objects.py")), str(port)]
    if kind in ("s3", "slow", "faulty"):
        stores = Path(__file__).with_name("stores.py")
        return [sys.executable, str(stores), kind, str(work if kind == "s3" else root), str(port)]
    name = {"nginx": "nginx", "redis": "redis-server"}[kind]
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if program is None:
        return None
    if kind == "redis":
        return [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    conf = work / "conf"
    # Workers run as root too: another user could not read the folder.
    user = "user root;\n" if os.getuid() == 0 else ""
    conf.write_text(user + CONF.format(work=work, root=root, port=port))
    return [program, "-c", str(conf), "-p", str(work)]


@contextlib.contextmanager
def server(kind: str, root: Path) -> Iterator[str | None]:
    """Start a server over a folder; yields its host and port, or None where there is none."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as work:
        found = command(kind, root, Path(work), port)
        if found is None:
            yield None
            return
        process = subprocess.Popen(found, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(200):
                with socket.socket() as sock:
                    if sock.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            os.environ["BENCHMARK_STORE"] = work
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)
