"""Runs with the old package: reads each file that is named on stdin, and says what it has in it.

A line is a path and "key" or "plain"; the answer to it is a line of JSON.
"""

import ctypes
import hashlib
import json
import sys

import torch
from tensorizer import TensorDeserializer
from tensorizer.serialization import DecryptionParams

KEY = bytes(range(32))


def digest(tensor):
    tensor = tensor.detach().contiguous()
    size = tensor.numel() * tensor.element_size()
    data = ctypes.string_at(tensor.data_ptr(), size) if size else b""
    return hashlib.sha256(data).hexdigest()


def read(path, encrypted):
    options = {"encryption": DecryptionParams.from_key(KEY)} if encrypted else {}
    file = TensorDeserializer(path, device="cpu", lazy_load=True, num_readers=1, **options)
    try:
        return [
            [list(name) if isinstance(name, tuple) else name, str(tensor.dtype),
             list(tensor.shape), digest(tensor)]
            for _, _, name, tensor in file.read_tensors()
        ]  # fmt: skip
    finally:
        file.close()


def main():
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        path, how = line.rstrip("\n").rsplit(" ", 1)
        try:
            said = {"tensors": read(path, how == "key")}
        except BaseException as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
