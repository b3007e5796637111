"""Loads over TLS from servers that nobody should believe, and through somebody on the way to one.

Every byte that is exchanged first is changed, left out, doubled, or the last one; certificates,
versions and handshakes are those that a client must refuse; data end early, and are changed. What
must hold in all cases is said by `cases.py`; from an untrusted server nothing is ever loaded.
"""

import json
import mmap
import random
import struct
from collections.abc import Iterator
from functools import partial

import cases
from scenes import (
    OLD,
    TensorDeserializer,
    by_path,
    environment,
    open_stream,
    save_path,
    scratch,
    serving,
    tensorizer,
    value_of,
)
from tensorizer.stream_io import CAInfo

try:
    import tls_server
    from certificates import SOUND
except ImportError as error:
    tls_server, missing = None, error.name

#: Faults of one byte, and the number of first bytes that have them, by the side that receives. A
#: client sends far fewer.
HOW = ("close", "reset", "flip", "drop", "double")
FIRST = {"client": 4096, "server": 1024}
PLACES = [(how, to, at) for how in HOW for to, count in FIRST.items() for at in range(count)]
#: Has no common divisor with the number of places, so that they come in no order, and all.
STRIDE = 10_007
CERTIFICATES = [
    "good", "by an intermediate", "expired", "not yet valid", "of another host", "of all hosts",
    "of no host", "signed by itself", "of an unknown authority",
    "of one that has the authority's name", "without its intermediate",
    "by one that is no authority", "by an expired intermediate",
    "by an intermediate for other hosts", "for clients alone", "of a short key",
]  # fmt: skip
KINDS = {"certificate": 30, "protocol": 8, "body": 14, "spoken": 14, "flood": 2, "plain": 6,
         "injected": 12, "data": 12, "stall": 1, "pressed": 3}  # fmt: skip


def case(number: int) -> dict:
    """Return what happens in a case: three of four are a place among the first bytes."""
    chance = random.Random(number)
    found: dict = {
        "times": chance.choice([1, 99]),
        "protocol": chance.choice(["", "1.2"]),
        "by": chance.choice(["load", "load", "stream", "s3"]),
        "host": chance.choice(["localhost", "127.0.0.1"]),
        "scheme": "https",
        "at": chance.randrange(1 << 20),
        "bit": chance.randrange(8),
    }
    if number % 4:
        how, to, at = PLACES[(number - number // 4 - 1) * STRIDE % len(PLACES)]
        return found | {"kind": "between", "name": f"{how} to the {to}", "how": how, "to": to,
                        "at": at}  # fmt: skip
    name = kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    if kind in ("data", "stall"):
        found |= {
            "how": "stall" if kind == "stall" else chance.choice(HOW[2:]),
            "to": "client",
            "at": found["at"] % (4096 if kind == "stall" else 1 << 20),
        }
        kind = "between"
    elif kind == "certificate":
        found |= {"of": chance.choice(CERTIFICATES), "times": 99,
                  "before": chance.random() < 0.3}  # fmt: skip
        # No connection can be made with a short key, even if every certificate is trusted.
        found["before"] &= found["of"] != "of a short key"
    elif kind == "protocol":
        found |= {"of": chance.choice(["1.0", "1.1", "1.2", "other ciphers"]), "times": 99}
    elif kind == "plain":
        found |= {"scheme": chance.choice(["http", "https"]), "times": 99}
    elif kind == "spoken":
        found |= {"of": chance.choice(list(tls_server.SPOKEN)), "listens": chance.random() < 0.8,
                  "waits": chance.choice([0, 0, 0, tls_server.LONG])}  # fmt: skip
    elif kind in ("body", "flood", "injected", "pressed"):
        kinds = {"body": tls_server.CUT, "flood": tls_server.FLOODS,
                 "injected": tls_server.INJECTED, "pressed": tls_server.PRESSED}  # fmt: skip
        found |= {"of": chance.choice(list(kinds[kind]))}
        # The program that answers has one connection at a time.
        found |= {"times": 1} if kind == "pressed" else {}
    return found | {"kind": kind, "name": name}


def believed(what: dict) -> bool:
    """Return whether anything may be loaded."""
    if what["kind"] == "certificate":
        # Its host is in the subject, which is compared where there are no other names.
        by_subject = what["of"] == "of no host" and what["host"] == "localhost"
        return what["of"] in SOUND or by_subject
    if what["kind"] == "plain":
        return False
    return what["kind"] != "protocol" or what["of"] == "1.2"


def load(port: int, authority: str, number: int) -> float:
    """Load in a case; return the value of what came."""
    what = case(number)
    server = f"{what['scheme']}://{what['host']}:{port}"
    url = f"{server}/{number}/f.tensors"
    if what.get("before"):
        # One stream trusts every server, on purpose; the load after it must not.
        with open_stream(url, certificate_handling=CAInfo(allow_untrusted=True)) as stream:
            if not stream.read(100):
                raise AssertionError("nothing comes from whom everything is believed")
    if what["by"] == "load":
        readers = 1 if what["kind"] == "pressed" else None
        found = tensorizer.load(url, "cpu", num_readers=readers, verify_hash=bool(number % 3))
        return value_of(found)
    trust = CAInfo(cacert=authority)
    if what["by"] == "stream":
        stream = open_stream(url, certificate_handling=trust)
    else:
        stream = open_stream(f"s3://bucket/{number}/f.tensors", "rb", "key", "word", server,
                             force_http=what["scheme"] == "http",
                             certificate_handling=trust)  # fmt: skip
    with stream, TensorDeserializer(stream, "cpu") as file:
        return value_of({name: file[name].clone() for name in file})


def main() -> None:
    arguments = cases.options(__doc__).parse_args()
    if tls_server is None:
        print(json.dumps({"campaign": "tls", "skipped": f"{missing} is not installed"}))
        return
    campaign = cases.Campaign(case, "name", arguments)
    first_of_batch = mmap.mmap(-1, 8)
    with scratch() as folder:
        save_path(folder, OLD)
        by_path(folder)
        data = (folder / "f.tensors").read_bytes()
        start = partial(tls_server.start, data, folder, first_of_batch, case)
        authority = str(folder / "ca.pem")
        trusted = (*cases.PATIENCE, ("SSL_CERT_FILE", authority))
        with serving(start, lambda server: server.ports) as ports, environment(trusted):
            numbered = list(map(int, ports.split(",")))

            def batch(numbers: list[int]) -> Iterator[dict]:
                first_of_batch[:8] = struct.pack("q", numbers[0])

                def outcome(number: int) -> dict:
                    port = numbered[number - numbers[0]]
                    one = partial(load, port, authority, number)
                    return cases.judged(number, one, believed(case(number)))

                return cases.run_batch(outcome, numbers)

            campaign.run(batch)
    campaign.end("tls", "faults over TLS")


if __name__ == "__main__":
    main()
