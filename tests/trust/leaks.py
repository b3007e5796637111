"""Looks for secrets in everything that comes out, and for keys in memory.

Keys, tokens, passwords and signatures are made of random letters, given to loads and saves in every
way there is, and searched for in messages, logs, `repr`s, statistics and files, plain and encoded.
The servers must have seen them, or nothing was shown. They answer well and with errors.
A key is in memory that core dumps leave out, and nowhere once it is not used any more.
"""

import argparse
import base64
import ctypes
import gc
import json
import logging
import os
import random
import shutil
import string
import sys
import time
import traceback
import urllib.parse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import parts
from scenes import (
    OLD,
    DecryptionParams,
    EncryptionParams,
    TensorDeserializer,
    TensorSerializer,
    by_path,
    environment,
    open_stream,
    save_path,
    scratch,
    tensorizer,
    tensors,
    value_of,
)
from scripted import FaultServer, reset
from tensorizer.stream_io import CURLStreamFile

#: Faults of a server, in place of an answer.
FAULTS = [None, ("status", 403), ("status", 404), ("status", 500), ("status", 400), ("status", 302),
          ("status", 503), ("reset", 100), ("cut", 1000), ("page",), ("etag", '"two"')]  # fmt: skip
#: Settings of a child: failures end quickly, and all logs are written.
PATIENCE = {"TENSORIZER_ATTEMPTS": "2", "TENSORIZER_STALL_SECONDS": "1",
            "TENSORIZER_TOTAL_SECONDS": "3", "RUST_LOG": "trace", "RUST_BACKTRACE": "full",
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "us-east-1"}  # fmt: skip


class Telling(FaultServer):
    """Keeps what it was sent, and repeats it in pages of errors, addresses and cookies."""

    def __init__(self, data: bytes, fault: tuple | None) -> None:
        self.seen: list[str] = []
        super().__init__(data, lambda number, start, end: fault)
        self.fault = fault
        # Clients that go away are expected.
        self.server.handle_error = lambda *_: None

    def answer(self, handler) -> None:
        text = f"{handler.requestline}\n{handler.headers}"
        self.seen.append(text)
        if handler.command in ("PUT", "POST"):
            left = int(handler.headers.get("Content-Length", 0))
            handler.rfile.read(left)
        if self.fault and self.fault[0] == "status":
            body = f"<Error><Code>Denied</Code><Message>{text}</Message></Error>".encode()
            handler.send_response(self.fault[1])
            handler.send_header("Content-Length", str(len(body)))
            handler.send_header("Location", handler.path + "&again=1")
            # A fixed id: a load could not know that a server had hidden a secret in it.
            handler.send_header("X-Amz-Request-Id", "request-id")
            handler.end_headers()
            handler.wfile.write(body)
            return
        if handler.command != "GET":
            reset(handler.connection)
            handler.close_connection = True
            return
        super().answer(handler)


def word(chance: random.Random) -> str:
    """Return a secret; it looks like no other text."""
    return "Zq" + "".join(chance.choices(string.ascii_letters + string.digits, k=22))


def forms(secret: str) -> Iterator[bytes]:
    """Yield how a secret may be written."""
    plain = secret.encode()
    yield plain
    yield plain.hex().encode()
    yield repr(plain)[2:-1].encode()
    yield urllib.parse.quote(secret).encode()
    for before in range(3):
        coded = base64.b64encode(b"x" * before + plain)
        # The ends depend on what stands beside it.
        yield coded[4 if before else 0 : -4]


