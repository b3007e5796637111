"""torch.save and torch.load inside tensorizer_saving() and tensorizer_loading()."""

import asyncio
import functools
import inspect
import io
import logging
import os
import pickle
import threading
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from conftest import assert_same, files
from pairs import assert_state, load, save, state
from tensorizer import TensorDeserializer
from tensorizer.serialization import HashMismatchError
from tensorizer.torch_compat import PairMismatchError, tensorizer_loading, tensorizer_saving

# Which file


def test_the_default_name(pair):
    assert sorted(p.name for p in pair.parent.iterdir()) == ["state.pt", "state.pt.tensors"]
    assert_state(load(pair))
    with TensorDeserializer(f"{pair}.tensors", device="cpu") as file:
        assert all(tensor.dtype == torch.uint8 for tensor in file.values())
        # base, parameter, half, eight, wide, bits, complex and the two of the list.
        assert len(file) == 9


def test_names_of_file_objects(tmp_path):
    path = tmp_path / "object.pt"
    with path.open("wb") as file:
        save(state(), file)
        # The file object stays open: the caller may write more.
        file.write(b"more")
    assert Path(f"{path}.tensors").exists()
    assert path.read_bytes().endswith(b"more")
    with path.open("rb+") as file:
        file.seek(-4, os.SEEK_END)
        file.truncate()
    with path.open("rb") as file:
        assert_state(load(file))


def test_files_without_a_name(tmp_path, caplog):
    buffer = io.BytesIO()
    with caplog.at_level(logging.WARNING, "tensorizer.torch_compat"):
        save(state(), buffer)
    assert "BytesIO" in caplog.text
    buffer.seek(0)
    assert_state(torch.load(buffer))  # torch's own format
    buffer.seek(0)
    assert_state(load(buffer))
    with (tmp_path / "f").open("wb") as file, os.fdopen(os.dup(file.fileno()), "wb") as unnamed:
        with pytest.raises(TypeError, match="no name"):
            save(state(), unnamed)
        save(state(), unnamed, file_obj=tmp_path / "named.tensors")
    assert_state(load(tmp_path / "f", {"file_obj": str(tmp_path / "named.tensors")}))


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_a_fixed_file(tmp_path, kind):
    side = kind(str(tmp_path / "else where.tensors"))
    save(state(), tmp_path / "a.pt", file_obj=side)
    assert not (tmp_path / "a.pt.tensors").exists()
    assert_state(load(tmp_path / "a.pt", {"file_obj": side}))


def test_a_fixed_file_object(tmp_path):
    with (tmp_path / "side").open("wb+") as side:
        save(state(), tmp_path / "a.pt", file_obj=side)
    with (tmp_path / "side").open("rb") as side:
        assert_state(load(tmp_path / "a.pt", {"file_obj": side}))


def test_a_function_names_the_file(tmp_path):
    asked = []

    def name(target):
        asked.append(target)
        return None if "plain" in str(target) else tmp_path / f"{target.stem}.side"

    with tensorizer_saving(name):
        torch.save(state(), tmp_path / "a.pt")
        torch.save(state(), tmp_path / "b.pt")
        torch.save(state(), tmp_path / "plain.pt")
    assert asked == [tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "plain.pt"]
    assert (tmp_path / "b.side").exists()
    assert_state(torch.load(tmp_path / "plain.pt"))
    for file in ("a.pt", "b.pt", "plain.pt"):
        assert_state(load(tmp_path / file, {"file_obj": name}))
    with pytest.raises(PairMismatchError, match=r"a\.pt"):
        load(tmp_path / "a.pt", {"file_obj": lambda target: None})


def test_an_object_without_storages_has_no_second_file(tmp_path):
    save({"x": 1, "empty": torch.empty(0)}, tmp_path / "a.pt")
    assert not (tmp_path / "a.pt.tensors").exists()
    assert load(tmp_path / "a.pt")["x"] == 1
    assert torch.load(tmp_path / "a.pt")["x"] == 1


def test_ordinary_files_load_in_a_block(tmp_path):
    torch.save(state(), tmp_path / "a.pt")
    assert_state(load(tmp_path / "a.pt"))
    script = torch.jit.script(torch.nn.Linear(2, 3))
    torch.jit.save(script, tmp_path / "script.pt")
    with pytest.warns(UserWarning, match="TorchScript"):
        assert load(tmp_path / "script.pt", weights_only=False)(torch.ones(2)).shape == (3,)


