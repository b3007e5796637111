"""A machine of Google: in a network of its own it has the metadata server of such machines, and
loads a file of a server that wants tokens. Prints what went well.
"""

import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import tensorizer

ADDRESS = "169.254.169.254"
#: The answer of the metadata server, and the count of its requests.
now = {"status": 503, "later": 2, "lifetime": 3600, "asked": 0, "good": None}
DATA = Path(sys.argv[1]).read_bytes()


class Metadata(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        now["asked"] += 1
        if now["asked"] > now["later"]:
            now["status"] = 200
        body = b'{"access_token": "hu5hw0rd-%d", "expires_in": %d}' % (
            now["asked"],
            now["lifetime"],
        )
        self.send_response(now["status"])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Objects(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        token = self.headers.get("Authorization", "")
        if not token.startswith("Bearer hu5hw0rd-") or now["good"] not in (None, token):
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        part = DATA[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(DATA)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *args):
        pass


def serve(address, handler):
    server = http.server.ThreadingHTTPServer(address, handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def load():
    # A token is cached for at least a tenth of a second.
    time.sleep(0.2)
    return tensorizer.load("gs://bucket/f.tensors")


def fails(what):
    try:
        load()
    except PermissionError as error:
        assert what in str(error), error
    except OSError as error:
        assert what in str(error), error
    else:
        raise AssertionError("it loads")


def main():
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "address", "add", f"{ADDRESS}/32", "dev", "lo"], check=True)
    objects = serve(("127.0.0.1", 0), Objects)
    url = f"http://127.0.0.1:{objects.server_port}"
    # No proxy leads to a machine's own server: this one is not there.
    os.environ.update(GOOGLE_BASE_URL=url, HTTP_PROXY="http://127.0.0.1:9", NO_PROXY="127.0.0.1")
    os.environ["TENSORIZER_ATTEMPTS"] = "5"
    metadata = serve((ADDRESS, 80), Metadata)
    # The server cannot answer at first: that is retried, and does not mean "no credentials".
    now.update(lifetime=10)
    load()
    print("retried")
    # A token that is about to expire is asked for again.
    asked = now["asked"]
    load()
    assert now["asked"] > asked, now
    print("renewed")
    # If that fails, the last one serves.
    now.update(status=429, later=10**9)
    load()
    print("kept")
    # A token that is refused is an error: no request is sent without credentials.
    now["good"] = "Bearer another"
    fails("answered 429")
    fails("answered 429")
    print("refused")
    # Another environment, in which nothing is known of a machine.
    os.environ["GOOGLE_OF_ANOTHER"] = "1"
    now.update(status=404)
    fails("no credentials were found")
    print("nobody")
    for server in (metadata, objects):
        server.shutdown()


main()
