"""The load format of the plugin for vLLM, by a stub of vLLM's loaders and a model of our own.

vLLM itself is not among the packages that the tests install: test_vllm_engine.py needs it.
"""

import json
import logging
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorizer
import torch
import vllm_stub
from packaging.version import Version
from processes import run_python
from scripted import FaultServer
from vllm_stub import Model

safetensors = pytest.importorskip("safetensors.torch")
GROUP = "vllm.general_plugins"


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Have the stub in the place of vLLM, with the format registered; returns its loaders."""
    vllm_stub.install(monkeypatch, vllm_stub.write(tmp_path / "stub"))
    plugin().load()()
    from vllm.model_executor import model_loader

    return model_loader


@pytest.fixture
def weights():
    torch.manual_seed(3)
    return {name: torch.randn_like(tensor) for name, tensor in Model().state_dict().items()}


def plugin():
    (found,) = entry_points(group=GROUP, name="tensorizer")
    return found


def loader(stub, **options):
    config = SimpleNamespace(
        load_format="tensorizer_stream", model_loader_extra_config=options, download_dir=None
    )
    return stub.get_model_loader(config)


def load(stub, model_path, build=Model, experts=None, **options):
    config = SimpleNamespace(model=str(model_path), revision=None, experts=experts, build=build)
    return loader(stub, **options).load_model(None, config)


def shard(tensors, folder, stem, suffix, save):
    """Write two shards and their index."""
    index = {}
    for number in range(2):
        file = f"{stem}-{number + 1:05}-of-00002{suffix}"
        part = dict(list(tensors.items())[number::2])
        save(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"weight_map": index}))


def write(kind, tensors, folder):
    """Write a folder of one kind; return the path of the model in it."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if kind == "safetensors shards":
        shard(tensors, folder, "model", ".safetensors", safetensors.save_file)
        return "model.safetensors.index.json"
    if kind == "torch shards":
        shard(tensors, folder, "pytorch_model", ".bin", torch.save)
        return "pytorch_model.bin.index.json"
    save = {".tensors": tensorizer.save, ".safetensors": safetensors.save_file, ".bin": torch.save}
    save[Path(kind).suffix](tensors, folder / kind)
    return kind


KINDS = [
    *("model.tensors", "other.tensors", "model.safetensors", "pytorch_model.bin"),
    *("safetensors shards", "torch shards"),
]


def assert_loaded(model, weights):
    assert model.processed and not model.training
    assert sorted(model.names) == sorted(weights)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])


# Releases

#: The torch that releases of vLLM require, by the metadata of the package index in November 2026:
#: the first and the last with each.
REQUIRED = {
    "0.16.0": "2.9.1",
    **dict.fromkeys(("0.17.0", "0.18.1", "0.19.1"), "2.10.0"),
    **dict.fromkeys(("0.20.0", "0.24.0", "0.26.0"), "2.11.0"),
    **dict.fromkeys(("0.27.0", "0.30.0", "0.32.0"), "2.13.0"),
    "0.33.0": "2.14.0",
}


def test_the_page_names_releases_that_can_have_this_package():
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/vllm.md").read_text()
    rows = re.findall(r"^\| (up to )?([\d.]+)(?: to ([\d.]+))? \| ([\d.]+)(.*) \|$", page, re.M)
    found = {}
    for up_to, first, last, needs, wheel in rows:
        assert bool(up_to) is (Version(needs) < Version("2.10"))
        assert bool(up_to) or f"`tensorizer-*+torch{needs.rpartition('.')[0]}-*.whl`" in wheel
        among = [v for v in REQUIRED if Version(first) <= Version(v) <= Version(last or first)]
        found |= dict.fromkeys(among, needs)
    assert found == REQUIRED
    oldest = min((v for v in REQUIRED if Version(REQUIRED[v]) >= Version("2.10")), key=Version)
    assert set(re.findall(r"vLLM ([\d.]+) or newer", page)) == {oldest}


# The entry point


def test_the_entry_point_costs_nothing():
    code = f"""
import sys
from importlib.metadata import entry_points
(found,) = entry_points(group={GROUP!r}, name="tensorizer")
register = found.load()
dear = {{"torch", "vllm", "tensorizer", "numpy"}}
print(register.__module__, dear & set(sys.modules))
"""
    done = run_python(code, fresh=True)
    assert done.stdout == "tensorizer_vllm set()\n", done.stderr