def test_several_objects_and_one_file(tmp_path):
    side = tmp_path / "one.tensors"
    with tensorizer_saving(side):
        torch.save(state(), tmp_path / "a.pt")
        with pytest.raises(ValueError, match=r"b\.pt.*would overwrite.*lambda"):
            torch.save(state(), tmp_path / "b.pt")
        assert not (tmp_path / "b.pt").exists()
        torch.save({"again": torch.ones(1)}, tmp_path / "a.pt")
    assert load(tmp_path / "a.pt", {"file_obj": side})["again"].item() == 1
    with pytest.raises(ValueError, match="cannot hold both"):
        save(state(), side, file_obj=side)
    with (tmp_path / "two.pt").open("wb") as file, tensorizer_saving():
        torch.save(state(), file)
        with pytest.raises(ValueError, match="would overwrite"):
            torch.save(state(), file)


# Objects that are saved and loaded


STORAGES = {
    "typed": lambda: torch.arange(4.0).storage(),
    "untyped": lambda: torch.arange(4, dtype=torch.uint8).untyped_storage(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "per channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.quint8
    ),
    "expanded": lambda: torch.ones(1).expand(4),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "bool": lambda: torch.tensor([True, False]),
    "attributes": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "ordered": lambda: OrderedDict(a=torch.ones(1)),
}


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_storage(tmp_path, name):
    value = STORAGES[name]()
    torch.save(value, tmp_path / "plain.pt")
    save(value, tmp_path / "ours.pt")
    assert (tmp_path / "ours.pt.tensors").exists()
    expected = torch.load(tmp_path / "plain.pt", weights_only=False)
    found = load(tmp_path / "ours.pt", weights_only=False)
    assert type(found) is type(expected)
    assert pickle.dumps(str(found)) == pickle.dumps(str(expected))


def test_storages_of_equal_size_stay_apart(tmp_path):
    # Storages that torch makes while it pickles must not reuse each other's address.
    values = [torch.eye(5).to_sparse() * i for i in range(20)]
    save(values, tmp_path / "f.pt")
    for i, value in enumerate(load(tmp_path / "f.pt")):
        assert torch.equal(value.to_dense(), torch.eye(5) * i)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("protocol", [2, 3])
