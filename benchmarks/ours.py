"""The engines of this package, and of its predecessor, whose classes have the same names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness.case import Engine, Given, Pairs, Tensors, program
from harness.files import KEY, as_adam, from_adam, named, sync

OLD = "tensorizer 2.12.1"


def loading(**options: Any) -> Callable[[Given], Tensors]:
    """Return a call of ``tensorizer.load`` with these options."""

    def load(given: Given) -> Tensors:
        import tensorizer

        return tensorizer.load(given.where, "cpu", **options)

    return load


def iterating(**options: Any) -> Callable[[Given], Pairs]:
    """Return a call of ``tensorizer.iterate`` with these options."""

    def iterate(given: Given) -> Pairs:
        import tensorizer

        buffer = (8 if given.quick else 256) << 20
        yield from tensorizer.iterate(given.where, device="cpu", buffer_bytes=buffer, **options)

    return iterate


def half(**options: Any) -> Callable[[Given], Tensors]:
    """Return a call that loads the first half of the rows of each tensor."""

    def load(given: Given) -> Tensors:
        import tensorizer

        slices = {f"layers.{n}.weight": (0, 0, 16) for n in range(given.model.count)}
        return tensorizer.load(given.where, "cpu", slices=slices, **options)

    return load


def deserializing(**options: Any) -> Callable[[Given], Tensors]:
    """Return a load by ``TensorDeserializer``, which both packages have."""

    def load(given: Given) -> Tensors:
        import tensorizer

        return dict(tensorizer.TensorDeserializer(source(given), device="cpu", **options).items())

    return load


def source(given: Given) -> Any:
    """Return what both packages can open: a path, or a stream of a server."""
    from tensorizer.stream_io import open_stream

    if given.base.startswith("s3:"):
        return open_stream(given.where, "rb", "key", "secret", given.host, force_http=True)
    return open_stream(given.where) if "://" in given.base else given.where


def decrypting(**options: Any) -> Callable[[Given], Tensors]:
    """Return a load of an encrypted file."""

    def load(given: Given) -> Tensors:
        import tensorizer

        params = tensorizer.DecryptionParams.from_key(KEY)
        return deserializing(encryption=params, **options)(given)

    return load


def save(given: Given, **options: Any) -> None:
    """Save as users of both packages do; this one syncs by itself."""
    import tensorizer

    if "://" in given.target:
        from tensorizer.stream_io import open_stream

        address = f"{given.target}/f.tensors"
        target = open_stream(address, "wb", "key", "secret", given.host, force_http=True)
    else:
        target = str(given.out / "f.tensors")
    serializer = tensorizer.TensorSerializer(target, **options)
    serializer.write_state_dict(given.ready)
    serializer.close()


def save_encrypted(given: Given) -> None:
    """Save encrypted."""
    import tensorizer

    save(given, encryption=tensorizer.EncryptionParams(KEY))


def save_one_by_one(given: Given) -> None:
    """Save tensor by tensor."""
    from tensorizer.serialization import TensorSerializer, TensorType

    serializer = TensorSerializer(str(given.out / "f.tensors"))
    for name, tensor in given.ready.items():
        serializer.write_tensor(0, name, TensorType.PARAM, tensor)
    serializer.close()


def saved(given: Given) -> Tensors:
    """Load what was saved."""
    import tensorizer

    if "://" in given.target:
        from tensorizer.stream_io import open_stream

        address = f"{given.target}/f.tensors"
        path: Any = open_stream(address, "rb", "key", "secret", given.host, force_http=True)
    else:
        path = str(given.out / "f.tensors")
    return dict(tensorizer.TensorDeserializer(path, device="cpu", verify_hash=True).items())


def saved_encrypted(given: Given) -> Tensors:
    """Load what was saved encrypted."""
    import tensorizer

    params = tensorizer.DecryptionParams.from_key(KEY)
    path = str(given.out / "f.tensors")
    return dict(tensorizer.TensorDeserializer(path, device="cpu", encryption=params).items())


def saving(name: str, sharded: bool = False) -> Callable[[Given], None]:
    """Return a call of ``tensorizer.save`` to a file of this name."""

    def call(given: Given) -> None:
        import tensorizer

        sizes = [tensor.nbytes for tensor in given.ready.values()]
        options = {"max_shard_size": sum(sizes) // 4 + max(sizes)} if sharded else {}
        tensorizer.save(given.ready, f"{given.target}/{name}", **options)

    return call


def saved_as(name: str) -> Callable[[Given], Tensors]:
    """Return a load of a file of this name that was saved, or of all shards."""

    def load(given: Given) -> Tensors:
        import tensorizer

        return tensorizer.load(f"{given.target}/{name}", "cpu")

    return load


def to_redis(given: Given) -> None:
    """Copy a file to Redis."""
    import redis
    import tensorizer

    client = redis.Redis(port=int(given.host.split(":")[1]))
    file = tensorizer.TensorDeserializer(str(given.file), device="cpu", lazy_load=True)
    file.to_redis(client, "model")
    file.close()


def flush(given: Given) -> None:
    """Remove what Redis has."""
    import redis

    redis.Redis(port=int(given.host.split(":")[1])).flushall()


def load_redis(given: Given) -> Tensors:
    """Load from Redis."""
    import tensorizer
    from tensorizer.stream_io import open_stream

    stream = open_stream(f"redis://{given.host}/model")
    return dict(tensorizer.TensorDeserializer(stream, device="cpu").items())


def pair_in(folder: Path) -> Tensors:
    """Load the state of Adam from the pair of files in a folder."""
    from tensorizer.torch_compat import tensorizer_loading

    with tensorizer_loading(device="cpu"):
        return from_adam(torch.load(folder / "state.pt"))


def save_pair(given: Given) -> None:
    """Save the state of Adam as a pair of files."""
    from tensorizer.torch_compat import tensorizer_saving

    with tensorizer_saving():
        torch.save(given.ready, given.out / "state.pt")


def from_pretrained(given: Given) -> Tensors:
    """Have transformers load a model inside of this package's context manager."""
    from tensorizer.safetensors import tensorizer_safetensors
    from transformers import LlamaForCausalLM

    with tensorizer_safetensors():
        return named(LlamaForCausalLM.from_pretrained(given.where))


