"""Indexes of shards that lie, lead elsewhere or are none."""

import json
import os
import random
import threading

import pytest
import tensorizer
import torch
from packing import feeding, info, pack
from processes import run_python
from safetensors.torch import save_file
from servers import Nginx
from tensorizer import FormatError, TensorDeserializer

ops = torch.ops.tensorizer

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """Two shards, and a file beside their folder that no index may lead to."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "1.safetensors")
    save_file({"b": torch.ones(3)}, folder / "2.safetensors")
    save_file({"secret": torch.ones(4)}, tmp_path / "secret.safetensors")
    return folder


def write_index(folder, weight_map=None, text=None):
    path = folder / INDEX
    if text is None:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(path, said, error=FormatError, names=None, lazily=TensorDeserializer):
    """All calls raise the same error, with the file and the defect."""
    for call in (
        lambda: tensorizer.load(path, "cpu"),
        lambda: lazily(path, "cpu", lazy_load=True),
        lambda: tensorizer.load(path.parent, "cpu"),
    ):
        with pytest.raises(error, match=said) as info:
            call()
        assert str(names or path) in str(info.value)
        assert len(str(info.value)) < 1000
        assert "defect" not in str(info.value)
    with pytest.raises(RuntimeError, match=said):
        ops.load(str(path))


def refused_shards(path, said, **given):
    """A lazily opened file opens its shards where they are asked for."""
    refused(
        path, said, lazily=lambda *args, **kwds: len(TensorDeserializer(*args, **kwds)), **given
    )


OUTSIDE = ["../secret.safetensors", "../model/1.safetensors", "x/../../secret.safetensors", "..",
           "x/..", "a/../1.safetensors", "./1.safetensors", ".", "/etc/passwd", "//1.safetensors",
           "x//1.safetensors", "1.safetensors/", "/", "", "C:\\x.safetensors", "C:x.safetensors",
           "..\\secret.safetensors", "http://127.0.0.1:1/x.safetensors", "file:///etc/passwd",
           "s3://bucket/key", "//host/share", "1.safetensors\0", "\0", "1.safetensors?x=1",
           "1.safetensors#x", "%2e%2e/secret.safetensors", "1%2esafetensors",
           ".\t./secret.safetensors", ".\n./secret.safetensors", "\r..", "1.safetensors\x1b[2J",
           "x" * 300, "x/" * 3_000 + "x"]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE, ids=lambda name: ascii(name[:40]))
def test_names_that_lead_elsewhere(folder, name):
    (folder / "x").mkdir()
    path = write_index(folder, {"a": "1.safetensors", "secret": name})
    if len(name) >= 300:
        with pytest.raises((FormatError, OSError)):
            tensorizer.load(path, "cpu")
        return
    refused(path, "the index of shards: the file name")
    with pytest.raises(FormatError) as info:
        tensorizer.load(path, "cpu")
    assert str(info.value).isprintable()


@pytest.fixture(scope="module")
def nginx(tmp_path_factory):
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    (server.root / "model").mkdir()
    save_file({"a": torch.ones(2)}, server.root / "model/1.safetensors")
    save_file({"secret": torch.ones(4)}, server.root / "secret.safetensors")
    yield server
    server.stop()


@pytest.mark.parametrize("name", OUTSIDE, ids=lambda name: ascii(name[:40]))
def test_names_that_lead_elsewhere_on_a_server(nginx, name, no_settings_of_the_machine):
    write_index(nginx.root / "model", {"a": "1.safetensors", "secret": name})
    before = len((nginx.folder / "access.log").read_text().splitlines())
    with pytest.raises((FormatError, OSError)):
        tensorizer.load(f"{nginx.http}/model/{INDEX}", "cpu")
    asked = (nginx.folder / "access.log").read_text().splitlines()[before:]
    assert all("/model/" in line and "secret" not in line for line in asked)


def test_a_missing_shard(folder, nginx, no_settings_of_the_machine):
    path = write_index(folder, {"a": "1.safetensors", "b": "gone.safetensors"})
    with pytest.raises(FileNotFoundError, match="model/gone.safetensors"):
        tensorizer.load(path, "cpu")
    with pytest.raises(RuntimeError, match="model/gone.safetensors.*No such file"):
        ops.load(str(path))
    write_index(nginx.root / "model", {"a": "1.safetensors", "b": "gone.safetensors"})
    with pytest.raises(FileNotFoundError, match="model/gone.safetensors"):
        tensorizer.load(f"{nginx.http}/model/{INDEX}", "cpu")


@pytest.mark.parametrize("kind", ["index", "itself", "tensors", "zip", "empty", "text", "page"])
def test_shards_of_other_formats(folder, kind):
    shard = folder / "2.safetensors"
    shard.unlink()
    if kind == "index":
        shard.write_text(json.dumps({"weight_map": {"b": "1.safetensors"}}))
    elif kind == "tensors":
        tensorizer.save({"b": torch.ones(3)}, folder / "2.tensors")
        (folder / "2.tensors").rename(shard)
    elif kind == "zip":
        torch.save({"b": torch.ones(3)}, shard)
        path = write_index(folder, {"a": "1.safetensors", "b": shard.name})
        refused_shards(
            path, "files of several formats|looks like a checkpoint of torch.save", names=path
        )
        return
    elif kind != "itself":
        shard.write_text({"empty": "", "text": "hello", "page": "<html></html>"}[kind])
    name = INDEX if kind == "itself" else shard.name
    path = write_index(folder, {"a": "1.safetensors", "b": name})
    refused_shards(path, "expected a shard, of safetensors or torch.save", names=folder / name)


def test_shards_that_are_malformed(folder):
    path = write_index(folder, {"a": "1.safetensors", "b": "2.safetensors"})
    shard = folder / "2.safetensors"
    shard.write_bytes(pack({"b": info("U8", [5])}, b"1234"))
    refused_shards(path, "tensor `b`: expected 5 bytes", names=shard)
    shard.write_bytes(pack({"b": info()}, b"1234")[:-1])
    refused_shards(path, "truncated|end", names=shard)


def test_shards_that_are_no_files(folder):
    path = write_index(folder, {"a": "1.safetensors", "b": "2.safetensors"})
    shard = folder / "2.safetensors"
    shard.unlink()
    shard.mkdir()
    with pytest.raises(IsADirectoryError, match=str(shard)):
        tensorizer.load(path, "cpu")
    shard.rmdir()
    shard.symlink_to("2.safetensors")
    with pytest.raises(OSError, match="symbolic links"):
        tensorizer.load(path, "cpu")
    shard.unlink()
    os.mkfifo(shard)
    # A FIFO that no process writes to is not waited for.
    with pytest.raises((FormatError, OSError), match=str(shard)):
        tensorizer.load(path, "cpu")


def test_a_shard_without_its_indexed_tensor_is_refused(folder):
    path = write_index(folder, {"a": "1.safetensors", "c": "2.safetensors"})
    refused_shards(path, "expected tensor `c` in `2.safetensors`, which does not hold it")
    # In another shard than promised is not there either.
    path = write_index(folder, {"a": "2.safetensors", "b": "1.safetensors"})
    refused_shards(path, "expected tensor `[ab]` in `[12].safetensors`, which does not hold it")
    path = write_index(folder, {"a": "1.safetensors", "\x1b[2J\n": "2.safetensors"})
    refused_shards(path, r"expected tensor `\\x1b\[2J\\x0a`")
    path = write_index(folder, {"a": "1.safetensors", "x" * 5_000: "2.safetensors"})
    refused_shards(path, "expected tensor `xxx")


def test_a_tensor_in_two_shards_that_the_index_does_not_name(folder):
    for number in (1, 2):
        tensors = {str(number): torch.ones(1), "both": torch.ones(number)}
        save_file(tensors, folder / f"{number}.safetensors")
    path = write_index(folder, {"1": "1.safetensors", "2": "2.safetensors"})
    refused_shards(path, "tensor `both` is in two files, and the index does not say")


#: By the defect: the index, and a part of the message.
MALFORMED = {
    "nothing more": ("{", "EOF"),
    "an empty object": ("{}", "weight_map"),
    "no map": ('{"metadata":{}}', "weight_map"),
    "a message": ('{"error":"not found"}', 'no index of shards: .*"not found"'),
    "a map of null": ('{"weight_map":null}', "expected an object of strings"),
    "a map of a list": ('{"weight_map":[["a","1.safetensors"]]}', "expected an object of strings"),
    "an empty map": ('{"weight_map":{}}', "it names no tensors"),
    "a map of numbers": ('{"weight_map":{"a":1}}', "invalid type"),
    "a map of null in it": ('{"weight_map":{"a":null}}', "invalid type"),
    "two maps": ('{"weight_map":{"a":"1.safetensors"},"weight_map":{"a":"1.safetensors"}}', "dupl"),
    "two metadata": ('{"metadata":{},"metadata":{},"weight_map":{"a":"1.safetensors"}}', "dupl"),
    "a tensor twice": ('{"weight_map":{"a":"1.safetensors","a":"2.safetensors"}}', "`a` comes"),
    "a tensor twice, the same": (
        '{"weight_map":{"a":"1.safetensors","\\u0061":"1.safetensors"}}', "`a` comes twice"),
    "metadata of a list": ('{"metadata":[],"weight_map":{"a":"1.safetensors"}}', "invalid type"),
    "garbage behind": ('{"weight_map":{"a":"1.safetensors"}}x', "trailing characters"),
    "zeros behind": ('{"weight_map":{"a":"1.safetensors"}}\0', "trailing characters"),
    "another behind": ('{"weight_map":{"a":"1.safetensors"}}{}', "trailing characters"),
    "cut off": ('{"weight_map":{"a":"1.safetensors"}', "EOF"),
    "not UTF-8": (b'{"weight_map":{"a\xff":"1.safetensors"}}', "UTF-8|unicode"),
    "not UTF-8 in what is ignored": (b'{"x":"\xff","weight_map":{"a":"1.safetensors"}}',
                                     "UTF-8|unicode"),
    "surrogates": ('{"weight_map":{"\\ud800":"1.safetensors"}}', "hex escape"),
    "a configuration": ('{"architectures":["LlamaForCausalLM"],"hidden_size":4096}', "weight_map"),
    "depth": ('{"metadata":{"a":' + "[" * 10_000 + "]" * 10_000 + "}}", "recursion"),
    "depth in the map": ('{"weight_map":' * 10_000, "expected a string|recursion|invalid type"),
    "a long string": ('{"weight_map":"' + "a" * 5_000 + '"}', "invalid type"),
    "a long shard name": ('{"weight_map":{"a":"../' + "a" * 5_000 + '"}}', "the file name"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(folder, case):
    text, said = MALFORMED[case]
    refused(write_index(folder, text=text), said)


def test_a_configuration_is_no_index(folder):
    config = {"architectures": ["X"], "hidden_size": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    with pytest.raises(FormatError, match="weight_map.*no index of shards.*config.json"):
        tensorizer.load(folder / "config.json", "cpu")
    (folder / "list.json").write_text("[1]")
    with pytest.raises(FormatError, match="no format that tensorizer reads"):
        tensorizer.load(folder / "list.json", "cpu")


def test_an_index_that_is_too_long(folder):
    path = write_index(folder, {"a": "1.safetensors"})
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    refused(path, "an index of shards of at most 100000000 bytes, found 1099511627776")


def test_an_index_from_a_pipe(folder):
    path = write_index(folder, {"a": "1.safetensors", "b": "2.safetensors"})
    with feeding(path.read_bytes()) as number:
        with pytest.raises(NotImplementedError, match="pass the path or address of the index"):
            tensorizer.load(number, "cpu")


BOMB = """
import sys, tensorizer
def measured(what):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(what)) << 10
for source in sys.argv[1:] or [0]:
    open("/proc/self/clear_refs", "w").write("5")
    before = measured("VmRSS")
    try:
        tensorizer.load(source, "cpu")
        outcome = "loaded"
    except tensorizer.FormatError as error:
        outcome = "refused" if len(str(error)) < 1000 else "refused at length"
    except FileNotFoundError:
        outcome = "missing"
    print(outcome, measured("VmHWM") - before, sep=",")
