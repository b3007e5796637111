"""A tensor that changes while it is saved: the hash in the file is that of the bytes there."""

import threading

import pytest
import tensorizer
import torch
from tensorizer import DecryptionParams, EncryptionParams


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("size", [1000, 200_000, 20_000_000])
def test_the_hash_is_that_of_the_bytes_written(tmp_path, size, encrypted):
    # Small ones change too quickly to be caught in one try.
    count = min(20_000_000 // size, 1500)
    tensors = {str(n): torch.zeros(size, dtype=torch.uint8) for n in range(count)}
    over = threading.Event()

    def change():
        while not over.is_set():
            for tensor in tensors.values():
                tensor.add_(1)

    encryption = EncryptionParams.random() if encrypted else None
    decryption = DecryptionParams.from_key(encryption.key) if encryption else None
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for number in range(3):
            tensorizer.save(tensors, tmp_path / str(number), encryption=encryption)
    finally:
        over.set()
        thread.join()
    for number in range(3):
        found = tensorizer.load(tmp_path / str(number), verify_hash=True, encryption=decryption)
        assert found.keys() == tensors.keys()
