"""One engine, one run, one process: prints one line of JSON.

    python engines.py ENGINE FOLDER MODEL [--quick]

Loading ends when every byte has been read by the CPU once, by hashing or by touching it:
engines that map a file have done nothing before that. Touching adds all 64-bit words of each
tensor; the sums are compared with those that were computed when the files were made.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

sys.path.insert(0, str(Path(__file__).parent))
import checkpoints
import peers
from cases import FULL, QUICK, Model
from machine import have_memory


def status(field: str) -> int:
    """Return a size of this process in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))


def checksum(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Read every byte: one sum a tensor, modulo 2^64."""
    return {
        name: int(tensor.detach().flatten().view(torch.int64).sum())
        for name, tensor in tensors.items()
    }


def load_ours(path: Path, **options) -> dict[str, torch.Tensor]:
    import tensorizer

    return dict(tensorizer.TensorDeserializer(f"{path}.tensors", device="cpu", **options).items())


def load_ours_plain(path: Path) -> dict[str, torch.Tensor]:
    import tensorizer

    return tensorizer.load(f"{path}.tensors", "cpu")


def load_ours_lazily(path: Path) -> Mapping[str, torch.Tensor]:
    import tensorizer

    return tensorizer.TensorDeserializer(f"{path}.tensors", device="cpu", lazy_load=True)


def load_encrypted(path: Path, **options) -> dict[str, torch.Tensor]:
    import tensorizer

    params = tensorizer.DecryptionParams.from_key(bytes(range(32)))
    path = path.with_suffix(".encrypted")
    file = tensorizer.TensorDeserializer(str(path), device="cpu", encryption=params, **options)
    return dict(file.items())


def load_http(path: Path, **options) -> dict[str, torch.Tensor]:
    """Load from the server that the caller has started over the folder."""
    import tensorizer
    from tensorizer.stream_io import open_stream

    stream = open_stream(f"http://{os.environ['BENCHMARK_SERVER']}/{path.name}.tensors")
    return dict(tensorizer.TensorDeserializer(stream, device="cpu", **options).items())


def open_s3(path: Path, mode: str):
    from tensorizer.stream_io import open_stream

    host = os.environ["BENCHMARK_SERVER"]
    return open_stream(
        f"s3://bucket/{path.name}.tensors", mode, "key", "secret", host, force_http=True
    )


def load_s3(path: Path) -> dict[str, torch.Tensor]:
    import tensorizer

    return dict(tensorizer.TensorDeserializer(open_s3(path, "rb"), device="cpu").items())


def upload(tensors: dict[str, torch.Tensor], path: str) -> None:
    import tensorizer

    serializer = tensorizer.TensorSerializer(open_s3(Path(path), "wb"))
    serializer.write_state_dict(tensors)
    serializer.close()


def to_redis(path: Path) -> tuple[float, int]:
    """Copy a file to the server that the caller has started: seconds and bytes."""
    import redis
    import tensorizer

    client = redis.Redis(port=int(os.environ["BENCHMARK_SERVER"].split(":")[1]))
    client.flushall()
    start = time.perf_counter()
    file = tensorizer.TensorDeserializer(f"{path}.tensors", device="cpu", lazy_load=True)
    total = file.total_tensor_bytes
    file.to_redis(client, "model")
    file.close()
    return time.perf_counter() - start, int(total)


def load_redis(path: Path) -> dict[str, torch.Tensor]:
    import tensorizer
    from tensorizer.stream_io import open_stream

    stream = open_stream(f"redis://{os.environ['BENCHMARK_SERVER']}/model")
    return dict(tensorizer.TensorDeserializer(stream, device="cpu").items())


def load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    return peers.safetensors([f"{path}.safetensors"])


def load_torch(path: Path, **options) -> dict[str, torch.Tensor]:
    return peers.torch_load([f"{path}.pt"], **options)


def load_checkpoint(path: Path, ours: bool = True) -> dict[str, torch.Tensor]:
    names = list(json.loads(Path(f"{path}.json").read_text()))
    return checkpoints.load(path, names, ours)


def save_checkpoint(engine: str, out: str, model: Model) -> dict[str, object]:
    """Save the state of an optimizer; ours is loaded again to be compared."""
    ours = not engine.startswith("torch.save")
    tensors = model.tensors()
    state = checkpoints.nested(tensors)
    os.sync()
    have_memory(model.total_bytes)
    start = time.perf_counter()
    checkpoints.save(state, out, ours)
    if "synced" in engine or "2.12.1" in engine:
        for path in checkpoints.files(out):
            sync(path)
    seconds = time.perf_counter() - start
    if engine.startswith("ours"):
        os.rename(out, f"{out[:-3]}.pair.pt")
        os.rename(f"{out}.tensors", f"{out[:-3]}.pair.pt.tensors")
        out = f"{out[:-3]}.pair.pt"
        loaded = checkpoints.load(Path(out.removesuffix(".pair.pt")), list(tensors), ours)
        verified = checksum(loaded) == checksum(tensors)
    else:
        verified = True
    written = sum(os.path.getsize(path) for path in checkpoints.files(out))
    for path in checkpoints.files(out):
        os.remove(path)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert written >= total
    return {"seconds": seconds, "bytes": total, "verified": verified}


def load_runai(path: Path) -> dict[str, torch.Tensor]:
    return peers.run_ai([f"{path}.safetensors"])


LOADERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "ours": load_ours,
    "ours mmap": lambda path: load_ours(path, mmap=True),
    "ours http": load_http,
    "2.12.1 http": load_http,
    "ours s3": load_s3,
    "2.12.1 s3": load_s3,
    "ours redis": load_redis,
    "2.12.1 redis": load_redis,
    "ours verify": lambda path: load_ours(path, verify_hash=True),
    "tensorizer 2.12.1": load_ours,
    "2.12.1 verify": lambda path: load_ours(path, verify_hash=True),
    "ours verify-crc32": lambda path: load_ours(path, verify_hash="crc32"),
    "ours decrypt": load_encrypted,
    "2.12.1 decrypt": load_encrypted,
    "ours decrypt-verify": lambda path: load_encrypted(path, verify_hash=True),
    "2.12.1 decrypt-verify": lambda path: load_encrypted(path, verify_hash=True),
    "ours checkpoint": load_checkpoint,
    "2.12.1 checkpoint": load_checkpoint,
    "torch.load checkpoint": lambda path: load_checkpoint(path, ours=False),
    "safetensors": load_safetensors,
    "torch.load": load_torch,
    "torch.load mmap": lambda path: load_torch(path, mmap=True),
    "run:ai": load_runai,
    "fastsafetensors": lambda path: peers.fastsafetensors([f"{path}.safetensors"]),
    "requests, then safetensors": lambda path: peers.requests_get(
        f"http://{os.environ['BENCHMARK_SERVER']}/{path.name}.safetensors"
    ),
    "run:ai s3": lambda path: peers.run_ai([f"s3://bucket/{path.name}.safetensors"]),
    "run:ai tuned s3": lambda path: peers.run_ai([f"s3://bucket/{path.name}.safetensors"]),
    "boto3, then safetensors": lambda path: peers.boto3_download(
        "bucket", f"{path.name}.safetensors"
    ),
}
OPENERS = {
    "ours index": load_ours_lazily,
    "ours plain": load_ours_plain,
    "ours parameters": load_ours,
    "ours mmap open": lambda path: load_ours(path, mmap=True),
    "safetensors open": load_safetensors,
}


def sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)


def save_ours(tensors: dict[str, torch.Tensor], path: str) -> None:
    import tensorizer

    serializer = tensorizer.TensorSerializer(path)
    serializer.write_state_dict(tensors)
    serializer.close()


def save_one_by_one(tensors: dict[str, torch.Tensor], target: str | BinaryIO) -> None:
    from tensorizer.serialization import TensorSerializer, TensorType

    serializer = TensorSerializer(target)
    for name, tensor in tensors.items():
        serializer.write_tensor(0, name, TensorType.PARAM, tensor)
    serializer.close()


def save_old_one_by_one(tensors: dict[str, torch.Tensor], path: str) -> None:
    save_one_by_one(tensors, path)
    sync(path)


def save_file_one_by_one(tensors: dict[str, torch.Tensor], path: str) -> None:
    with open(path, "wb+") as file:
        save_one_by_one(tensors, file)
    sync(path)


def save_encrypted(tensors: dict[str, torch.Tensor], path: str) -> None:
    import tensorizer

    params = tensorizer.EncryptionParams(bytes(range(32)))
    serializer = tensorizer.TensorSerializer(path, encryption=params)
    # The old package encrypts the caller's memory in place.
    serializer.write_state_dict(tensors)
    serializer.close()
    sync(path)


def save_safetensors(tensors: dict[str, torch.Tensor], path: str) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)
    sync(path)


def save_old(tensors: dict[str, torch.Tensor], path: str) -> None:
    save_ours(tensors, path)
    sync(path)


def save_torch(tensors: dict[str, torch.Tensor], path: str) -> None:
    torch.save(tensors, path)
    sync(path)


#: Ours syncs by itself; the others return before the disk has the bytes.
SAVERS = {
    "ours save": save_ours,
    "2.12.1 save": save_old,
    "safetensors save": save_safetensors,
    "ours write-tensor": save_one_by_one,
    "ours write-tensor file": save_file_one_by_one,
    "2.12.1 write-tensor": save_old_one_by_one,
    "torch.save": save_torch,
    "ours upload": upload,
    "ours encrypt": save_encrypted,
    "2.12.1 encrypt": save_encrypted,
    "2.12.1 upload": upload,
    "boto3 upload of safetensors": lambda tensors, path: peers.boto3_upload(
        tensors, "bucket", f"{Path(path).name}.tensors"
    ),
}
#: The module that each engine imports; torch is imported already.
IMPORTS = {
    "ours import": "tensorizer",
    "2.12.1 import": "tensorizer",
    "safetensors import": "safetensors.torch",
}


def fetch_upload(out: str) -> str:
    """Have the server write what it was sent into a file; return its path."""
    import urllib.request

    host = os.environ["BENCHMARK_SERVER"]
    name = f"{Path(out).name}.tensors"
    urllib.request.urlopen(f"http://{host}/bucket/{name}").read()
    return f"{os.environ['BENCHMARK_STORE']}/{name}"


def warm_up(engine: str) -> None:
    """Import what the engine needs, so that imports are not measured."""
    import importlib

    if "2.12.1" in engine or "ours" in engine:
        module = importlib.import_module("tensorizer")
        assert module.__version__.startswith("2.12.1") == ("2.12.1" in engine), module.__file__
    else:
        if engine.endswith(" s3") or "boto3" in engine:
            os.environ.update(peers.s3_environment(os.environ["BENCHMARK_SERVER"]))
            os.environ.update(peers.S3_SETTINGS.get(engine.removesuffix(" s3"), {}))
        peers.import_for(engine)


def main(engine: str, folder: str, model: str, quick: bool) -> dict[str, object]:
    import importlib

    path = Path(folder) / model
    if engine in IMPORTS:
        start = time.perf_counter()
        importlib.import_module(IMPORTS[engine])
        return {"seconds": time.perf_counter() - start, "verified": True}
    warm_up(engine)
    if "checkpoint save" in engine:
        return save_checkpoint(engine, f"{path}.out.pt", (QUICK if quick else FULL)[model])
    if engine in SAVERS:
        tensors = (QUICK if quick else FULL)[model].tensors()
        total = sum(t.nbytes for t in tensors.values())
        out = f"{path}.{engine.split(maxsplit=1)[0]}.saved"
        os.sync()
        have_memory(total)
        reset_peak()
        before = status("VmHWM")
        start = time.perf_counter()
        SAVERS[engine](tensors, out)
        seconds = time.perf_counter() - start
        extra = status("VmHWM") - before
        if "upload" in engine:
            out = fetch_upload(out)
        verified = True
        if "ours" in engine:
            # Files of the other engines are checked by their size only, below.
            import tensorizer

            params = tensorizer.DecryptionParams.from_key(bytes(range(32)))
            params = params if "encrypt" in engine else None
            loaded = tensorizer.load(out, "cpu", verify_hash=True, encryption=params)
            verified = all(torch.equal(loaded[n].view(torch.int16), t.view(torch.int16))
                           for n, t in tensors.items())  # fmt: skip
            del loaded
        assert os.path.getsize(out) >= total
        os.remove(out)
        return {"seconds": seconds, "bytes": total, "extra_bytes": extra, "verified": verified}
    if "to_redis" in engine:
        seconds, total = to_redis(path)
        # The bytes are verified by loading them.
        verified = checksum(load_redis(path)) == json.loads(Path(f"{path}.json").read_text())
        return {"seconds": seconds, "bytes": total, "verified": verified}
    expected = json.loads(Path(f"{path}.json").read_text())
    have_memory(max(file.stat().st_size for file in path.parent.glob(f"{model}.*")))
    reset_peak()
    before = status("VmHWM")
    cpu = sum(os.times()[:4])
    start = time.perf_counter()
    tensors = (OPENERS | LOADERS)[engine](path)
    loaded = time.perf_counter() - start
    if engine in OPENERS:
        verified = checksum(tensors) == expected
        return {"seconds": loaded, "verified": verified}
    sums = checksum(tensors)
    # Hashing has touched every byte by itself.
    seconds = loaded if "verify" in engine and "crc" not in engine else time.perf_counter() - start
    cpu = sum(os.times()[:4]) - cpu
    total = sum(t.nbytes for t in tensors.values())
    extra = status("VmHWM") - before - total
    return {
        "seconds": seconds,
        "load_seconds": loaded,
        "cpu_seconds": cpu,
        "bytes": total,
        "extra_bytes": extra,
        "verified": sums == expected,
    }


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--quick"]
    print(json.dumps(main(*arguments, quick="--quick" in sys.argv)))
    sys.stdout.flush()
    # Freeing memory is not part of what is measured.
    os._exit(0)
