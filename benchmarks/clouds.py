"""Loading from and saving to Google Cloud Storage and Azure, beside the clouds' own clients.

The servers are emulators on the same machine: fake-gcs-server, which is read, SeaweedFS, whose
requests for writing are those of Google's XML API, and Azurite. `requests for ranges` is the rate
of an emulator's bytes to a client that discards them. Each case runs in a process of its own, and
all bytes are compared, except those that are discarded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/python"))

import torch
from emulators import Azurite, Google
from safetensors.torch import save
from servers import Seaweed

#: Names of the object that is loaded, and of the one that is saved.
NAME, SAVED = "model.safetensors", "saved.safetensors"
#: The code of a client: `load()` returns the tensors; `save(data, tensors)`, if it can, saves them.
OURS = """
import tensorizer
def load(): return tensorizer.load(f"{scheme}://bucket/{NAME}", "cpu")
def save(data, tensors): tensorizer.save(tensors, f"{scheme}://bucket/{NAME}")
"""
OBSTORE = """
import json, obstore, obstore.store
client = {"allow_http": True}
if scheme == "gs":
    open_to_all = {"gcs_base_url": url, "disable_oauth": True, "client_email": "",
                   "private_key": "", "private_key_id": ""}
    place = obstore.store.GCSStore("bucket", config={
        "service_account_key": json.dumps(open_to_all)}, client_options=client)
else:
    place = obstore.store.AzureStore("bucket", config={
        "account_name": account, "account_key": key, "endpoint": f"{url}/{account}"},
        client_options=client)
def check():
    found = load()
    obstore.delete(place, NAME)
    return found
def load():
    size = obstore.head(place, NAME)["size"]
    step = 16 << 20
    starts = list(range(0, size, step))
    ends = [min(start + step, size) for start in starts]
    parts = obstore.get_ranges(place, NAME, starts=starts, ends=ends)
    return parse(b"".join(bytes(part) for part in parts))
def save(data, tensors):
    obstore.put(place, NAME, data, use_multipart=True, chunk_size=8 << 20, max_concurrency=16)
"""
GOOGLE = """
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage import transfer_manager
client = storage.Client(project="p", credentials=AnonymousCredentials(),
                        client_options={"api_endpoint": url})
blob = client.bucket("bucket").blob(NAME)
def load():
    blob.reload()
    path = f"{folder}/down"
    transfer_manager.download_chunks_concurrently(
        blob, path, worker_type=transfer_manager.THREAD, max_workers=16, crc32c_checksum=False)
    import safetensors.torch
    return safetensors.torch.load_file(path)
def save(data, tensors):
    with open(f"{folder}/up", "wb") as file:
        file.write(data)
    transfer_manager.upload_chunks_concurrently(
        f"{folder}/up", blob, chunk_size=8 << 20, max_workers=16,
        worker_type=transfer_manager.THREAD, checksum=None)
"""
GCSFS = """
import gcsfs
system = gcsfs.GCSFileSystem(project="p", token="anon", endpoint_url=url)
def load(): return parse(system.cat_file(f"bucket/{NAME}"))
"""
AZURE = """
from azure.storage.blob import BlobClient
blob = BlobClient(f"{url}/{account}", "bucket", NAME, credential=
                  {"account_name": account, "account_key": key}, max_block_size=8 << 20,
                  max_single_put_size=8 << 20, api_version="2023-11-03")
def load(): return parse(blob.download_blob(max_concurrency=16).readall())
def save(data, tensors): blob.upload_blob(data, overwrite=True, max_concurrency=16)
"""
ADLFS = """
import adlfs
system = adlfs.AzureBlobFileSystem(connection_string=
    f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};"
    f"BlobEndpoint={url}/{account};")