"""


def test_bombs_take_bounded_memory(folder):
    many = ",".join(f'"{number}":"1.safetensors"' for number in range(200_000))
    shards = ",".join(f'"{number}":"{number}.st"' for number in range(200_000))
    bombs = {
        "tensors": ('{"weight_map":{' + many + "}}", "refused", 25),
        "shards": ('{"weight_map":{' + shards + "}}", "missing", 60),
        "lists": ('{"metadata":' + "[" * 4_000_000, "refused", 4),
        "a string": ('{"weight_map":"' + "a" * 4_000_000 + '"}', "refused", 4),
        "objects": ('{"x":[' + "{}," * 1_500_000 + '{}],"weight_map":{"a":"1.safetensors"}}',
                    "loaded", 4),
        "values": ('{"metadata":{"x":[' + "1," * 1_500_000 + '1]},"weight_map":{"a":'
                   '"1.safetensors"}}', "loaded", 30),
    }  # fmt: skip
    for name, (text, _, _) in bombs.items():
        (folder / name).write_text(text)
    done = run_python(BOMB, *(folder / name for name in bombs), timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {}
    for name, line in zip(bombs, done.stdout.splitlines(), strict=True):
        outcome, growth = line.split(",")
        text, expected, most = bombs[name]
        if outcome != expected or int(growth) > most * len(text) + (8 << 20):
            found[name] = (outcome, int(growth) / len(text))
    assert not found


def test_an_endless_index_in_a_pipe():
    """It is refused where it is too long, and nothing is left running."""
    step = b'{"x":' + b" " * (1 << 20)
    reading, writing = os.pipe()

    def feed():
        with os.fdopen(writing, "wb") as file:
            try:
                while True:
                    file.write(step)
            except BrokenPipeError:
                pass

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        with pytest.raises(FormatError, match="at most 100000000 bytes, found more"):
            tensorizer.load(reading, "cpu")
    finally:
        os.close(reading)
        thread.join()


def test_mutated_indexes(folder):
    """Typed errors, or tensors of the folder."""
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    text = json.dumps({"metadata": {"total_size": 20}, "weight_map": weight_map})
    pieces = [b'"', b"{", b"}", b",", b":", b"../", b"/", b"\\", b"\0", b"\xff", b"null", b"1e9",
              b"[", b"]", b"a", b"secret", b".safetensors", b'"a":"2.safetensors",',
              b" "]  # fmt: skip
    rng = random.Random(18)
    outcomes = {"loaded": 0, "refused": 0}
    for _ in range(1_000):
        data = bytearray(text.encode())
        for _ in range(rng.randint(1, 3)):
            at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
            if rng.random() < 0.5:
                data[at : min(end, at + 4)] = rng.choice(pieces)
            else:
                data[at:at] = data[at : min(end, at + 30)]
        path = write_index(folder, text=bytes(data))
        try:
            loaded = tensorizer.load(path, "cpu")
        except (FormatError, OSError) as error:
            assert "defect" not in str(error)
            outcomes["refused"] += 1
        else:
            assert "secret" not in loaded
            outcomes["loaded"] += 1
    assert min(outcomes.values()) > 50, outcomes
