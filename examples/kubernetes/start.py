"""Brings models into the cache of this machine, then becomes the server.

python start.py [--verify-hash] [--check DEVICE] ADDRESS... [-- COMMAND...]

Without a command it ends, as an init container does. What the cache has already is not fetched
again. The folder is that of TENSORIZER_CACHE.
"""

import argparse
import json
import os
import subprocess
import sys
import time

import tensorizer


def fetch(address: str, verify: bool) -> None:
    """Read a model once, a gigabyte at a time at most; the cache keeps it."""
    begun, count = time.monotonic(), 0
    for _, tensor in tensorizer.iterate(address, "cpu", verify_hash=verify):
        count += tensor.nbytes
    seconds = time.monotonic() - begun
    print(f"{address}: {count / 1e9:.2f} GB in {seconds:.1f} s", file=sys.stderr, flush=True)


def check_cache(address: str) -> None:
    """End the program unless the cache holds each file of a model as a whole.

    Without this, a cache that is full, or that cannot be written, is noticed only when the next
    server starts without the network.
    """
    command = [sys.executable, "-m", "tensorizer", "info", "--json", address]
    described = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    for file in json.loads(described.stdout)["files"]:
        if not file["local"] and file["cached"] != file["bytes"]:
            sys.exit(
                f"{file['file']}: expected all of its {file['bytes']} bytes in the cache, found "
                f"{file['cached'] or 0}: see the warnings above, and the size of the volume"
            )


def main() -> None:
    arguments, command = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, command = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(usage="start.py [options] ADDRESS... -- ...")
    parser.add_argument("addresses", nargs="+")
    parser.add_argument(
        "--verify-hash", action="store_true", help="compare all bytes with their hashes"
    )
    parser.add_argument("--check", metavar="DEVICE", help="see whether the models fit there")
    options = parser.parse_args(arguments)
    if not os.environ.get("TENSORIZER_CACHE"):
        parser.error("TENSORIZER_CACHE names no folder: nothing would be kept")
    for address in options.addresses:
        fetch(address, options.verify_hash)
        check_cache(address)
    if options.check:
        # All at once, as the server will have them; gone before it starts.
        held = [tensorizer.load(address, options.check) for address in options.addresses]
        del held
    if command:
        # The server takes the place of this process, and gets its signals.
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