def served(url: str, secret: str, chance: random.Random) -> dict[str, Callable[[], object]]:
    """Return loads and saves from a server that have a secret each."""
    host = url.split("/")[2]
    keys = {"s3_access_key_id": "access", "s3_secret_access_key": secret,
            "s3_endpoint": f"http://{host}", "force_http": True}  # fmt: skip
    query = chance.choice(["X-Amz-Signature", "Signature", "sig", "token", "X-Amz-Security-Token"])

    def proxied() -> object:
        os.environ["http_proxy"] = f"http://me:{secret}@{host}"
        return tensorizer.load("http://127.0.0.2:9/f.tensors", "cpu")

    def by_environment(session: bool) -> object:
        os.environ |= {"AWS_ACCESS_KEY_ID": "access", "AWS_ENDPOINT_URL_S3": f"http://{host}",
                       "AWS_SECRET_ACCESS_KEY": "other" if session else secret}  # fmt: skip
        if session:
            os.environ["AWS_SESSION_TOKEN"] = secret
        return tensorizer.load("s3://bucket/f.tensors", "cpu")

    def hub() -> object:
        os.environ |= {"HF_TOKEN": secret, "HF_ENDPOINT": f"http://{host}"}
        return tensorizer.load("hf://owner/model/f.tensors", "cpu")

    def kept() -> object:
        folder = Path(os.environ["HOME"]) / "cache"
        return tensorizer.load(f"{url}?{query}={secret}", "cpu", cache_dir=folder)

    def uploaded() -> object:
        stream = open_stream("s3://bucket/f.tensors", "wb+", **keys)
        print(repr(stream), stream)
        return tensorizer.save(tensors(OLD), stream)

    def opened(**options: object) -> object:
        stream = open_stream(options.pop("uri", url), **options)
        print(
            repr(stream), stream, stream.name, vars(stream) if hasattr(stream, "__dict__") else ""
        )
        with TensorDeserializer(stream, "cpu") as file:
            print(repr(file), file)
            return dict(file)

    def headers() -> object:
        stream = CURLStreamFile(
            url, headers={"X-Token": secret, "Authorization": f"Bearer {secret}"}
        )
        print(repr(stream), stream.name)
        return stream.read(10)

    return {
        "password": lambda: tensorizer.load(url.replace("//", f"//user:{secret}@"), "cpu"),
        "password, stream": lambda: opened(uri=url.replace("//", f"//user:{secret}@")),
        "signature": lambda: tensorizer.load(f"{url}?{query}={secret}", "cpu"),
        "signature, stream": lambda: opened(uri=f"{url}?{query}={secret}"),
        "signature, operator": lambda: by_operator(f"{url}?{query}={secret}"),
        "signature, kept": kept,
        "token": headers,
        "proxy": proxied,
        "S3 keys": lambda: opened(uri="s3://bucket/f.tensors", mode="rb", **keys),
        "S3 keys of the environment": lambda: by_environment(False),
        "S3 session": lambda: by_environment(True),
        "S3 upload": uploaded,
        "hub": hub,
        "redis": lambda: tensorizer.load(f"redis://user:{secret}@{host}/f", "cpu"),
    }  # fmt: skip


def by_operator(uri: str) -> object:
    import torch

    return torch.ops.tensorizer.load(uri)


#: Never sent as it is: signatures are made with it.
NEVER_SENT = {"S3 keys", "S3 keys of the environment", "S3 upload"}


def encrypted(folder: Path, secret: str) -> dict[str, Callable[[], object]]:
    """Return loads and saves that are encrypted with a secret."""
    path = folder / "e.tensors"
    key = secret.ljust(32, "-").encode()
    weak = {"opslimit": 1, "memlimit": 8192}

    def with_key() -> object:
        params = EncryptionParams(key)
        print(repr(params), str(params))
        tensorizer.save(tensors(OLD), path, encryption=params)
        params = DecryptionParams.from_key(key)
        print(repr(params), str(params))
        return tensorizer.load(path, "cpu", encryption=params)

    def with_passphrase() -> object:
        params = EncryptionParams.from_string(secret, **weak)
        print(repr(params), str(params))
        with TensorSerializer(path, encryption=params) as file:
            print(repr(file))
            file.write_state_dict(tensors(OLD))
        params = DecryptionParams.from_string(secret)
        print(repr(params))
        return tensorizer.load(path, "cpu", encryption=params)

    def with_another() -> object:
        tensorizer.save(tensors(OLD), path, encryption=EncryptionParams(bytes(range(32))))
        return tensorizer.load(path, "cpu", encryption=DecryptionParams.from_key(key))

    def too_short() -> object:
        return EncryptionParams(secret.encode())

    return {"key": with_key, "passphrase": with_passphrase, "wrong key": with_another,
            "short key": too_short}  # fmt: skip