def load(): return parse(system.cat_file(f"bucket/{NAME}"))
def save(data, tensors): system.pipe_file(f"bucket/{NAME}", data, overwrite=True)
"""
#: The emulator's own rate: four connections request ranges, whose bytes are discarded.
PLAIN = """
import http.client, urllib.parse
from concurrent.futures import ThreadPoolExecutor
def load():
    parts = urllib.parse.urlsplit(public)
    def take(first):
        last = min(first + step, size)
        connection = http.client.HTTPConnection(parts.netloc)
        for start in range(first, last, 16 << 20):
            end = min(start + (16 << 20), last) - 1
            fields = {"Range": f"bytes={start}-{end}", "x-ms-version": "2023-11-03"}
            connection.request("GET", f"{parts.path}?{parts.query}", headers=fields)
            response = connection.getresponse()
            assert response.status == 206, response.status
            buffer, received = memoryview(bytearray(1 << 20)), 0
            while count := response.readinto(buffer):
                received += count
            assert received == end + 1 - start, received
    step = -(-size // 4)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(take, range(0, size, step)))
    return None
"""
TIMED = """
import json, sys, time, torch
from safetensors.torch import load as parse
if sys.argv[1] != "save":
    begun = time.perf_counter()
    found = check() if sys.argv[1] == "check" else load()
    # The sums touch what is only mapped.
    sums = found and {name: int(tensor.view(torch.int64).sum()) for name, tensor in found.items()}
    seconds = time.perf_counter() - begun
else:
    tensors = torch.load(f"{folder}/tensors.pt")
    # A client that uploads bytes must serialize the tensors first: that is part of the time.
    from safetensors.torch import save as made
    begun = time.perf_counter()
    save(None if ours else made(tensors), tensors)
    seconds = time.perf_counter() - begun
    sums = None
print(json.dumps([seconds, sums]))
"""


class Case:
    """A client at a server."""

    def __init__(self, name: str, code: str, given: dict[str, object], settings: dict) -> None:
        self.name, self.times = name, {"load": [], "save": [], "check": []}
        said = "".join(f"{key} = {value!r}\n" for key, value in given.items())
        self.code = said + f"ours = {code is OURS}\n" + code + TIMED
        self.settings = settings

    def run(self, what: str, sums: dict[str, int] | None) -> None:
        """Run it in a process, and note the seconds."""
        environment = os.environ | self.settings
        done = subprocess.run([sys.executable, "-c", self.code, what], env=environment,
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 0, (self.name, done.stderr[-2000:])
        seconds, found = json.loads(done.stdout.splitlines()[-1])
        assert found is None or found == sums, f"{self.name}: other bytes were loaded"
        self.times[what].append(seconds)


def row(case: Case, what: str, size: int) -> str:
    """Return a line of the table."""
    times = case.times[what]
    median = statistics.median(times)
    ends = f"{min(times):.2f} to {max(times):.2f}"
    return f"| {what} | {case.name} | {median:.2f} | {ends} | {size / 1e9 / median:.2f} |"


def cases(scheme: str, folder: str, **given: object) -> Iterator[tuple[Case, str]]:
    """Yield the cases at a cloud's servers, and the kind of each: "load", "save" or "check"."""
    mine = given | {"scheme": scheme, "folder": folder, "NAME": NAME}
    if scheme == "gs":
        reading, writing = {"url": given["read"]}, {"url": given["written"]}
        base = {"GOOGLE_SKIP_SIGNATURE": "true"}
        for what, place in (("load", reading), ("save", writing | {"NAME": SAVED})):
            settings = base | {"GOOGLE_BASE_URL": str(place["url"])}
            yield Case("tensorizer", OURS, mine | place, settings), what
            yield Case("obstore", OBSTORE, mine | place, {}), what
            yield Case("google-cloud-storage", GOOGLE, mine | place, {}), what
        yield Case("gcsfs", GCSFS, mine | reading, {}), "load"
        yield Case("check", OBSTORE, mine | writing | {"NAME": SAVED}, {}), "check"
    else:
        settings = {"AZURE_STORAGE_ACCOUNT_NAME": given["account"],
                    "AZURE_STORAGE_ACCOUNT_KEY": given["key"],
                    "AZURE_STORAGE_ENDPOINT": f"{given['url']}/{given['account']}"}  # fmt: skip
        for what, name in (("load", NAME), ("save", SAVED)):
            mine["NAME"] = name
            yield Case("tensorizer", OURS, mine, settings), what
            yield Case("obstore", OBSTORE, mine, {}), what
            yield Case("azure-storage-blob", AZURE, mine, {}), what
            yield Case("adlfs", ADLFS, mine, {}), what
        yield Case("check", OBSTORE, mine, {}), "check"
    yield Case("requests for ranges, four connections", PLAIN, mine, {}), "load"


def main() -> None:
    """Measure, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("gs", "az"))
    options = parser.parse_args()
    count = max(1, int(options.gb * 1e9) // (64 << 20))
    torch.manual_seed(0)
    tensors = {f"t{n}": torch.randint(2**62, (8 << 20,)) for n in range(count)}
    sums = {name: int(tensor.sum()) for name, tensor in tensors.items()}
    data = save(tensors)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(tensors, f"{folder}/tensors.pt")
        del tensors
        print(f"{len(data) / 1e9:.2f} GB, {options.rounds} rounds\n")
        print("| | client | seconds (median) | least to most | GB/s |\n|---|---|---|---|---|")
        if options.only != "az":
            google(folder, data, sums, options.rounds)
        if options.only != "gs":
            azure(folder, data, sums, options.rounds)


def measure(all_cases: list[tuple[Case, str]], rounds: int, sums: dict, size: int) -> None:
    """Run all cases in turns; what was saved is loaded, compared and removed."""
    (check,) = [case for case, what in all_cases if what == "check"]
    timed = [(case, what) for case, what in all_cases if what != "check"]
    for _ in range(rounds):
        for case, what in timed:
            case.run(what, sums)
            if what == "save":
                check.run("check", sums)
    for case, what in timed:
        print(row(case, what, size), flush=True)


def google(folder: str, data: bytes, sums: dict, rounds: int) -> None:
    """Measure at the emulators of Google Cloud Storage."""
    server = Google()
    (Path(folder) / "weed").mkdir()
    weed = Seaweed(Path(folder) / "weed", open_to_all=True)
    try:
        server.put(NAME, data)
        public = f"{server.url}/bucket/{NAME}"
        found = cases("gs", folder, read=server.url, written=f"http://{weed.host}", public=public,
                      size=len(data))  # fmt: skip
        measure(list(found), rounds, sums, len(data))
    finally:
        server.stop()
        weed.stop()


def azure(folder: str, data: bytes, sums: dict, rounds: int) -> None:
    """Measure at Azurite."""
    (Path(folder) / "azurite").mkdir()
    server = Azurite(Path(folder) / "azurite", any_version=True)
    try:
        server.make_containers()
        server.put(NAME, data)
        public = f"{server.url}/{server.account}/bucket/{NAME}?{server.shared_access()}"
        found = cases("az", folder, url=server.url, account=server.account, key=server.key,
                      public=public, size=len(data))  # fmt: skip
        measure(list(found), rounds, sums, len(data))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
