"""The examples in Python run as programs, and do what they say."""

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import time
import urllib.request

import pytest
import tensorizer
import torch
from conftest import ROOT, assert_same
from processes import SCRIPT, run_python, start_python
from servers import free_port
from tensorizer import CryptographyError, DecryptionParams, HashMismatchError, TensorDeserializer

pytestmark = pytest.mark.long

EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run an example in this process, which imports transformers once; return what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def start(name, *args, cwd):
    """Run an example in a process of its own; return what it prints."""
    done = run_python(SCRIPT, EXAMPLES / name, *args, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def small_model(run):
    """The model that the examples make without a network."""
    if importlib.util.find_spec("transformers") is None:
        if os.environ.get("CI"):
            pytest.fail("transformers is required in CI")
        pytest.skip("transformers is not installed")
    config = importlib.import_module("small_model").config_of(None)
    torch.manual_seed(0)
    return importlib.import_module("transformers").GPT2LMHeadModel(config).eval()


def tensors_of(model):
    """Return its parameters by name, those that are tied under each of their names."""
    return dict(model.named_parameters(remove_duplicate=False))


def answer(model):
    tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)
    return str(tokens[0].tolist())


def assert_holds(path, tensors, **how):
    """Compare the tensors of a file, bit by bit, with those that it is to have."""
    with TensorDeserializer(path, "cpu", verify_hash=True, **how) as file:
        assert list(file) == list(tensors)
        for name, tensor in tensors.items():
            assert_same(file[name].detach(), tensor.detach())


def test_every_example_is_run():
    here = (ROOT / "tests/python/test_examples.py").read_text()
    programs = {path.name for path in EXAMPLES.glob("*.py")} - {"small_model.py"}
    assert len(programs) == 10
    assert [name for name in programs if f'"{name}"' not in here] == []
    listed = (EXAMPLES / "README.md").read_text()
    for name in programs:
        said = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())).splitlines()[0]
        assert f"| [`{name}`]({name}) | {said} |" in listed
    # The others: a server, and a program in Rust.
    assert "examples/cpp-server" in (ROOT / "tests/python/test_cpp.py").read_text()
    assert "examples/tch" in (ROOT / "Makefile").read_text()


def test_saving_and_loading_a_model(small_model, run, tmp_path):
    assert run("serialize.py") == "saved 547.8 KB to model.tensors\n"
    assert_holds(tmp_path / "model.tensors", tensors_of(small_model))
    assert run("deserialize-simple.py").splitlines()[-1] == answer(small_model)
    options = ("--verify-hash", "--num-readers", 2, "--device", "cpu")
    lines = run("deserialize.py", "model.tensors", *options).splitlines()
    assert lines[0].startswith("loaded 29 tensors, 547.8 KB to cpu in ")
    assert lines[-2].startswith("seconds of its threads: ") and "hash" in lines[-2]
    assert lines[-1] == answer(small_model)


