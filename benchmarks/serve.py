"""nginx on loopback for the benchmarks of network sources."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
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
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


@contextlib.contextmanager
def nginx(root: Path) -> Iterator[str | None]:
    """Serve a folder; yields its address, or None where there is no nginx."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        yield None
        return
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as work:
        conf = Path(work) / "conf"
        # Its workers are not to run as another user, who could not read the folder.
        user = "user root;\n" if os.getuid() == 0 else ""
        conf.write_text(user + CONF.format(work=work, root=root, port=port))
        process = subprocess.Popen([program, "-c", conf, "-p", work], stderr=subprocess.DEVNULL)
        try:
            for _ in range(100):
                with socket.socket() as sock:
                    if sock.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)
