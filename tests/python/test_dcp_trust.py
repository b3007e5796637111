"""Checkpoints on servers, with keys and hashes, and with what runs code."""

import os
import pickle

import pytest
import tensorizer
import torch
from conftest import assert_same
from dcp_planners import Halves, fails, load, of_every_dtype, save
from servers import Nginx
from tensorizer import CryptographyError, EncryptionParams, HashMismatchError
from tensorizer.distributed.whole_tensors import WholeTensors
from tensorizer_cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_s3(s3, tmp_path):
    state = of_every_dtype() | {"step": 3}
    for turn in range(2):
        save(state | {"step": turn}, "s3://bucket/dcp/step-1")
        target = {name: torch.zeros_like(t) for name, t in of_every_dtype().items()}
        load(target | {"step": 0}, "s3://bucket/dcp/step-1", verify_hash=True)
        for name, tensor in of_every_dtype().items():
            assert_same(target[name], tensor)
    keys = [one["Key"] for one in s3.client().list_objects_v2(Bucket="bucket")["Contents"]]
    assert len([key for key in keys if key.startswith("dcp/step-1/")]) == 3  # the first one stays
    with fails(FileNotFoundError, "there is no checkpoint at s3://bucket/dcp/none"):
        load({"a": torch.zeros(2)}, "s3://bucket/dcp/none")
    one = tmp_path / "one.tensors"
    assert main(["cp", "--verify", "s3://bucket/dcp/step-1/", str(one)]) == 0
    for name, tensor in tensorizer.load(one).items():
        assert_same(tensor, state[name])
    with fails(FileExistsError, "there is a checkpoint at s3://"):
        save({"a": torch.zeros(2)}, "s3://bucket/dcp/step-1", overwrite=False)


def test_http(tmp_path, no_settings_of_the_machine):
    (tmp_path / "nginx").mkdir()
    nginx = Nginx(tmp_path / "nginx")
    try:
        save({"a": torch.arange(1000.0), "step": 3}, nginx.root / "c")
        target = load({"a": torch.zeros(1000), "step": 0}, f"{nginx.http}/c", verify_hash=True)
        assert target["step"] == 3
        assert torch.equal(target["a"], torch.arange(1000.0))
        with pytest.raises(ValueError, match="opened for reading"):
            save({"a": torch.ones(1)}, f"{nginx.http}/c")
    finally:
        nginx.stop()


# Keys and hashes


def test_encryption(tmp_path):
    key, other = EncryptionParams.random(), EncryptionParams.random()
    state = {"a": torch.full((1000,), 7.0), "secret": "plain words" * 10}
    save(state, tmp_path / "c", encryption=key)
    for path in (tmp_path / "c").iterdir():
        assert b"plain words" not in path.read_bytes()
    right, wrong = (tensorizer.DecryptionParams.from_key(one.key) for one in (key, other))
    target = load({"a": torch.zeros(1000), "secret": ""}, tmp_path / "c", encryption=right)
    assert torch.equal(target["a"], state["a"])
    assert target["secret"] == state["secret"]
    for encryption in (wrong, None):
        with fails(CryptographyError):
            load({"a": torch.zeros(1000)}, tmp_path / "c", encryption=encryption)


def test_a_flipped_byte(tmp_path):
    save({"a": torch.zeros(1000), "b": torch.zeros(1000), "o": 1}, tmp_path / "c")
    (path,) = (tmp_path / "c").glob("*.tensors")
    data = bytearray(path.read_bytes())
    at = data.rindex(bytes(900))
    data[at] = 1
    path.write_bytes(data)
    for verify in (True, "crc32"):
        with fails(HashMismatchError):
            load(
                {"a": torch.zeros(1000), "b": torch.zeros(1000)}, tmp_path / "c", verify_hash=verify
            )
    load({"a": torch.zeros(1000), "b": torch.zeros(1000)}, tmp_path / "c")


# Checkpoints that run code


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_objects_that_run_code_are_refused_by_the_restricted_unpickler(tmp_path):
    made = tmp_path / "made"
    save({"fine": 1, "model": {"evil": Runs(made)}}, tmp_path / "c")
    assert load({"fine": 0}, tmp_path / "c") == {"fine": 1}
    with fails(pickle.UnpicklingError, f"^'model.evil' of {tmp_path}/c: "):
        load({"model": {"evil": None}}, tmp_path / "c")
    assert not made.exists()
    load({"model": {"evil": None}}, tmp_path / "c", weights_only=False)
    assert made.exists()


def test_planner_data_go_through_the_restricted_unpickler(tmp_path):
    made = tmp_path / "made"
    planner = Halves(flatten_state_dict=False)
    planner.data = Runs(made)
    for _ in range(2):  # what is replaced need not be unpickled
        save({"a": torch.ones(2)}, tmp_path / "c", planner=planner)
    assert len(os.listdir(tmp_path / "c")) == 2
    target = {"a": torch.zeros(2)}
    with fails(pickle.UnpicklingError, "the planner data of .*/c: "):
        load(target, tmp_path / "c")
    with WholeTensors(tmp_path / "c") as whole:
        assert next(whole.load(["a"])).all()
    assert not made.exists()
    load(target, tmp_path / "c", weights_only=False)
    assert made.exists()