def test_arguments_by_position(tmp_path, protocol, weights_only):
    path = tmp_path / "f.pt"
    with tensorizer_saving():
        torch.save(state(), path, pickle, protocol, True)
    with tensorizer_loading(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about protocol 3
        assert_state(torch.load(path, "cpu", None, weights_only=weights_only))


@pytest.mark.parametrize("weights_only", [True, False])
def test_the_legacy_format(tmp_path, weights_only):
    expected = state()
    del expected["meta"]
    path = tmp_path / "f.pt"
    with tensorizer_saving():
        torch.save(expected, path, _use_new_zipfile_serialization=False)
    assert_state(load(path, weights_only=weights_only), expected)


def test_the_same_object_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save(state(), tmp_path / name / "f.pt")
    for file in ("f.pt", "f.pt.tensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_fake_tensors_and_skipped_data(pair):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = load(pair)
    assert type(fake["base"]).__name__ == "FakeTensor"
    assert fake["base"].shape == (24,)
    with torch.serialization.skip_data():
        skipped = load(pair)
        save(state(), pair.parent / "skipped.pt")
    assert skipped["transposed"].stride() == (1, 6)
    assert not (pair.parent / "skipped.pt.tensors").exists()


# map_location, devices, mmap


def test_map_location(pair):
    on_meta = load(pair, map_location="meta")
    assert on_meta["base"].device.type == on_meta["half"].device.type == "meta"
    assert on_meta["base"].shape == (24,)
    assert load(pair, map_location=torch.device("meta"))["base"].device.type == "meta"
    assert load(pair, map_location={"cpu": "meta"})["base"].device.type == "meta"
    assert_state(load(pair, map_location={"cuda:0": "meta"}))
    assert_state(load(pair, map_location="cpu"))
    # torch's argument has precedence over that of the block.
    assert_state(load(pair, {"device": "meta"}, map_location="cpu"))
    assert load(pair, {"device": "meta"})["base"].device.type == "meta"


def test_map_location_by_a_function(pair):
    calls = []

    def move(storage, location):
        calls.append((location, bytes(storage.tolist()[:4])))
        return storage if storage.nbytes() > 20 else None

    assert_state(load(pair, map_location=move))
    # Empty ones and those on meta are torch's own.
    ours = [call for call in calls if call[1]]
    assert ("cpu", bytes(4)) in ours
    assert len(ours) == 9


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_a_device_that_is_not_there(pair):
    for block, kwargs in (({}, {"map_location": "cuda"}), ({"device": "cuda"}, {})):
        with pytest.raises(RuntimeError, match="CUDA"):
            load(pair, block, **kwargs)


def test_storages_are_mapped_where_torch_is_asked_to(tmp_path):
    path = tmp_path / "f.pt"
    save({"large": torch.arange(1 << 20)}, path)

    def is_mapped(tensor):
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(n, 16) for n in line.split()[0].split("-"))
            if start <= tensor.data_ptr() < end:
                return line.endswith("f.pt.tensors")
        raise AssertionError("no mapping has the tensor")

    for mmap, block, expected in (
        (True, {}, True),
        (None, {}, False),
        (False, {}, False),
        (None, {"mmap": True}, True),
    ):
        large = load(path, block, mmap=mmap)["large"]
        assert is_mapped(large) == expected
        assert_same(large, torch.arange(1 << 20))
        large += 1  # a private mapping: the file stays as it is
    with pytest.raises(ValueError, match="must be a file path"), path.open("rb") as file:
        load(file, mmap=True)


def test_options_reach_the_reader(pair):
    side = Path(f"{pair}.tensors")
    data = bytearray(side.read_bytes())
    data[-20] ^= 1
    side.write_bytes(data)
    with pytest.raises(HashMismatchError):
        load(pair, {"verify_hash": True})
    for name, value in (("dtype", torch.float16), ("filter_func", bool)):
        with pytest.raises(ValueError, match=name):
            load(pair, {name: value})
    calls = []
    load(pair, {"progress": lambda done, total: calls.append((done, total))})
    assert calls
    assert calls[-1][0] == calls[-1][1] > 0


@pytest.mark.parametrize(
    ("block", "options", "message"),
    [
        (tensorizer_saving, {"hashs": "all"}, r"tensorizer_saving\(\).*'hashs'.*'hashes'"),
        (tensorizer_saving, {"verify_hash": True}, "TensorSerializer does not have"),
        (tensorizer_saving, {"hashes": "sha"}, "hashes must be 'all' or 'crc32'"),
        (tensorizer_saving, {"alignment": 3}, "alignment must be a power of two"),
        (tensorizer_saving, {"encryption": b"key"}, "encryption must be EncryptionParams"),
        (tensorizer_saving, {"limit_cpu_concurrency": 0}, "at least 1"),
        (tensorizer_saving, {"metadata": {"a": 1}}, "metadata must be a dict of strings"),
        (tensorizer_saving, {"memory_limit": -1}, "memory_limit must be a positive number"),
        (tensorizer_saving, {"file_obj": "hf://a/b"}, "can only be opened for reading"),
        (tensorizer_loading, {"verify_hsh": 1}, r"tensorizer_loading\(\).*'verify_hash'"),
        (tensorizer_loading, {"verify_hash": "sha"}, "verify_hash must be a bool or 'crc32'"),
        (tensorizer_loading, {"num_readers": 0}, "num_readers must be at least 1"),
        (tensorizer_loading, {"encryption": b"key"}, "encryption must be DecryptionParams"),
        (tensorizer_loading, {"memory_limit": 0}, "memory_limit must be a positive number"),
        (tensorizer_loading, {"cache_dir": 5}, "cache_dir must be the path of a folder"),
        (tensorizer_loading, {"progress": 5}, "progress must be a bool or callable"),
        (tensorizer_loading, {"device": "gpu"}, "there is no device 'gpu'"),
    ],
)
def test_options_are_checked_where_they_are_given(block, options, message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        block(**options)


def test_options_of_the_callers_function_are_its_own(tmp_path):
    kept = []
    with tensorizer_saving(save_func=lambda _, tensors, options: kept.append(options), mine=1):
        torch.save(state(), tmp_path / "a")
    assert kept == [{"mine": 1}]
    tensorizer_loading(load_func=lambda _, options: [], mine=1)


# Blocks


def test_nesting(tmp_path):
    with tensorizer_saving(lambda f: f"{f}.outer"):
        with tensorizer_saving(lambda f: f"{f}.inner"):
            torch.save(state(), tmp_path / "a")
        torch.save(state(), tmp_path / "b")
    torch.save(state(), tmp_path / "c")
    assert sorted(files(tmp_path)) == ["a", "a.inner", "b", "b.outer", "c"]
    with tensorizer_loading(lambda f: f"{f}.outer"):
        with tensorizer_loading(lambda f: f"{f}.inner"):
            assert_state(torch.load(tmp_path / "a"))
        assert_state(torch.load(tmp_path / "b"))
    assert_state(torch.load(tmp_path / "c"))


def test_decorators(tmp_path):
    @tensorizer_saving(tmp_path / "side")
    def write(name):
        torch.save(state(), tmp_path / name)

    @tensorizer_loading(tmp_path / "side")
    def read(name):
        return torch.load(tmp_path / name)

    write("a")
    write("b")  # another block: the first one's storages are replaced
    assert_state(read("b"))


def test_decorators_without_brackets_are_refused(tmp_path):
    def name(file):
        return f"{file}.side"

    for block in (tensorizer_saving, tensorizer_loading):
        message = rf"write @{block.__name__}\(\) above the function"
        with pytest.raises(TypeError, match=message + " 'bare'"):

            @block
            def bare(config):
                raise AssertionError(config)

        with pytest.raises(TypeError, match=message + " 'method'"):

            class _Trainer:
                @block
                @staticmethod
                def method():
                    raise AssertionError

        for config in ({"lr": 1}, torch.nn.Linear(1, 1)):
            with pytest.raises(TypeError, match=rf"write @{block.__name__}\(\) with brackets"):
                block(name)(config)
        with pytest.raises(TypeError, match="with brackets"):
            block(name)()

        async def later():
            raise AssertionError

        def parts():
            yield

        for function in (later, parts):
            with pytest.raises(TypeError, match="whose code runs after the call: use `with"):
                block()(function)

    # Functions that name files stay what they were.
    for file_obj in (name, lambda file: f"{file}.side", functools.partial("{}.side".format)):
        tensorizer_saving(file_obj)(torch.save)(state(), tmp_path / "a")
        with tensorizer_loading(file_obj):
            assert_state(torch.load(tmp_path / "a"))


def test_blocks_restore_the_functions_of_torch(tmp_path):
    before = torch.save, torch.load, torch.serialization._weights_only_unpickler
    with pytest.raises(ZeroDivisionError), tensorizer_saving(), tensorizer_loading():
        assert torch.save is not before[0]
        assert torch.save.__doc__ == before[0].__doc__
        captured = torch.save
        torch.save = None
        _ = 1 / 0
    assert before == (torch.save, torch.load, torch.serialization._weights_only_unpickler)
    captured(state(), tmp_path / "later.pt")
    assert_state(torch.load(tmp_path / "later.pt"))


def test_parameters_are_those_of_torch():
    functions = torch.save, torch.load
    shown = [inspect.signature(function) for function in functions]
    assert list(shown[0].parameters)[:3] == ["obj", "f", "pickle_module"]
    assert list(shown[1].parameters)[:3] == ["f", "map_location", "pickle_module"]
    with tensorizer_saving(), tensorizer_loading():
        for function, before, signature in zip(
            (torch.save, torch.load), functions, shown, strict=True
        ):
            assert function is not before
            for follow in (False, True):
                assert inspect.signature(function, follow_wrapped=follow) == signature


def test_other_threads_and_tasks_are_left_alone(tmp_path):
    def work(name):
        torch.save(state(), tmp_path / name)
        assert_state(torch.load(tmp_path / name))

    with tensorizer_saving(), tensorizer_loading():
        thread = threading.Thread(target=work, args=("thread",))
        thread.start()
        thread.join()
    assert (tmp_path / "thread").exists()
    assert not (tmp_path / "thread.tensors").exists()

    async def main():
        inside, outside = asyncio.Event(), asyncio.Event()

        async def one():
            with tensorizer_saving():
                inside.set()
                await outside.wait()
                torch.save(state(), tmp_path / "one")

        async def two():
            await inside.wait()
            torch.save(state(), tmp_path / "two")
            outside.set()

        await asyncio.gather(one(), two())

    asyncio.run(main())
    assert (tmp_path / "one.tensors").exists()
    assert not (tmp_path / "two.tensors").exists()


def test_blocks_of_several_threads(tmp_path):
    before = torch.save, torch.load
    failed = []

    def work(number):
        try:
            for turn in range(10):
                path = tmp_path / f"{number}.{turn}.pt"
                with tensorizer_saving(lambda file: f"{file}.{number}"):
                    torch.save({"a": torch.full((100,), number)}, path)
                with tensorizer_loading(lambda file: f"{file}.{number}"):
                    assert torch.load(path)["a"].tolist() == [number] * 100
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(files(tmp_path)) == 80
    assert before == (torch.save, torch.load)
