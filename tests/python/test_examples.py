"""The examples in Python run as programs, and leave what they say they do."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import tensorizer
import torch
from conftest import ROOT, assert_same
from tensorizer import DecryptionParams, TensorDeserializer

EXAMPLES = ROOT / "examples"
TIED = "lm_head.weight"


def run(name, *args, cwd, fails=False, **env):
    """Run an example as its docstring says; return what it prints, or what it fails with."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | env,
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else done.stdout


@pytest.fixture
def transformers():
    if importlib.util.find_spec("transformers") is None:
        if os.environ.get("CI"):
            pytest.fail("transformers is required in CI")
        pytest.skip("transformers is not installed")
    return importlib.import_module("transformers")


@pytest.fixture
def small_model(transformers):
    """The model that the examples make without a network."""
    spec = importlib.util.spec_from_file_location("small_model", EXAMPLES / "small_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(module.config_of(None)).eval()


@pytest.fixture
def some_file(tmp_path):
    """A file with tensors of a module and of a state dict."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    with tensorizer.TensorSerializer(tmp_path / "plain.tensors") as serializer:
        serializer.write_module(model)
        serializer.write_state_dict({"nested": [torch.arange(5), torch.ones(3).bfloat16()]})
    return tmp_path / "plain.tensors"


def assert_holds(path, tensors, **how):
    """Compare the tensors of a file, bit by bit, with those that it is to have."""
    with TensorDeserializer(path, "cpu", verify_hash=True, **how) as file:
        assert list(file) == list(tensors)
        for name, tensor in tensors.items():
            assert_same(file[name].detach(), tensor.detach())


def answer(model):
    return str(
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)[0].tolist()
    )


def test_every_example_is_run():
    text = (ROOT / "tests/python/test_examples.py").read_text()
    names = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(names) >= 10
    assert [name for name in names if f'"{name}"' not in text] == []
    for name in ("cpp-server", "tch.rs"):
        tests = (ROOT / "tests/python/test_cpp.py", ROOT / "Makefile")
        assert any(name.removesuffix(".rs") in test.read_text() for test in tests)


def test_saving_and_loading_a_model(small_model, tmp_path):
    assert "saved 547.8 KB to model.tensors" in run("serialize.py", cwd=tmp_path)
    tensors = dict(small_model.named_parameters(remove_duplicate=False))
    assert_holds(tmp_path / "model.tensors", tensors)
    printed = run("deserialize-simple.py", cwd=tmp_path)
    assert printed.splitlines()[-1] == answer(small_model)
    printed = run("deserialize.py", "model.tensors", "--verify", "--readers", 2, cwd=tmp_path)
    lines = printed.splitlines()
    assert lines[0].startswith(f"loaded {len(tensors)} tensors, 547.8 KB to cpu in ")
    assert "hash" in printed and "a slower way" not in printed
    assert lines[-1] == answer(small_model)


def test_a_changed_byte_is_found(transformers, tmp_path):
    run("serialize.py", cwd=tmp_path)
    path = tmp_path / "model.tensors"
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    said = run("deserialize.py", "--verify", cwd=tmp_path, fails=True)
    assert "HashMismatchError" in said


def test_saving_to_s3_and_loading_from_there(
    small_model, moto, no_settings_of_the_machine, tmp_path
):
    uri = "s3://bucket/examples/model.tensors"
    run("serialize.py", uri, cwd=tmp_path, **moto.settings())
    printed = run("deserialize-simple.py", uri, cwd=tmp_path, **moto.settings())
    assert printed.splitlines()[-1] == answer(small_model)
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_a_folder(small_model, tmp_path):
    """As for a name of the hub, which stands for such a folder."""
    folder = tmp_path / "repo"
    small_model.half().save_pretrained(folder)
    run("serialize.py", "--model", folder, cwd=tmp_path)
    assert_holds(
        tmp_path / "model.tensors", dict(small_model.named_parameters(remove_duplicate=False))
    )


def test_models_of_transformers(small_model, transformers, tmp_path):
    folder, out = tmp_path / "config", tmp_path / "out"
    small_model.config.save_pretrained(folder)
    printed = run("hf_serialization.py", folder, out, "--validate", cwd=tmp_path)
    assert "the same 29 tensors, and the same answer" in printed
    config = json.loads((out / "model-config.json").read_text())
    assert config["model_type"] == "gpt2" and config["n_embd"] == 64

    small_model.half().save_pretrained(folder)
    run("hf_serialization.py", "--model_type", "transformers", folder, out, cwd=tmp_path)
    tensors = dict(small_model.named_parameters(remove_duplicate=False))
    assert_holds(out / "model.tensors", tensors)
    assert tensors[TIED].dtype == torch.float16


def test_models_of_transformers_on_s3(small_model, moto, no_settings_of_the_machine, tmp_path):
    small_model.save_pretrained(tmp_path)
    uri = "s3://bucket/hf/"
    printed = run(
        "hf_serialization.py", tmp_path, uri, "--validate", cwd=tmp_path, **moto.settings()
    )
    assert "the same 29 tensors" in printed
    keys = {
        item["Key"]
        for item in moto.client().list_objects(Bucket="bucket", Prefix="hf/")["Contents"]
    }
    assert keys == {"hf/model.tensors", "hf/model-config.json"}


def test_encryption(tmp_path):
    printed = run("encryption.py", tmp_path, cwd=tmp_path).splitlines()
    assert printed[0] == "loaded with the right key"
    assert "Tensor decryption failed" in printed[1] or "manifest" in printed[1]
    assert printed[2:] == ["loaded with the passphrase"]
    key = DecryptionParams.from_string("correct horse battery staple")
    with TensorDeserializer(tmp_path / "sealed.tensors", "cpu", encryption=key) as file:
        assert file["0.weight"].shape == (512, 512)


def encrypt(*args, cwd, infile="plain.tensors", outfile="sealed.tensors", fails=False):
    args = (*args, "--infile", infile, "--outfile", outfile)
    return run("encrypt_existing.py", *args, cwd=cwd, fails=fails)


def same_as(path, some_file, **how):
    """Tell whether two files hold the same tensors in the same places of modules."""
    with TensorDeserializer(some_file, "cpu", lazy_load=True) as one:
        with TensorDeserializer(path, "cpu", lazy_load=True, **how) as other:
            for expected, found in zip(one.read_tensors(), other.read_tensors(), strict=True):
                assert found[:3] == expected[:3]
                assert_same(found[3].detach(), expected[3].detach())
    return True


def test_encrypting_a_file_with_a_new_key(some_file, tmp_path):
    printed = encrypt("add", "random", "--keyfile", "key", cwd=tmp_path)
    assert len(printed.splitlines()) == 9
    key = (tmp_path / "key").read_bytes()
    assert len(key) == 32 and (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    sealed = tmp_path / "sealed.tensors"
    assert same_as(sealed, some_file, encryption=DecryptionParams.from_key(key))

    said = encrypt(
        "add", "random", "--keyfile", "key", outfile="other.tensors", cwd=tmp_path, fails=True
    )
    assert "FileExistsError" in said and (tmp_path / "key").read_bytes() == key

    how = {"infile": "sealed.tensors", "outfile": "again.tensors", "cwd": tmp_path}
    assert encrypt("remove", "exact", "--keyfile", "key", "-q", **how) == ""
    assert (tmp_path / "again.tensors").read_bytes() == some_file.read_bytes()


def test_encrypting_a_file_with_a_passphrase(some_file, tmp_path):
    (tmp_path / "words").write_text("a passphrase\n")
    salt = "000102030405060708090a0b0c0d0e0f"
    limits = ("--opslimit", "min", "--memlimit", "1000000", "--salt", salt)
    printed = encrypt("add", "pwhash", "--keyfile", "words", *limits, "-q", cwd=tmp_path)
    assert printed == f"salt: {salt}\n"
    key = DecryptionParams.from_string("a passphrase")
    assert same_as(tmp_path / "sealed.tensors", some_file, encryption=key)
    how = {"infile": "sealed.tensors", "outfile": "again.tensors", "cwd": tmp_path}
    encrypt("remove", "pwhash", "--keyfile", "words", **how)
    assert (tmp_path / "again.tensors").read_bytes() == some_file.read_bytes()


def test_a_wrong_key_leaves_no_file(some_file, tmp_path):
    (tmp_path / "key").write_bytes(bytes(32))
    (tmp_path / "wrong").write_bytes(bytes(31) + b"\1")
    encrypt("add", "exact", "--keyfile", "key", cwd=tmp_path)
    how = {"infile": "sealed.tensors", "outfile": "again.tensors", "cwd": tmp_path, "fails": True}
    assert "CryptographyError" in encrypt("remove", "exact", "--keyfile", "wrong", **how)
    assert not (tmp_path / "again.tensors").exists()
    assert "are the same" in encrypt(
        "add", "exact", "--keyfile", "key", outfile="plain.tensors", cwd=tmp_path, fails=True
    )


def test_measuring_numbers_of_readers(some_file, nginx, tmp_path):
    (nginx.root / "f.tensors").write_bytes(some_file.read_bytes())
    size = tensorizer.info(some_file).total_tensor_bytes
    for address in (some_file, f"{nginx.http}/f.tensors"):
        args = (address, "--readers", 1, 2, 0, "--iterations", 2, "--json")
        lines = run("benchmark_buffer_size.py", *args, cwd=tmp_path).splitlines()
        found = [json.loads(line) for line in lines]
        assert [one["readers"] for one in found] == [1, 2, 0]
        assert all(one["bytes"] == size and len(one["seconds"]) == 2 for one in found)
        assert found[0]["used"] == 1 and found[0]["fallbacks"] == []
    printed = run("benchmark_buffer_size.py", some_file, "--readers", 1, 0, cwd=tmp_path)
    assert len(printed.splitlines()) == 2 and "as many as help" in printed


def test_saving_in_another_process(tmp_path):
    printed = run("subprocess_saving.py", cwd=tmp_path)
    assert "the state of step 10 is in checkpoint.tensors" in printed
    assert int(printed.split(";")[1].split()[0]) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.tensors"]
    shapes = {
        name: tuple(t.shape) for name, t in tensorizer.load(tmp_path / "checkpoint.tensors").items()
    }
    assert shapes == {
        "0.weight": (256, 256),
        "0.bias": (256,),
        "2.weight": (4, 256),
        "2.bias": (4,),
    }


def test_a_checkpoint_of_several_processes(tmp_path):
    printed = run("dcp.py", "folder", "--ranks", 2, "--load-ranks", 3, cwd=tmp_path)
    assert "3 ranks have loaded 4 tensors of step 100" in printed
    assert "one process has loaded a tensor of it" in printed
    files = sorted(path.name.split("-")[0] for path in (tmp_path / "folder").iterdir())
    assert files == ["checkpoint.json", "rank", "rank"]
    torch.manual_seed(0)
    weight = torch.nn.Linear(64, 48).weight
    parts = [tensorizer.load(path, "cpu") for path in sorted((tmp_path / "folder").glob("rank-*"))]
    found = [tensor for part in parts for name, tensor in part.items() if "0.weight" in name]
    assert_same(torch.cat(found), weight.detach())
