"""A server that stands for yours: it answers /ready when its model is loaded.

python server.py ADDRESS [PORT]
"""

import json
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tensorizer
import torch


class Server(ThreadingHTTPServer):
    """A server that knows its model when that is loaded."""

    model: dict[str, torch.Tensor] | None = None


class Handler(BaseHTTPRequestHandler):
    """Answers probes, and says what is loaded."""

    server: Server

    def do_GET(self) -> None:
        """Answer a probe: 503 while the model is loaded."""
        model = self.server.model
        if self.path not in {"/live", "/ready"}:
            self.send_error(404)
            return
        there = model is not None or self.path == "/live"
        text = json.dumps({"tensors": None if model is None else len(model)}).encode()
        self.send_response(200 if there else 503)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def main(address: str, port: int = 8000) -> None:
    # Process 1 of a container gets only the signals that it handles. This ends the load, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = Server(("", port), Handler)
    # Probes are answered while the model is loaded.
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.model = tensorizer.load(address, "cuda" if torch.cuda.is_available() else "cpu")
    while True:
        # A signal that comes just before a wait without end would not end it.
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