def told(work: Callable[[], object], folder: Path, seconds: float = 30) -> str:
    """Run it in a child with all its logs; return how it ended. What it says is in the folder."""
    pid = os.fork()
    if pid == 0:
        import signal

        signal.alarm(int(seconds))
        output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, force=True)
        warnings.simplefilter("always")
        status = 0
        try:
            print(work())
        except BaseException as error:
            status = 3
            chain: BaseException | None = error
            while chain is not None:
                print(repr(chain), chain, chain.args, vars(chain), getattr(chain, "filename", ""))
                chain = chain.__cause__ or chain.__context__
            traceback.print_exc()
        print(tensorizer._native.stats())
        print(Path("/proc/self/cmdline").read_bytes())
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {0: "well", 3: "with an error"}.get(status, f"with {status}")


def searched(folder: Path, secret: str) -> Iterator[str]:
    """Yield the files that have the secret in any form, also in their names."""
    for path in folder.rglob("*"):
        data = str(path).encode() + (path.read_bytes() if path.is_file() else b"")
        for form in forms(secret):
            if form in data:
                at = data.index(form)
                near = data[max(0, at - 150) : at + len(form) + 50]
                yield f"{path.name}: {near!r}"
                break


class Campaign:
    """Counts what was searched for."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kinds: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.meant: set[str] = set()
        self.findings: list[str] = []

    def finding(self, text: str) -> None:
        self.findings.append(text)
        print(f"FINDING {text}", file=sys.stderr, flush=True)

    def look(self, name: str, work: Callable, secret: str, folder: Path, where: str) -> None:
        ended = told(work, folder)
        self.kinds[name] += 1
        self.ended[ended] += 1
        if (
            where == ", None"
            and ended != "well"
            and name not in ("proxy", "S3 upload", "hub", "redis")
        ):
            said = (folder / "output").read_text(errors="replace")
            self.finding(
                f"{name} ends {ended}, with a server that does what it should: {said[-500:]}"
            )
        if ended.startswith("with -") or ended == "with 1":
            self.finding(f"{name}{where} ends {ended}")
        for found in searched(folder, secret):
            self.finding(f"{name}{where}: {found}")

    def of_itself(self, folder: Path) -> None:
        """Show that secrets are found that are printed, as such and encoded, and those in files."""
        for number, form in enumerate([*forms("Zqsecret" * 3)]):
            home = fresh(folder)
            told(lambda form=form: os.write(1, b"before " + form + b" behind"), home)
            (home / f"file{number}").write_bytes(b"\0" + form)
            if len(list(searched(home, "Zqsecret" * 3))) != 2:
                self.finding(f"the search does not find {form!r}")

    def of_servers(self, data: bytes, folder: Path) -> Iterator[None]:
        """Try all ways with a server that answers in one way."""
        # The first round is without faults.
        fault = self.random.choice(FAULTS) if self.meant else None
        for name in served("http://x/", "", self.random):
            secret = word(self.random)
            home = fresh(folder)
            with (
                Telling(data, fault) as server,
                environment(tuple({**PATIENCE, "HOME": str(home), "TMPDIR": str(home)}.items())),
            ):
                work = served(server.url, secret, self.random)[name]
                self.look(name, work, secret, home, f", {fault}")
                sent = "".join(server.seen).encode()
            if name not in NEVER_SENT and name != "redis":
                self.meant.add(name)
                if any(form in sent for form in forms(secret)):
                    self.seen.add(name)
            elif any(form in sent for form in forms(secret)):
                self.finding(f"{name}: the key itself was sent")
            yield

    def of_keys(self, folder: Path) -> Iterator[None]:
        """Try keys, which no file has either."""
        for name in encrypted(folder, ""):
            secret = word(self.random)
            home = fresh(folder)
            self.look(name, encrypted(home, secret)[name], secret, home, "")
            yield

    def in_memory(self, folder: Path) -> Iterator[None]:
        """Look at the memory of a process with a key, and after it has dropped it."""
        home = fresh(folder)
        key = self.random.randbytes(32)
        reading, writing = os.pipe()
        again, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            del key
            # The parent's copy is in memory that this process was forked with: another one.
            key = os.urandom(32)
            os.write(writing, key)
            params = [EncryptionParams(key), DecryptionParams.from_key(key)]
            path = home / "f.tensors"
            tensorizer.save(tensors(OLD), path, encryption=params[0])
            found = value_of(tensorizer.load(path, "cpu", verify_hash=True, encryption=params[1]))
            # The bytes that Python itself has.
            ctypes.memset(id(key) + bytes.__basicsize__ - 1, 0, 32)
            os.write(writing, b"1" if found == OLD else b"0")
            os.read(again, 1)
            params.clear()
            gc.collect()
            os.write(writing, b"2")
            os.read(again, 1)
            os._exit(0)
        key = os.read(reading, 32)
        right = os.read(reading, 1) == b"1"
        held = list(places(pid, key))
        os.write(go, b"x")
        os.read(reading, 1)
        after = list(places(pid, key))
        os.write(go, b"x")
        os.waitpid(pid, 0)
        for descriptor in (reading, writing, again, go):
            os.close(descriptor)
        self.kinds["key in memory"] += 1
        if not right or not held:
            self.finding(f"the key is not found in memory while it is used: {right}")
        for area, flags in held:
            if "dd" not in flags:
                self.finding(f"a core dump would have the key, in {area}: {flags}")
        for area, _ in after:
            self.finding(f"the key stays in memory, in {area}")
        yield


def fresh(folder: Path) -> Path:
    """Return an empty folder."""
    home = folder / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    return home


def places(pid: int, key: bytes) -> Iterator[tuple[str, list[str]]]:
    """Yield where a process has a key, with what the kernel says of the area."""
    area = ""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if "-" in line.split(" ")[0]:
                area = line
            elif line.startswith("VmFlags:"):
                start, end = (int(part, 16) for part in area.split(" ")[0].split("-"))
                if " rw" not in area or "[v" in area:
                    continue
                try:
                    data = os.pread(memory.fileno(), end - start, start)
                except OSError:
                    continue
                for _ in range(data.count(key)):
                    yield " ".join(area.split()), line.split()[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts.ending(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="one of: servers, keys, memory")
    arguments = parser.parse_args()
    began = time.monotonic()
    campaign = Campaign(arguments.seed)
    with scratch() as folder:
        save_path(folder, OLD)
        by_path(folder)
        data = (folder / "f.tensors").read_bytes()
        campaign.of_itself(folder)
        turns = {"memory": lambda: campaign.in_memory(folder),
                 "keys": lambda: campaign.of_keys(folder),
                 "servers": lambda: campaign.of_servers(data, folder)}  # fmt: skip
        turns = {name: turn for name, turn in turns.items() if arguments.only in ("", name)}
        running = {name: iter(()) for name in turns}
        while not parts.enough(arguments, began, sum(campaign.kinds.values())):
            for name, turn in turns.items():
                if next(running[name], running) is running:
                    running[name] = turn()
    for name in sorted(campaign.meant - campaign.seen):
        campaign.finding(f"{name}: no server has seen the secret, so that nothing was shown")
    print(json.dumps({
        "campaign": "leaks", "inputs": sum(campaign.kinds.values()), "what": "secrets searched for",
        "kinds": dict(campaign.kinds), "ended": dict(campaign.ended),
        "findings": campaign.findings, "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    sys.exit(bool(campaign.findings))


if __name__ == "__main__":
    main()