def test_a_changed_byte_is_found(small_model, run, tmp_path):
    run("serialize.py")
    with open(tmp_path / "model.tensors", "r+b") as file:
        file.seek(-10, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-10, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    run("deserialize.py")
    with pytest.raises(HashMismatchError):
        run("deserialize.py", "--verify")


def test_saving_to_s3_and_loading_from_there(small_model, run, s3, tmp_path):
    uri = "s3://bucket/examples/model.tensors"
    assert run("serialize.py", uri) == f"saved 547.8 KB to {uri}\n"
    assert run("deserialize-simple.py", uri).splitlines()[-1] == answer(small_model)
    assert_holds(uri, tensors_of(small_model))
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_a_folder(small_model, run, tmp_path):
    """As for a name of the hub, which stands for such a folder."""
    small_model.half().save_pretrained(tmp_path / "folder")
    run("serialize.py", "--model", "folder")
    assert_holds(tmp_path / "model.tensors", tensors_of(small_model))


def test_models_of_transformers(small_model, run, tmp_path):
    small_model.config.save_pretrained(tmp_path / "folder")
    printed = run("hf_serialization.py", "folder", "out", "--validate")
    assert "the same 29 tensors, and the same answer" in printed
    config = json.loads((tmp_path / "out/model-config.json").read_text())
    assert config["model_type"] == "gpt2" and config["n_embd"] == 64

    small_model.half().save_pretrained(tmp_path / "folder")
    run("hf_serialization.py", "--model_type", "transformers", "folder", "out")
    assert_holds(tmp_path / "out/model.tensors", tensors_of(small_model))


def test_models_of_transformers_on_s3(small_model, run, s3, tmp_path):
    small_model.save_pretrained(tmp_path / "folder")
    printed = run("hf_serialization.py", "folder", "s3://bucket/hf/", "--validate")
    assert "the same 29 tensors, and the same answer" in printed
    there = s3.client().list_objects(Bucket="bucket", Prefix="hf/")["Contents"]
    assert {item["Key"] for item in there} == {"hf/model.tensors", "hf/model-config.json"}
    assert_holds("s3://bucket/hf/model.tensors", tensors_of(small_model))


def test_encryption(run, tmp_path):
    printed = run("encryption.py", tmp_path).splitlines()
    assert printed[0] == "loaded with the right key"
    assert printed[1].startswith("refused: ")
    assert printed[2:] == ["loaded with the passphrase"]
    key = DecryptionParams.from_string("correct horse battery staple")
    with TensorDeserializer(tmp_path / "sealed.tensors", "cpu", encryption=key) as file:
        assert file["0.weight"].shape == (512, 512)


@pytest.fixture
def plain(tmp_path):
    """A file of a module with tensors of several kinds."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30).bfloat16())
    with tensorizer.TensorSerializer(tmp_path / "plain.tensors") as serializer:
        serializer.write_module(model)
    return tmp_path / "plain.tensors"


@pytest.fixture
def encrypt(run):
    def encrypt(*args, infile="plain.tensors", outfile="sealed.tensors"):
        return run("encrypt_existing.py", *args, "--infile", infile, "--outfile", outfile)

    return encrypt


def kept(path, encryption=None):
    """Return what a file has besides bytes: modules, kinds and names."""
    with TensorDeserializer(path, "cpu", lazy_load=True, encryption=encryption) as file:
        return [tensor[:3] for tensor in file.read_tensors()]


def test_encrypting_a_file_with_a_new_key(plain, encrypt, tmp_path):
    assert len(encrypt("add", "random", "--keyfile", "key").splitlines()) == 7
    key = (tmp_path / "key").read_bytes()
    assert len(key) == 32 and (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    sealed, encryption = tmp_path / "sealed.tensors", DecryptionParams.from_key(key)
    assert_holds(sealed, tensorizer.load(plain, "cpu"), encryption=encryption)
    assert kept(sealed, encryption) == kept(plain)

    with pytest.raises(FileExistsError):
        encrypt("add", "random", "--keyfile", "key", outfile="other.tensors")
    assert (tmp_path / "key").read_bytes() == key

    how = {"infile": "sealed.tensors", "outfile": "again.tensors"}
    assert encrypt("remove", "exact", "--keyfile", "key", "-q", **how) == ""
    assert (tmp_path / "again.tensors").read_bytes() == plain.read_bytes()


def test_encrypting_a_file_with_a_passphrase(plain, encrypt, tmp_path):
    (tmp_path / "words").write_text("a passphrase-hu5hw0rd\n")
    salt = "000102030405060708090a0b0c0d0e0f"
    options = ("--opslimit", "min", "--memlimit", "1000000", "--salt", salt, "-q")
    assert encrypt("add", "pwhash", "--keyfile", "words", *options) == f"salt: {salt}\n"
    key = DecryptionParams.from_string("a passphrase-hu5hw0rd")
    assert_holds(tmp_path / "sealed.tensors", tensorizer.load(plain, "cpu"), encryption=key)
    encrypt("remove", "pwhash", "--keyfile", "words", infile="sealed.tensors", outfile="again")
    assert (tmp_path / "again").read_bytes() == plain.read_bytes()


def test_failed_encryption_or_decryption_leaves_no_file(plain, encrypt, capsys, tmp_path):
    (tmp_path / "key").write_bytes(bytes(32))
    (tmp_path / "wrong").write_bytes(bytes(31) + b"\1")
    encrypt("add", "exact", "--keyfile", "key")
    with pytest.raises(CryptographyError):
        encrypt("remove", "exact", "--keyfile", "wrong", infile="sealed.tensors", outfile="new")
    tensorizer.save({"list": [torch.ones(2)]}, tmp_path / "nested")
    with pytest.raises(SystemExit, match="tensorizer encrypt"):
        encrypt("add", "exact", "--keyfile", "key", infile="nested", outfile="new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(SystemExit):
        encrypt("add", "exact", "--keyfile", "key", outfile="plain.tensors")
    assert "are the same" in capsys.readouterr().err


def test_measuring_numbers_of_readers(plain, run, nginx):
    (nginx.root / "f.tensors").write_bytes(plain.read_bytes())
    size = sum(tensor.nbytes for tensor in tensorizer.load(plain, "cpu").values())
    for address in (plain, f"{nginx.http}/f.tensors"):
        options = ("--num-readers", 1, 2, 0, "--iterations", 2, "--device", "cpu", "--json")
        lines = run("benchmark_buffer_size.py", address, *options).splitlines()
        found = [json.loads(line) for line in lines]
        assert [one["readers"] for one in found] == [1, 2, 0]
        assert all(one["bytes"] == size and len(one["seconds"]) == 2 for one in found)
        assert found[0]["used"] == 1 and found[0]["fallbacks"] == []
    lines = run("benchmark_buffer_size.py", plain, "--num-readers", 1, 0).splitlines()
    assert len(lines) == 2 and "as many as help" in lines[1]


def test_saving_in_another_process(tmp_path):
    printed = start("subprocess_saving.py", cwd=tmp_path)
    assert printed.startswith("the state of step 10 is in checkpoint.tensors; ")
    assert int(printed.split(";")[1].split()[0]) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.tensors"]
    found = tensorizer.load(tmp_path / "checkpoint.tensors", "cpu", verify_hash=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    assert shapes == {
        "0.weight": (256, 256),
        "0.bias": (256,),
        "2.weight": (4, 256),
        "2.bias": (4,),
    }


def test_a_checkpoint_of_several_processes(tmp_path):
    ranks = ["--ranks", "2", "--load-ranks", "3"]
    printed = start("dcp.py", "folder", *ranks, cwd=tmp_path)
    assert "3 ranks have loaded 4 tensors of step 100" in printed
    assert "one process has loaded a tensor of it" in printed
    parts = sorted((tmp_path / "folder").glob("rank-*.tensors"))
    assert len(parts) == 2 and (tmp_path / "folder/checkpoint.json").exists()
    loaded = [tensorizer.load(part, "cpu") for part in parts]
    halves = [part[name] for part in loaded for name in part if name.startswith("model.0.weight")]
    torch.manual_seed(0)
    assert_same(torch.cat(halves), torch.nn.Linear(64, 48).weight.detach())


def test_the_exporter_for_prometheus(tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save({"weight": torch.ones(1000, 1000)}, path)
    port = free_port()
    with start_python(
        SCRIPT, EXAMPLES / "metrics.py", port, path, stdin=subprocess.PIPE, text=False
    ) as server:
        for _ in range(300):
            with contextlib.suppress(OSError):
                text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
                if "calls" in text and "running 0" in text:
                    break
            time.sleep(0.1)
        server.communicate(b"\n")
    found = dict(re.fullmatch(r"(\w+) ([\d.e+-]+)", line).groups() for line in text.splitlines())
    assert found["tensorizer_calls_total"] == "1" and found["tensorizer_errors_total"] == "0"
    assert found["tensorizer_bytes_total"] == str(4_000_000)
    assert found["tensorizer_running"] == "0"
