"""The load format of the plugin in SGLang's own plugin framework, configuration and loader."""

import json
from types import SimpleNamespace

import pytest
import tensorizer
import torch
from ranks.engines import NAMES, value
from safetensors.torch import save_file
from sglang.srt import plugins
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader import loader as loaders


class Model(torch.nn.Module):
    """A model whose weights are copied in, as SGLang's are."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.names = []

    def load_weights(self, weights):
        for name, tensor in weights:
            self.names.append(name)
            self.get_parameter(name).data.copy_(tensor)


@pytest.fixture(scope="module", autouse=True)
def plugin():
    plugins.load_plugins()


@pytest.fixture(autouse=True)
def without_a_server(monkeypatch):
    """SGLang asks its server whether to compare checksums of files; there is none."""
    monkeypatch.setattr(loaders, "get_server_args", lambda: None)


@pytest.fixture
def weights():
    torch.manual_seed(3)
    return {name: torch.randn_like(tensor) for name, tensor in Model().state_dict().items()}


def configured(**extra):
    return LoadConfig(load_format="tensorizer_stream", model_loader_extra_config=json.dumps(extra))


def load(folder, **extra):
    made = loaders.get_model_loader(configured(**extra), None)
    model, given = Model(), SimpleNamespace(model_path=str(folder), revision=None, hf_config=None)
    found = made._get_all_weights(given, model)
    made.load_weights_and_postprocess(model, found, torch.device("cpu"))
    return model


def assert_loaded(model, weights):
    assert sorted(model.names) == sorted(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_the_load_format_is_a_choice_of_the_command():
    from sglang.srt.server_args import LOAD_FORMAT_CHOICES

    assert "tensorizer_stream" in LOAD_FORMAT_CHOICES
    config = configured()
    assert config.load_format == LoadFormat.AUTO and config.model_loader_extra_config == {}
    made = loaders.get_model_loader(LoadConfig(), None)
    assert type(made) is loaders.DefaultModelLoader
    made = loaders.get_model_loader(config, None)
    assert type(made) is not loaders.DefaultModelLoader
    assert isinstance(made, loaders.DefaultModelLoader)


def test_every_kind_of_folder_is_loaded(tmp_path, weights):
    for kind, save in {
        "tensors": tensorizer.save,
        "safetensors": save_file,
        "bin": torch.save,
    }.items():
        folder = tmp_path / kind
        folder.mkdir()
        save(weights, folder / f"model.{kind}")
        assert_loaded(load(folder), weights)
        elsewhere = tmp_path / f"{kind} elsewhere"
        elsewhere.mkdir()
        assert_loaded(load(elsewhere, uri=str(folder / f"model.{kind}")), weights)


def test_shards_are_loaded(tmp_path, weights):
    tensorizer.save(weights, tmp_path / "model.safetensors", max_shard_size=300)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_loaded(load(tmp_path), weights)
    assert_loaded(load(tmp_path, buffer_bytes=64, num_readers=1), weights)


def test_weights_are_updated_from_a_folder(tmp_path, weights):
    """As SGLang's own updater does it, which knows the name of the format only."""
    tensorizer.save(weights, tmp_path / "model.tensors")
    made = loaders.get_model_loader(LoadConfig(load_format="tensorizer_stream"), None)
    source = loaders.DefaultModelLoader.Source(str(tmp_path), None)
    found = dict(made._get_weights_iterator(source))
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_unsupported_options_are_errors():
    with pytest.raises(ValueError, match="has url, which tensorizer does not know"):
        configured(url="x")


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_read_once(ranks, nginx, world):
    """Each rank has what SGLang's default loader gives it; the server sends the weights once."""
    folder = nginx.root / f"of{world}"
    folder.mkdir()
    tensors = {name: torch.full((1024, 1024), value(name)) for name in NAMES}
    tensorizer.save(tensors, folder / "model.safetensors", max_shard_size=24 << 20)
    uri = f"{nginx.http}/of{world}/model.safetensors.index.json"
    found = ranks.run("engines.sglang_itself", world, uri, str(folder))
    assert found == [sorted(NAMES)] * world
    sent = sum(nginx.sent(f"of{world}/{path.name}") for path in folder.iterdir())
    size = sum(tensor.nbytes for tensor in tensors.values())
    # The first rank reads half a megabyte of each of the three shards with its index.
    assert size <= sent <= 1.01 * size + 3 * 530_000
