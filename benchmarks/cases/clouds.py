"""Google Cloud Storage and Azure on emulators, beside the clouds' own clients.

The clients are in the environment `.venv-clouds`, of which `make .make/bench-clouds` makes one.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.parse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness.case import Case, Engine, Given, Measured, Tensors
from harness.process import in_threads
from ours import saved_as, saving

NAME, PIECE = "model.safetensors", 16 << 20


def parsed(data: bytes) -> Tensors:
    """Return the tensors in the bytes of a safetensors file."""
    from safetensors.torch import load

    return load(data)


def made(given: Given) -> bytes:
    """Serialize the tensors that are saved: a client that uploads bytes has to."""
    from safetensors.torch import save

    return save(given.ready)


def cloud_load(scheme: str) -> Callable[[Given], Tensors]:
    """Return a load by this package."""

    def load(_: Given) -> Tensors:
        import tensorizer

        return tensorizer.load(f"{scheme}://bucket/{NAME}", "cpu")

    return load


def obstore_store(scheme: str, given: Given) -> Any:
    """Return obstore's client of a bucket."""
    import obstore.store

    client, url = {"allow_http": True}, f"http://{given.host}"
    if scheme == "gs":
        key = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "",
               "private_key_id": ""}  # fmt: skip
        config: dict[str, Any] = {"service_account_key": json.dumps(key)}
        return obstore.store.GCSStore("bucket", config=config, client_options=client)
    account, key = account_and_key()
    config = {"account_name": account, "account_key": key, "endpoint": f"{url}/{account}"}
    return obstore.store.AzureStore("bucket", config=config, client_options=client)


def account_and_key() -> tuple[str, str]:
    """Return the account of Azure's emulator, and its key."""
    return os.environ["AZURE_STORAGE_ACCOUNT_NAME"], os.environ["AZURE_STORAGE_ACCOUNT_KEY"]


def obstore_load(scheme: str, name: str = NAME) -> Callable[[Given], Tensors]:
    """Return a load by obstore."""

    def load(given: Given) -> Tensors:
        import obstore

        store = obstore_store(scheme, given)
        size = obstore.head(store, name)["size"]
        starts = list(range(0, size, PIECE))
        ends = [min(start + PIECE, size) for start in starts]
        parts = obstore.get_ranges(store, name, starts=starts, ends=ends)
        return parsed(b"".join(bytes(part) for part in parts))

    return load


def obstore_save(scheme: str) -> Callable[[Given], None]:
    """Return an upload by obstore."""

    def save(given: Given) -> None:
        import obstore

        obstore.put(obstore_store(scheme, given), "saved", made(given), use_multipart=True,
                    chunk_size=8 << 20, max_concurrency=16)  # fmt: skip

    return save


def google_blob(given: Given, name: str) -> Any:
    """Return an object of Google's client."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    options = {"api_endpoint": f"http://{given.host}"}
    client = storage.Client("p", AnonymousCredentials(), client_options=options)
    return client.bucket("bucket").blob(name)


def google_load(given: Given) -> Tensors:
    """Load with Google's client, which downloads pieces into a file."""
    from google.cloud.storage import transfer_manager
    from safetensors.torch import load_file

    blob, path = google_blob(given, NAME), f"{given.out}/down"
    blob.reload()
    transfer_manager.download_chunks_concurrently(
        blob, path, worker_type=transfer_manager.THREAD, max_workers=16, crc32c_checksum=False
    )
    return load_file(path)


def google_save(given: Given) -> None:
    """Save a file, and upload it with Google's client."""
    from google.cloud.storage import transfer_manager

    path = given.out / "up"
    path.write_bytes(made(given))
    transfer_manager.upload_chunks_concurrently(
        str(path), google_blob(given, "saved"), chunk_size=8 << 20, max_workers=16,
        worker_type=transfer_manager.THREAD, checksum=None,
    )  # fmt: skip


def azure_blob(given: Given, name: str) -> Any:
    """Return an object of Azure's client."""
    from azure.storage.blob import BlobClient

    account, key = account_and_key()
    return BlobClient(
        f"http://{given.host}/{account}", "bucket", name, max_block_size=8 << 20,
        credential={"account_name": account, "account_key": key}, max_single_put_size=8 << 20,
        api_version="2023-11-03",
    )  # fmt: skip


def azure_load(given: Given) -> Tensors:
    """Load with Azure's client."""
    return parsed(azure_blob(given, NAME).download_blob(max_concurrency=16).readall())


def azure_save(given: Given) -> None:
    """Upload with Azure's client."""
    azure_blob(given, "saved").upload_blob(made(given), overwrite=True, max_concurrency=16)


def ranges(given: Given) -> Measured:
    """Request ranges on four connections, and drop the bytes: the emulator's own rate."""
    import time

    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    url = os.environ["SIGNED"] if account else f"http://{given.host}/bucket/{NAME}"
    address = urllib.parse.urlsplit(url)
    size = (given.folder / f"{given.model.name}.safetensors").stat().st_size

    def take(number: int) -> None:
        connection = http.client.HTTPConnection(address.netloc)
        for start in range(number * PIECE, size, 4 * PIECE):
            end = min(start + PIECE, size) - 1
            fields = {"Range": f"bytes={start}-{end}", "x-ms-version": "2023-11-03"}
            connection.request("GET", f"{address.path}?{address.query}", headers=fields)
            response = connection.getresponse()
            assert response.status == 206, response.status
            buffer, received = memoryview(bytearray(1 << 20)), 0
            while count := response.readinto(buffer):
                received += count
            assert received == end + 1 - start, received

    start = time.perf_counter()
    in_threads(4, take)
    return Measured(time.perf_counter() - start, size)


def peer(name: str, module: str, load: Callable[[Given], Tensors]) -> Engine:
    """Return an engine of a cloud's client."""
    return Engine(name, load, "safetensors", (module, "safetensors.torch"), site="clouds")


def saver(name: str, module: str, scheme: str, save: Callable[[Given], None]) -> Engine:
    """Return an engine that uploads with a cloud's client; obstore loads it to be compared."""
    return replace(peer(name, module, save), imports=(module, "safetensors.torch", "obstore"),
                   saved=obstore_load(scheme, "saved"))  # fmt: skip


def cases(scheme: str, cloud: str, kinds: tuple[str, str], client: tuple) -> list[Case]:
    """Return the cases of a cloud."""
    name, module, load, save = client
    mine = Engine("tensorizer", cloud_load(scheme), "safetensors")
    uploads = replace(mine, run=saving(NAME), saved=saved_as(NAME))
    rate = Engine("requests for ranges", ranges, "safetensors", (), baseline=True, touch=False)
    return [
        Case(f"clouds/{scheme}-load", f"load from {cloud}, emulated",
             (mine, peer("obstore", "obstore", obstore_load(scheme)), peer(name, module, load),
              rate), "gigabyte", server=kinds[0]),
        Case(f"clouds/{scheme}-save", f"save to {cloud}, emulated",
             (uploads, saver("obstore", "obstore", scheme, obstore_save(scheme)),
              saver(name, module, scheme, save)), "gigabyte", server=kinds[1]),
    ]  # fmt: skip


CASES = [
    *cases("gs", "Google Cloud Storage", ("gs", "gs write"),
           ("google-cloud-storage", "google.cloud.storage", google_load, google_save)),
    *cases("az", "Azure", ("az", "az"),
           ("azure-storage-blob", "azure.storage.blob", azure_load, azure_save)),
]  # fmt: skip
