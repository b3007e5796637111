"""The load format of the plugin for SGLang, by a stub of its loaders and a model of our own.

SGLang itself is not among the packages that the tests install: tests/frameworks needs it.
"""

import json
import logging
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest
import sglang_stub
import tensorizer
import torch
from processes import run_python
from scripted import FaultServer
from test_vllm import KINDS, assert_loaded, write
from vllm_stub import Model

GROUP = "sglang.srt.plugins"


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Have the stub in the place of SGLang, with its plugins loaded; returns its loaders."""
    sglang_stub.install(monkeypatch, sglang_stub.write(tmp_path / "stub"))
    from sglang.srt import plugins

    plugins.load_plugins()
    from sglang.srt import model_loader

    return model_loader.loader


@pytest.fixture
def weights():
    torch.manual_seed(3)
    return {name: torch.randn_like(tensor) for name, tensor in Model().state_dict().items()}


def config(model_path, build=Model, **more):
    return SimpleNamespace(model_path=str(model_path), hf_config=None, build=build, **more)


def configured(load_format="tensorizer_stream", extra=None, **more):
    from sglang.srt.configs.load_config import LoadConfig

    return LoadConfig(load_format=load_format, model_loader_extra_config=extra or {}, **more)


def loader(**options):
    from sglang.srt.model_loader import get_model_loader

    return get_model_loader(configured(extra=options))


def load(model_path, build=Model, **options):
    return loader(**options).load_model(model_config=config(model_path, build), device_config=None)


# The entry point


def test_the_entry_point_costs_nothing():
    code = f"""
