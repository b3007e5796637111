"""Servers on loopback that answer, and fail, as they are told."""

import contextlib
import http.client
import http.server
import re
import socket
import struct
import threading
import urllib.parse


class Scripted:
    """An HTTP server whose ``answer`` gets the handler of each request."""

    def __init__(self, timeout=None):
        outer = self
        self.lock, self.stopping = threading.Lock(), threading.Event()
        limit = timeout

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = limit
            # A body does not wait until its headers are acknowledged, which takes 40 ms.
            disable_nagle_algorithm = True

            def do_GET(self):
                outer.answer(self)

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        # By default only five connections wait to be accepted: others try again after seconds.
        self.server.socket.listen(128)
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
            other.join(60)  # what it asks may be slow beside other work


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


def body_of(handler):
    """Return the body of a request, or None if its connection ends before, and is closed."""
    length = int(handler.headers.get("Content-Length", 0))
    body = handler.rfile.read(length)
    handler.close_connection |= len(body) < length
    return body if len(body) == length else None


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
        # Idle connections end after a second.
        super().__init__(timeout=1)
        self.host = f"127.0.0.1:{self.port}"

    def translate(self, host, path):
        """Return the host and the path of a request for the other server."""
        return host, path

    def answer(self, handler):
        if (body := body_of(handler)) is None:  # The other server would wait for the rest.
            return
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
            host, path = self.translate(host, path)
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
