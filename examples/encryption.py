"""Saves a model encrypted, loads it with the right key, and fails with a wrong one.

python examples/encryption.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from tensorizer import (
    CryptographyError,
    DecryptionParams,
    EncryptionParams,
    TensorDeserializer,
    TensorSerializer,
)
from tensorizer.utils import no_init_or_tensor


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.LayerNorm(512))


def main(folder: Path) -> None:
    path = folder / "sealed.tensors"
    model = make_model()

    # A key of 32 random bytes. Keep it where secrets are kept, not beside the file.
    params = EncryptionParams.random(manifest=True)
    with TensorSerializer(path, encryption=params) as serializer:
        serializer.write_module(model)

    # The manifest says that nothing was exchanged either.
    decryption = DecryptionParams.from_key(params.key, require_manifest=True)
    empty = no_init_or_tensor(make_model)
    file = TensorDeserializer(path, device="cpu", encryption=decryption)
    file.load_into_module(empty, strict=True)
    assert torch.equal(empty[0].weight, model[0].weight)
    print("loaded with the right key")

    try:
        TensorDeserializer(path, "cpu", encryption=DecryptionParams.from_key(bytes(32)))
    except CryptographyError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("a wrong key was accepted")

    # With a passphrase: slow on purpose, so that guessing is slow too.
    params = EncryptionParams.from_string("correct horse battery staple")
    with TensorSerializer(path, encryption=params) as serializer:
        serializer.write_module(model)
    decryption = DecryptionParams.from_string("correct horse battery staple")
    loaded = TensorDeserializer(path, device="cpu", encryption=decryption)
    assert torch.equal(loaded["1.weight"], model[1].weight)
    print("loaded with the passphrase")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