import sys
from importlib.metadata import entry_points
(found,) = entry_points(group={GROUP!r}, name="tensorizer")
register = found.load()
dear = {{"torch", "sglang", "tensorizer", "numpy"}}
print(register.__module__, dear & set(sys.modules))
"""
    done = run_python(code, fresh=True)
    assert done.stdout == "tensorizer_sglang set()\n", done.stderr


def test_the_format_is_a_choice_and_other_formats_stay(stub):
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES

    assert LOAD_FORMAT_CHOICES == ["auto", "safetensors", "tensorizer_stream"]
    assert type(stub.get_model_loader(configured("auto"))) is stub.DefaultModelLoader
    assert type(stub.get_model_loader(configured("safetensors"))) is stub.DefaultModelLoader
    with pytest.raises(ValueError, match="nothing"):
        configured("nothing")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("add_load_format_choices =", "add_formats =", "cannot import name"),
        ("class HookRegistry", "class Registry", "cannot import name"),
        ("assert target not in cls._hooks", "raise TypeError('two\\nlines')", "two lines"),
        ("def _get_all_weights", "def weights", "has no _get_all_weights"),
        ("class DefaultModelLoader", "class Loader", "cannot import name"),
    ],
)
def test_an_unsupported_sglang_is_warned_of(  # noqa: PLR0917  # fixtures
    tmp_path, monkeypatch, caplog, old, new, said
):
    (path,) = (
        path for path in sglang_stub.write(tmp_path).rglob("*.py") if old in path.read_text()
    )
    path.write_text(path.read_text().replace(old, new, 1))
    sglang_stub.install(monkeypatch, tmp_path)
    warn(caplog, said)


def test_without_sglang(monkeypatch, caplog):
    sglang_stub.forget(monkeypatch)
    monkeypatch.setitem(sys.modules, "sglang", None)
    warn(caplog, "ModuleNotFoundError")


def warn(caplog, said):
    (found,) = entry_points(group=GROUP, name="tensorizer")
    with caplog.at_level(logging.WARNING):
        register = found.load()
        register()
        register()
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("tensorizer: load format tensorizer_stream is not registered, as")
    assert "this SGLang differs" in message and said in message and "\n" not in message


# Loads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("stub")
def test_a_folder(tmp_path, weights, kind):
    write(kind, weights, tmp_path / "model")
    assert_loaded(load(tmp_path / "model"), weights)
    # In pieces, one ahead.
    assert_loaded(load(tmp_path / "model", buffer_bytes=64, num_readers=1, device="cpu"), weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("stub")
def test_an_address_beside_the_model(tmp_path, weights, kind):
    file = tmp_path / "model" / write(kind, weights, tmp_path / "model")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert_loaded(load(elsewhere, uri=str(file)), weights)
    assert_loaded(load("organisation/model", uri=file.as_uri()), weights)


@pytest.mark.usefixtures("stub")
def test_a_server(tmp_path, weights):
    tensorizer.save(weights, tmp_path / "model.tensors")
    with FaultServer((tmp_path / "model.tensors").read_bytes()) as server:
        loader().download_model(config(server.url))
        loader(uri=server.url).download_model(config("org/model"))
        assert not server.requests
        assert_loaded(load(tmp_path, uri=server.url), weights)
        assert_loaded(load(server.url), weights)


@pytest.mark.usefixtures("stub")
def test_a_cache_and_a_limit_of_memory(tmp_path, weights, nginx):
    tensorizer.save(weights, nginx.root / "for_sglang.tensors")
    options = {"uri": f"{nginx.http}/for_sglang.tensors", "cache_dir": str(tmp_path / "cache")}
    for _ in range(2):
        assert_loaded(load(tmp_path, **options), weights)
    assert [request.split()[8] for request in nginx.requests()][-1] == "304"
    with pytest.raises(ValueError, match="a memory limit of 1000 bytes is too small"):
        load(tmp_path, **options, memory_limit=1000)


def test_a_model_that_sglang_downloads(stub, tmp_path, weights):
    write("safetensors shards", weights, tmp_path / "cache")
    made = stub.get_model_loader(configured(download_dir=tmp_path / "cache"))
    made.download_model(config("organisation/model"))
    assert made.downloaded == ("organisation/model",)
    found = made.load_model(model_config=config("organisation/model"), device_config=None)
    assert_loaded(found, weights)


def test_files_that_an_index_has_left_out(stub, tmp_path, weights):
    folder = tmp_path / "model"
    write("safetensors shards", weights, folder)
    tensorizer.save({"more": torch.ones(3)}, folder / "mtp.safetensors")
    made, model = stub.get_model_loader(configured()), config(folder)
    model.hf_config = "mtp"
    source = made.Source(str(folder), None, model_config=model)
    assert set(dict(made._get_weights_iterator(source))) == {*weights, "more"}


def test_sources_that_are_resolved_already(stub, tmp_path, weights):
    folder = tmp_path / "model"
    write("safetensors shards", weights, folder)
    made = stub.get_model_loader(configured())
    source = made.Source("elsewhere", None, prefix="a.")
    resolved = SimpleNamespace(weight_files=tuple(map(str, folder.glob("*.safetensors"))))
    found = made._get_weights_iterator(
        source, resolved_source=resolved, startup_prefetch_active=True
    )
    assert {name for name, _ in found} == {f"a.{name}" for name in weights}


def test_secondary_weights_and_layers_that_draft(stub, tmp_path, weights):
    half = dict(list(weights.items())[:2])
    write("model.safetensors", half, tmp_path / "model")
    other = {
        name.removeprefix("second."): tensor for name, tensor in weights.items() if name not in half
    }
    write("model.safetensors", other, tmp_path / "other")

    def build():
        model = Model()
        source = stub.DefaultModelLoader.Source(str(tmp_path / "other"), None, prefix="second.")
        model.secondary_weights = [source]
        return model

    assert_loaded(load(tmp_path / "model", build), weights)
    layers = {f"model.mtp.layers.{number}.weight": torch.full((2,), number) for number in range(3)}
    tensorizer.save(layers, tmp_path / "mtp.tensors")
    made = stub.get_model_loader(configured(draft_model_idx=1))
    found = dict(made._get_weights_iterator(made.Source(str(tmp_path / "mtp.tensors"), None)))
    assert list(found) == ["model.mtp.layers.0.weight"]
    assert found["model.mtp.layers.0.weight"].tolist() == [1, 1]


def test_a_model_that_drafts_has_weights_of_its_own(stub, tmp_path, weights):
    tensorizer.save({name: tensor + 1 for name, tensor in weights.items()}, tmp_path / "s.tensors")
    write("model.safetensors", weights, tmp_path / "draft")
    made = stub.get_model_loader(configured(extra={"uri": str(tmp_path / "s.tensors")}))
    draft = config(tmp_path / "draft", is_draft_model=True)
    assert_loaded(made.load_model(model_config=draft, device_config=None), weights)


def test_a_model_that_drafts_for_itself_has_the_same_weights(stub, tmp_path, monkeypatch, weights):
    tensorizer.save(weights, tmp_path / "s.tensors")
    context = ModuleType("sglang.srt.runtime_context")
    context.get_model = lambda: SimpleNamespace(model_path="org/model")
    monkeypatch.setitem(sys.modules, context.__name__, context)
    made = stub.get_model_loader(configured(extra={"uri": str(tmp_path / "s.tensors")}))
    draft = config("org/model", is_draft_model=True)
    assert_loaded(made.load_model(model_config=draft, device_config=None), weights)


def test_adapters_are_read_by_sglang(stub):
    """It reads them with the same configuration, by its own loader."""
    given = configured(extra=json.dumps({"uri": "s3://bucket/model.tensors"}))
    assert given.load_format == "auto" and given.model_loader_extra_config == {}
    stub.DefaultModelLoader(given)


def test_models_of_other_loaders(stub):
    with pytest.raises(ValueError, match="SGLang loads this model by its GGUFModelLoader"):
        stub.get_model_loader(configured(), "gguf")


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("extra", "error", "said"),
    [
        ({"url": "x"}, ValueError, "has url, which tensorizer does not know: expected any of uri"),
        ('{"num_readers": 0}', ValueError, "num_readers"),
        ('["uri"]', ValueError, "must be a dictionary, not list"),
    ],
)
def test_options_that_do_not_fit(extra, error, said):
    with pytest.raises(error, match=said):
        configured(extra=extra)
