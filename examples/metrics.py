"""Exports the statistics of loads in the format of Prometheus.

python metrics.py PORT FILE...: loads files as your server would, and has the statistics of this
process at http://HOST:PORT/metrics.
"""

import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import tensorizer

COUNTED = ("bytes", "seconds", "requests", "retries", "network_bytes", "cache_bytes", "disk_bytes")


class Metrics(BaseHTTPRequestHandler):
    """Answers with counters of all calls so far, and the number of those under way."""

    last, sums = 0, Counter[str]()

    def do_GET(self) -> None:
        """Add the calls since the last answer."""
        for call in tensorizer.stats(since=Metrics.last):
            Metrics.last = call["call"]
            Metrics.sums["calls"] += 1
            Metrics.sums["errors"] += call["error"] is not None
            Metrics.sums.update({name: call[name] for name in COUNTED})
        lines = [f"tensorizer_{name}_total {value}" for name, value in Metrics.sums.items()]
        lines.append(f"tensorizer_running {len(tensorizer.stats(running=True))}")
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write("\n".join([*lines, ""]).encode())


if __name__ == "__main__":
    server = HTTPServer(("", int(sys.argv[1])), Metrics)
    Thread(target=server.serve_forever, daemon=True).start()
    for file in sys.argv[2:]:
        tensorizer.load(file, "cpu")
    input()
