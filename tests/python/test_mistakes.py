"""Common mistakes: each gives an error that helps, or does what the caller meant."""

import inspect
import os
import re
import warnings

import pytest
import tensorizer
import tensorizer.transformers
import torch
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer.file import hints
from tensorizer.utils import no_init_or_tensor

KEY = EncryptionParams(bytes(range(32)))


def network(layers=1):
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files of one small module: plain, encrypted, and below a module of its own."""
    monkeypatch.chdir(tmp_path)
    state = network().state_dict()
    tensorizer.save(state, "m.tensors")
    tensorizer.save(state, "enc.tensors", encryption=KEY)
    tensorizer.save({f"model.{name}": one for name, one in state.items()}, "below.tensors")
    return state


def load_into(path, module, **options):
    return TensorDeserializer(path, "cpu").load_into_module(module, **options)


def save_module_as_mapping():
    with TensorSerializer("x.tensors") as file:
        file.write_module(network().state_dict())


def saved_module():
    with TensorSerializer("linear.tensors") as file:
        file.write_module(torch.nn.Linear(2, 2))
    return "linear.tensors"


def saved_as(ending):
    tensorizer.save({"a": torch.ones(1)}, f"one.{ending}")
    return f"one.{ending}"


MISTAKES = {
    "no key": (lambda: tensorizer.load("enc.tensors"), "pass encryption=DecryptionParams.from_key"),
    "no key for an operator": (
        lambda: torch.ops.tensorizer.load("enc.tensors"),
        r"pass the key of the file \(`key=` of the operators\)",
    ),
    "a key as bytes": (
        lambda: tensorizer.load("enc.tensors", encryption=bytes(32)),
        r"not bytes: DecryptionParams.from_key\(key\)",
    ),
    "a passphrase as a string": (
        lambda: tensorizer.load("enc.tensors", encryption="secret"),
        r"not str: DecryptionParams.from_string\(passphrase\)",
    ),
    "the key of encryption": (
        lambda: tensorizer.load("enc.tensors", encryption=KEY),
        r"DecryptionParams.from_key\(params.key\)",
    ),
    "the hub's name of a repository": (
        lambda: tensorizer.transformers.from_pretrained("Qwen/Qwen2-0.5B"),
        "hub would be hf://Qwen/Qwen2-0.5B",
    ),
    "a module that was built": (
        lambda: no_init_or_tensor(torch.nn.Linear(2, 2)),
        "takes a function that builds the module, such as lambda: Linear",
    ),
    "a name without the dot": (
        lambda: tensorizer.load(saved_module(), names=["weight"]),
        r"which has '.weight'.*load_into_module\(\) fills .*, and load_state_dict",
    ),
    "verification of another format": (
        lambda: tensorizer.load(saved_as("safetensors"), verify_hash=True),
        "compare the whole file with sha256=, or copy it to a .tensors file",
    ),
    "a pipe as a target": (
        lambda: tensorizer.save({"a": torch.ones(1)}, os.pipe()[1]),
        "found a pipe or a socket: `<descriptor",
    ),
    "device gpu": (lambda: tensorizer.load("m.tensors", "gpu"), "torch calls it 'cuda'"),
    "device gpu:1": (lambda: TensorDeserializer("m.tensors", "GPU:1"), "calls it 'cuda:1'"),
    "a dtype as the device": (
        lambda: tensorizer.load("m.tensors", torch.bfloat16),
        "dtype=torch.bfloat16 casts tensors",
    ),
    "dtype bf16": (
        lambda: tensorizer.load("m.tensors", dtype="bf16"),
        "torch calls it 'bfloat16'",
    ),
    "dtype flaot16": (
        lambda: tensorizer.load("m.tensors", dtype="flaot16"),
        "torch calls it 'float16'",
    ),
    "an unknown dtype": (
        lambda: tensorizer.load("m.tensors", dtype="q4_k_m"),
        "expected one such as 'bfloat16', 'float16'",
    ),
    "save with its arguments swapped": (
        lambda: tensorizer.save("x.tensors", network().state_dict()),
        r"save\(tensors, uri\) takes the tensors first",
    ),
    "save of a module": (
        lambda: tensorizer.save(network(), "x.tensors"),
        r"write_module takes modules; their state_dict\(\)",
    ),
    "write_module of a mapping": (save_module_as_mapping, "write_state_dict takes mappings"),
    "a repository of the hub": (
        lambda: tensorizer.load("Qwen/Qwen2-0.5B"),
        "a repository of the Hugging Face hub would be hf://Qwen/Qwen2-0.5B",
    ),
    "one slash": (lambda: tensorizer.load("s3:/bucket/x"), "two slashes: s3://bucket/x"),
    "names without their prefix": (
        lambda: tensorizer.load("below.tensors", names=["0.weight"]),
        "'model.0.weight': every name begins with 'model.'",
    ),
    "names with a prefix": (
        lambda: tensorizer.load("m.tensors", names=["module.0.weight"]),
        "has '0.weight', without 'module.'",
    ),
    "a name with a slip": (
        lambda: tensorizer.load("m.tensors", names=["0.weigth"]),
        "which has '0.weight'",
    ),
    "a file of a larger module": (
        lambda: load_into("below.tensors", network()),
        "every name of the file begins with 'model.'",
    ),
    "a file of a smaller module": (
        lambda: load_into("m.tensors", torch.nn.ModuleDict({"model": network()})),
        "every name of the module begins with 'model.'",
    ),
    "the class of a module": (
        lambda: load_into("m.tensors", torch.nn.Linear),
        "torch.nn.Module, not the class Linear",
    ),
    "a dict for a module": (
        lambda: load_into("m.tensors", {}),
        r"tensorizer.load\(uri\) returns a dict of tensors",
    ),
    "load of a module": (
        lambda: tensorizer.load(network()),
        r"TensorDeserializer\(uri\).load_into_module\(module\) fills a module",
    ),
    "verify_hash sha256": (
        lambda: tensorizer.load("m.tensors", verify_hash="sha256"),
        "True compares all hashes",
    ),
    "num_readers auto": (
        lambda: tensorizer.load("m.tensors", num_readers="auto"),
        "None chooses automatically",
    ),
    "memory_limit 1GB": (
        lambda: tensorizer.load("m.tensors", memory_limit="1GB"),
        "a number of bytes, such as 1_000_000_000",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_says_what_to_do(files, mistake):
    call, pattern = MISTAKES[mistake]
    with pytest.raises(Exception, match=pattern) as caught:
        call()
    assert len(str(caught.value)) < 400


def test_a_missing_file_stays_an_error_with_number_and_path(files):
    for path in ("Qwen/Qwen2-0.5B", "missing.tensors", "s3:/bucket/x"):
        with pytest.raises(FileNotFoundError) as caught:
            tensorizer.load(path)
        assert (caught.value.errno, caught.value.filename) == (2, path)


def test_a_string_of_names_is_one_name(files):
    assert [*tensorizer.load("m.tensors", names="0.weight")] == ["0.weight"]
    assert [name for name, _ in tensorizer.iterate("m.tensors", names="0.bias")] == ["0.bias"]


def test_a_module_with_more_parameters_than_the_file_is_warned_of(files):
    larger = network(layers=2)
    with pytest.warns(
        UserWarning, match=r"lacks, and that stay as they are: 1\.bias, 1\.weight; strict"
    ):
        assert load_into("m.tensors", larger) == 2
    with pytest.raises(RuntimeError, match=r"missing in the file: 1\.bias, 1\.weight"):
        load_into("m.tensors", network(layers=2), strict=True)
    with pytest.warns(UserWarning, match="and 20 more"):
        load_into("m.tensors", network(layers=21))


def test_no_warning_where_all_is_there_or_a_filter_was_given(files):
    tied = network(layers=2)
    tied[1].weight, tied[1].bias = tied[0].weight, tied[0].bias
    computed = network()
    computed.register_buffer("table", torch.ones(3), persistent=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_into("m.tensors", network())
        load_into("m.tensors", tied)
        load_into("m.tensors", computed)
        load_into("m.tensors", network(layers=2), filter_func=lambda name: name == "0.weight")
        file = TensorDeserializer("m.tensors", "cpu", filter_func=lambda name: "bias" in name)
        file.load_into_module(network())


def test_public_names_alone_are_listed():
    assert {name for name in dir(tensorizer) if not name.startswith("__")} == {
        *(name for name in tensorizer.__all__ if not name.startswith("__")),
        *("distributed", "lightning", "transformers"),
    }
    assert DecryptionParams.__name__ in dir(tensorizer) and tensorizer.distributed is not None


def test_a_tensor_that_a_filter_left_out_is_said_to_be(files):
    file = TensorDeserializer(
        "m.tensors", "cpu", filter_func=lambda name: "bias" in name, lazy_load=True
    )
    for ask in (file.__getitem__, file.slice):
        with pytest.raises(
            KeyError, match="'0.weight' of m.tensors was left out by names or filter_func"
        ):
            ask("0.weight")
    assert file.get("0.weight", 3) == 3 and file.get("nothing") is None
    assert file.get("0.bias").shape == (4,)


def test_names_too_long_for_a_file_are_missing_as_others_are(files):
    file = TensorDeserializer("m.tensors", "cpu", lazy_load=True)
    for name in ("x" * 100_000, "\x1e" + "[" * 100_000, ("a",) * 3, 3, None):
        assert file.get(name) is None
        with pytest.raises(KeyError, match="not found in m.tensors"):
            file[name]


def test_options_of_other_libraries_get_the_name_that_is_right_here(files):
    assert len(hints._OPTIONS) >= 20
    for call, file in ((tensorizer.load, "uri"), (TensorDeserializer, "file_obj")):
        known = inspect.signature(call).parameters
        for name, option in hints._OPTIONS.items():
            ours = file if option == "uri" else option
            if name not in known and ours in known:
                with pytest.raises(TypeError, match=f"{name}'; it is called {ours!r} here"):
                    call("m.tensors", **{name: 1})
        for name, way in hints._OTHER_WAYS.items():
            if name in known:
                continue
            with pytest.raises(TypeError, match=f"{name}'; {re.escape(way)}"):
                call("m.tensors", **{name: 1})
    with pytest.raises(TypeError, match="'num_reader'; did you mean 'num_readers'"):
        tensorizer.load("m.tensors", num_reader=1)
    # What is far from every name gets none.
    with pytest.raises(TypeError, match="'proxies'$"):
        tensorizer.load("m.tensors", proxies=1)


def test_writers_and_models_name_the_option_that_is_right_there(files, tmp_path):
    with pytest.raises(TypeError, match="'num_threads'; it is called 'limit_cpu_concurrency' here"):
        TensorSerializer("x.tensors", num_threads=2)
    with pytest.raises(TypeError, match="'path'; it is called 'uri' here"):
        tensorizer.save({"a": torch.ones(1)}, path="x.tensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "strict": true}')
    tensorizer.save({"a": torch.ones(1)}, "model.tensors")
    for name, ours in (("map_location", "device"), ("num_threads", "num_readers")):
        with pytest.raises(TypeError, match=f"{name!r}; it is called {ours!r} here"):
            tensorizer.transformers.from_pretrained(str(tmp_path), **{name: 1})


def test_options_stand_in_one_order_with_the_same_defaults():
    calls = (tensorizer.load, tensorizer.iterate, tensorizer.transformers.from_pretrained)
    first, *others = (inspect.signature(call).parameters for call in calls)
    for other in others:
        common = [name for name in first if name in other]
        assert [name for name in other if name in first] == common
        assert len(common) > 10
        for name in common:
            assert first[name].default == other[name].default
            assert first[name].kind == other[name].kind or name == "device"