def transformers_model(**options: Any) -> Callable[[Given], Tensors]:
    """Return a load by ``tensorizer.transformers.from_pretrained``."""

    def load(given: Given) -> Tensors:
        from tensorizer.transformers import from_pretrained as loaded

        return named(loaded(f"{given.where}/", device="cpu", **options))

    return load


def state_then_transformers(given: Given) -> Tensors:
    """Load a state from an address, and give it to transformers, which knows no addresses."""
    import tensorizer
    from tensorizer.stream_io import open_stream
    from transformers import LlamaConfig, LlamaForCausalLM

    with open_stream(f"{given.where}/config.json") as file:
        config = LlamaConfig.from_dict(json.load(file))
    state = tensorizer.load(f"{given.where}/", "cpu")
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state)
    return named(model)


def with_curl(given: Given) -> None:
    """Look for the program with which the predecessor reads from servers."""
    if "://" in given.base:
        program("curl")


def old(engine: Engine) -> Engine:
    """Return the same engine of the package's predecessor, which does not sync what it saves."""

    def synced(given: Given) -> None:
        engine.run(given)
        sync(given.out)

    name = engine.name.replace("tensorizer", OLD, 1)
    if engine.saved is not None:
        return replace(engine, name=name, site="old", run=synced)
    return replace(engine, name=name, site="old", before=engine.before or with_curl)


TENSORIZER = Engine("tensorizer", deserializing())
MMAP = Engine("tensorizer mmap", deserializing(mmap=True))
#: Hashing has touched every byte by itself.
VERIFY = Engine("tensorizer verify", deserializing(verify_hash=True), touch=False)
VERIFY_CRC32 = Engine("tensorizer verify crc32", deserializing(verify_hash="crc32"))
DECRYPT = Engine("tensorizer", decrypting(), "encrypted")
DECRYPT_VERIFY = Engine("tensorizer verify", decrypting(verify_hash=True), "encrypted", touch=False)
SAVE = Engine("tensorizer", save, "", saved=saved)
SAVE_ENCRYPTED = Engine("tensorizer", save_encrypted, "", saved=saved_encrypted)
SAVE_ONE_BY_ONE = Engine("tensorizer", save_one_by_one, "", saved=saved)
REDIS = Engine("tensorizer", load_redis, make=to_redis)
TO_REDIS = Engine("tensorizer", to_redis, saved=load_redis, before=flush)
ADAM_LOAD = Engine("tensorizer", lambda given: pair_in(given.file), "pair")
ADAM_SAVE = Engine(
    "tensorizer", save_pair, "", before=lambda given: as_adam(given.model.tensors()),
    saved=lambda given: pair_in(given.out),
)  # fmt: skip
LOAD = Engine("tensorizer", loading())
LOAD_MMAP = Engine("tensorizer mmap", loading(mmap=True))
HALF = Engine("tensorizer half", half(), part="half")
HALF_MMAP = Engine("tensorizer half mmap", half(mmap=True), part="half")
ITERATE = Engine("tensorizer", iterating())
ITERATE_MMAP = Engine("tensorizer mmap", iterating(mmap=True))