def test_the_format_is_registered_once(stub):
    # The stub refuses a format that is there.
    plugin().load()()
    assert set(stub.loaders) == {"auto", "tensorizer_stream"}
    assert issubclass(stub.loaders["tensorizer_stream"], stub.DefaultModelLoader)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def register_model_loader", "def register", "cannot import name"),
        ("loaders[load_format] = loader", "raise TypeError('two\\nlines')", "two lines"),
        ("loaders = ", "raise RuntimeError('no')\n", "RuntimeError: no"),
        ("def get_all_weights", "def weights", "has no get_all_weights"),
        ("class DefaultModelLoader", "class Loader", "cannot import name"),
    ],
)
def test_an_unsupported_vllm_is_warned_of(  # noqa: PLR0917  # fixtures
    tmp_path, monkeypatch, caplog, old, new, said
):
    (path,) = (path for path in vllm_stub.write(tmp_path).rglob("*.py") if old in path.read_text())
    path.write_text(path.read_text().replace(old, new))
    vllm_stub.install(monkeypatch, tmp_path)
    warn(caplog, said)


def test_without_vllm(monkeypatch, caplog):
    vllm_stub.forget(monkeypatch)
    monkeypatch.setitem(sys.modules, "vllm", None)
    warn(caplog, "ModuleNotFoundError")


def warn(caplog, said):
    with caplog.at_level(logging.WARNING):
        register = plugin().load()
        register()
        register()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert message.startswith("tensorizer: load format tensorizer_stream is not registered, as")
    assert said in message and "\n" not in message


# Loads


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder(stub, tmp_path, weights, kind):
    write(kind, weights, tmp_path / "model")
    assert_loaded(load(stub, tmp_path / "model"), weights)
    # In pieces, one ahead.
    model = load(stub, tmp_path / "model", buffer_bytes=64, num_readers=1, device="cpu")
    assert_loaded(model, weights)


@pytest.mark.parametrize("kind", KINDS)
def test_an_address_beside_the_model(stub, tmp_path, weights, kind):
    file = tmp_path / "model" / write(kind, weights, tmp_path / "model")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert_loaded(load(stub, elsewhere, uri=str(file)), weights)
    assert_loaded(load(stub, "organisation/model", uri=file.as_uri()), weights)
    if not kind.endswith(".tensors"):
        assert_loaded(load(stub, "organisation/model", uri=str(file.parent)), weights)


@pytest.mark.parametrize("kind", ["model.tensors", "model.safetensors", "pytorch_model.bin"])
def test_a_server(stub, tmp_path, weights, kind):
    file = tmp_path / "model" / write(kind, weights, tmp_path / "model")
    with FaultServer(file.read_bytes()) as server:
        given = SimpleNamespace(model=server.url, revision=None)
        loader(stub).download_model(given)
        loader(stub, uri=server.url).download_model(SimpleNamespace(model="org/model"))
        assert not server.requests
        assert_loaded(load(stub, tmp_path, uri=server.url), weights)
        assert_loaded(load(stub, server.url), weights)


def test_a_model_that_vllm_downloads(stub, tmp_path, weights):
    """vLLM downloads the files of a name, which we read then."""
    write("safetensors shards", weights, tmp_path / "cache")
    config = SimpleNamespace(
        load_format="tensorizer_stream",
        model_loader_extra_config={},
        download_dir=tmp_path / "cache",
    )
    made = stub.get_model_loader(config)
    model = SimpleNamespace(model="organisation/model", revision="1", experts=None, build=Model)
    made.download_model(model)
    assert made.downloaded == ("organisation/model",)
    assert_loaded(made.load_model(None, model), weights)
    assert config.load_format == "tensorizer_stream"


def test_shards_are_read_by_their_index(stub, tmp_path, weights):
    folder = tmp_path / "model"
    index = write("safetensors shards", weights, folder)
    from tensorizer_engines.files import index_of_shards

    shards = sorted(map(str, folder.glob("*.safetensors")))
    assert index_of_shards(shards[::-1]) == [str(folder / index)]
    assert index_of_shards(shards[:1]) == shards[:1]
    (folder / "a.index.json").write_text("no JSON")
    (folder / "b.index.json").write_text('["no index"]')
    (folder / "c.index.json").write_text('{"weight_map": {"a": ["no", "name"]}}')
    assert index_of_shards(shards) == [str(folder / index)]
    (folder / index).unlink()
    assert index_of_shards(shards[::-1]) == shards
    # A link that leads to another version later is followed once.
    (tmp_path / "current").symlink_to(folder)
    through = [str(tmp_path / "current" / Path(shard).name) for shard in shards]
    assert index_of_shards(through) == shards
    assert_loaded(load(stub, folder), weights)


