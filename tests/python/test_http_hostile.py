"""Servers that send an index which never ends: it is refused while little memory is taken."""

import contextlib
import http.server
import itertools
import re
import struct
import threading

import pytest
import tensorizer
import torch
from processes import run_python
from scripted import stop

#: Offsets of the number of entries, of the size of their block, and of the block.
COUNT, INDEX_LEN, INDEX = 57, 65, 73
LOAD = """
import resource, sys, tensorizer
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    tensorizer.load(sys.argv[1])
except (OSError, ValueError, MemoryError) as error:
    print(type(error).__name__, error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@contextlib.contextmanager
def serving(handler):
    """Serve requests by a handler; yield the address of a file."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/f.tensors"
    finally:
        stop(server, thread)


@pytest.fixture
def endless():
    """A server of one answer in chunks, and what it sends first: zeros follow for ever."""
    sends = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for chunk in itertools.chain([sends["first"]], itertools.repeat(bytes(1 << 20))):
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            except OSError:
                self.close_connection = True

        def log_message(self, *_):
            pass

    with serving(Handler) as address:
        yield address, sends


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (60_000_000, "FormatError Invalid empty tensor path"),
        (1, "FormatError expected at most 268435456 bytes behind the entries"),
    ],
    ids=["of entries", "behind its entries"],
)
def test_an_index_without_end(endless, tmp_path, count, said):
    url, sends = endless
    with tensorizer.TensorSerializer(tmp_path / "f.tensors") as file:
        file.write_state_dict({"a": torch.ones(3)})
    head = bytearray((tmp_path / "f.tensors").read_bytes()[: INDEX + (256 << 10)])
    assert struct.unpack_from("<QQ", head, COUNT) == (1, 256 << 10)
    struct.pack_into("<QQ", head, COUNT, count, 3 << 30)
    sends["first"] = bytes(head)
    done = run_python(LOAD, url, timeout=60)
    assert done.returncode == 0, done.stderr
    error, grown = done.stdout.rsplit("\n", 2)[:2]
    assert re.search(said, error), error
    assert int(grown) < 100