def test_secondary_weights(stub, tmp_path, weights):
    """With prefixes, from folders below, by patterns; the address is of the model's own."""
    write("model.safetensors", {"bias": weights["first.bias"]}, tmp_path / "model")
    write("other.safetensors", {"weight": weights["second.weight"]}, tmp_path / "model/below")
    torch.save({"weight": weights["first.weight"]}, tmp_path / "model/first.pt")
    tensorizer.save({"second.bias": weights["second.bias"]}, tmp_path / "own.tensors")

    def build():
        model, source = Model(), stub.DefaultModelLoader.Source
        model.secondary_weights = [
            source(str(tmp_path / "model"), None, prefix="first."),
            source(str(tmp_path / "model"), None, prefix="second.", subfolder="below"),
            source(
                str(tmp_path / "model"), None, prefix="first.", allow_patterns_overrides=["*.pt"]
            ),
        ]
        return model

    model = load(stub, tmp_path / "model", build, uri=str(tmp_path / "own.tensors"))
    assert_loaded(model, weights)


def test_weights_unused_by_a_rank_are_not_loaded(stub, tmp_path, weights):
    experts = {f"mlp.experts.{number}.weight": torch.ones(2) for number in range(4)}
    tensorizer.save(weights | experts, tmp_path / "model.tensors")
    model = load(stub, tmp_path, experts={1, 3})
    wanted = {*weights, "mlp.experts.1.weight", "mlp.experts.3.weight"}
    assert set(model.names) == wanted

    # A field of later releases.
    source = stub.DefaultModelLoader.Source(str(tmp_path), None)
    source.is_unused_weight = lambda name: name.startswith(("first.", "mlp."))
    found = dict(loader(stub)._get_weights_iterator(source))
    assert sorted(found) == ["second.bias", "second.weight"]


def test_a_model_that_drafts_has_weights_of_its_own(stub, tmp_path, weights):
    import vllm.config

    tensorizer.save(weights, tmp_path / "served.tensors")
    other = {name: tensor + 1 for name, tensor in weights.items()}
    write("model.safetensors", other, tmp_path / "draft")
    made = loader(stub, uri=str(tmp_path / "served.tensors"))

    def loaded(path):
        config = SimpleNamespace(
            **{"model": str(path), "revision": None, "runner_type": "draft"},
            experts=None,
            build=Model,
        )
        return made.load_model(None, config)

    served = SimpleNamespace(model="organisation/model")
    speculative = SimpleNamespace(target_model_config=served)
    vllm.config.current = SimpleNamespace(speculative_config=speculative)
    assert_loaded(loaded(tmp_path / "draft"), other)
    assert_loaded(loaded("organisation/model"), weights)


def test_tensors_go_to_the_models_device_unless_an_option_names_one(stub):
    from tensorizer_engines.options import LoaderOptions

    assert LoaderOptions().device_for(Model()) == torch.device("cpu")
    # Weights that are quantized on their way, and none at all.
    assert LoaderOptions().device_for(Model("meta")) == torch.device("cpu")
    assert LoaderOptions().device_for(torch.nn.Identity()) == torch.device("cpu")
    model = SimpleNamespace(
        parameters=lambda: [SimpleNamespace(device=torch.device(d)) for d in ("meta", "cuda:3")]
    )
    assert LoaderOptions().device_for(model) == torch.device("cuda:3")
    assert LoaderOptions(device="cpu").device_for(model) == torch.device("cpu")


def test_encrypted(stub, tmp_path, weights):
    params = tensorizer.EncryptionParams.random()
    tensorizer.save(weights, tmp_path / "model.tensors", encryption=params)
    (tmp_path / "key").write_bytes(params.key)
    model = load(stub, tmp_path, encryption_keyfile=str(tmp_path / "key"))
    assert_loaded(model, weights)
    with pytest.raises(tensorizer.CryptographyError, match="decryption was not requested"):
        load(stub, tmp_path)
    (tmp_path / "key").write_text(params.key.hex() + "\n")
    assert_loaded(load(stub, tmp_path, encryption_keyfile=str(tmp_path / "key")), weights)
    (tmp_path / "key").write_bytes(b"short")
    said = f"encryption_keyfile {tmp_path}/key: expected 32 bytes or 64 hexadecimal digits, found 5"
    with pytest.raises(ValueError, match=said):
        load(stub, tmp_path, encryption_keyfile=str(tmp_path / "key"))


def test_a_cache_and_a_limit_of_memory(stub, tmp_path, weights, nginx):
    tensorizer.save(weights, nginx.root / "cached.tensors")
    options = {"uri": f"{nginx.http}/cached.tensors", "cache_dir": str(tmp_path / "cache")}
    for _ in range(2):
        assert_loaded(load(stub, tmp_path, **options), weights)
    assert [request.split()[8] for request in nginx.requests()][-1] == "304"
    with pytest.raises(ValueError, match="a memory limit of 1000 bytes is too small"):
        load(stub, tmp_path, **options, memory_limit=1000)


# Errors


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"url": "x", "threads": 3},
            ValueError,
            "model_loader_extra_config has threads, url, which tensorizer does not know: expected "
            "any of uri, buffer_bytes, num_readers, verify_hash, device, encryption_keyfile, "
            "cache_dir, memory_limit, distributed",
        ),
        ({"uri": ""}, ValueError, "uri must be a string that is not empty, not ''"),
        ({"uri": 3}, ValueError, "uri must be a string that is not empty, not 3"),
        ({"buffer_bytes": 0}, ValueError, "buffer_bytes must be a positive int, not 0"),
        ({"buffer_bytes": True}, ValueError, "buffer_bytes must be a positive int, not True"),
        ({"num_readers": "2"}, TypeError, "num_readers must be an int or None, not '2'"),
        ({"verify_hash": "md5"}, ValueError, "verify_hash must be a bool or 'crc32', not 'md5'"),
        ({"device": "quantum"}, RuntimeError, "quantum"),
        ({"cache_dir": 3}, ValueError, "cache_dir must be a string that is not empty, not 3"),
        ({"memory_limit": "1G"}, TypeError, "memory_limit must be an int or None, not '1G'"),
        ({"distributed": 1}, ValueError, 'distributed must be true, false or "auto", not 1'),
    ],
)
def test_options_that_do_not_fit(stub, options, error, said):
    with pytest.raises(error, match=said):
        loader(stub, **options)


def test_options_that_are_no_dictionary(stub):
    config = SimpleNamespace(load_format="tensorizer_stream", model_loader_extra_config=["uri"])
    with pytest.raises(ValueError, match="must be a dictionary, not list"):
        stub.get_model_loader(config)


def test_damage(stub, tmp_path, weights):
    path = tmp_path / "model.tensors"
    tensorizer.save(weights, path)
    data = weights["second.weight"].numpy().tobytes()
    assert path.read_bytes().count(data) == 1
    path.write_bytes(path.read_bytes().replace(data, bytes(len(data))))
    assert load(stub, tmp_path).processed
    for verify_hash in (True, "crc32"):
        with pytest.raises(tensorizer.HashMismatchError):
            load(stub, tmp_path, verify_hash=verify_hash)


def test_files_that_are_not_weights_of_a_model(stub, tmp_path, weights):
    with tensorizer.TensorSerializer(tmp_path / "m.tensors") as serializer:
        model = Model()
        marker = torch.nn.Parameter(torch.tensor((1,), device="meta"), requires_grad=False)
        model.register_parameter("vllm_tensorized_marker", marker)
        serializer.write_module(model)
    with pytest.raises(ValueError, match=r"m\.tensors was written by vLLM from a model of its own"):
        load(stub, tmp_path)
    tensorizer.save({"optimizer": {"state": [torch.ones(2)]}}, tmp_path / "m.tensors")
    with pytest.raises(ValueError, match="expected names of weights, found .*'optimizer'"):
        load(stub, tmp_path)
    tensorizer.save(dict(list(weights.items())[:2]), tmp_path / "m.tensors")
    with pytest.raises(ValueError, match="were not initialized from checkpoint: {'second"):
        load(stub, tmp_path)


def test_missing_weights_are_errors(stub, tmp_path, weights):
    with pytest.raises(RuntimeError, match="Cannot find any model weights"):
        load(stub, tmp_path)
    with pytest.raises(FileNotFoundError):
        load(stub, tmp_path, uri=str(tmp_path / "none.tensors"))
    with pytest.raises(ValueError, match="`what://` addresses are not known"):
        load(stub, tmp_path, uri="what://bucket/model")
    for name in ("a.tensors", "b.tensors"):
        tensorizer.save(weights, tmp_path / name)
    with pytest.raises(ValueError, match=r"a\.tensors, b\.tensors: name one of them as uri"):
        load(stub, tmp_path)
    tensorizer.save(weights, tmp_path / "model.tensors")
    assert_loaded(load(stub, tmp_path), weights)


def test_a_load_that_the_model_ends_leaves_nothing_open(stub, tmp_path, weights):
    tensorizer.save(weights, tmp_path / "model.tensors")

    class Failing(Model):
        def load_weights(self, weights):
            next(weights)
            raise RuntimeError("it does not fit")

    with pytest.raises(RuntimeError, match="it does not fit"):
        load(stub, tmp_path, Failing)
