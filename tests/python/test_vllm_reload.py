"""Reloads of weights in vLLM, as its ``reload_weights`` makes them, by a stub of its loaders."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import tensorizer
import torch
import vllm_stub
from test_vllm import loader, plugin
from vllm_stub import Model


@pytest.fixture
def stub(tmp_path, monkeypatch):
    vllm_stub.install(monkeypatch, vllm_stub.write(tmp_path / "stub"))
    plugin().load()()
    from vllm.model_executor import model_loader

    return model_loader


@pytest.fixture
def versions(tmp_path):
    """Return three folders with weights; those of the second layer differ, then all."""
    torch.manual_seed(3)
    weights = {name: torch.randn_like(tensor) for name, tensor in Model().state_dict().items()}
    folders = []
    for number in range(3):
        folders.append(tmp_path / f"v{number}")
        folders[-1].mkdir()
        tensorizer.save(weights, folders[-1] / "model.tensors")
        changed = "second." if number == 0 else ""
        weights = {n: t + n.startswith(changed) for n, t in weights.items()}
    return folders


class Engine:
    """A model, and the configuration by which it is loaded."""

    def __init__(self, stub, path, **options):
        self.stub, self.options = stub, options
        self.config = SimpleNamespace(model=str(path), revision=None, experts=None, build=Model)
        self.model = loader(stub, **options).load_model(None, self.config)
        self.addresses = [tensor.data_ptr() for tensor in self.model.parameters()]

    def reload(self, path=None):
        """Reload as vLLM does; return the names of the weights that were read."""
        if path is not None:
            self.config.model = str(path)
        self.model.names = []
        made = loader(self.stub, **self.options)
        self.model.load_weights(made.get_all_weights(self.config, self.model))
        assert [tensor.data_ptr() for tensor in self.model.parameters()] == self.addresses
        return self.model.names

    def assert_has(self, folder):
        for name, tensor in tensorizer.load(folder / "model.tensors", "cpu").items():
            assert torch.equal(self.model.get_parameter(name), tensor)


SECOND = ["second.weight", "second.bias"]
ALL = ["first.weight", "first.bias", *SECOND]


@pytest.mark.parametrize("with_uri", [False, True])
def test_the_given_path_is_followed(stub, tmp_path, versions, with_uri):
    options = {"uri": str(versions[0] / "model.tensors")} if with_uri else {}
    empty = tmp_path / "empty"
    empty.mkdir()
    first = empty if with_uri else versions[0]
    engine = Engine(stub, first, **options)
    engine.assert_has(versions[0])
    assert engine.reload(versions[1]) == SECOND
    engine.assert_has(versions[1])
    assert engine.reload(versions[2]) == ALL
    engine.assert_has(versions[2])
    assert engine.reload(first) == ALL
    engine.assert_has(versions[0])
    assert engine.reload(versions[1] / "model.tensors") == SECOND
    engine.assert_has(versions[1])


def test_bytes_that_a_server_sends(stub, nginx):
    source = {"first.weight": torch.randn(16, 8), "second.weight": torch.randn(1024, 1024)}

    class Big(Model):
        def __init__(self):
            super().__init__()
            self.second = torch.nn.Linear(1024, 1024, bias=False)
            self.first = torch.nn.Linear(8, 16, bias=False)

    for name, factor in (("a", 1), ("b", 2)):
        changed = source | {"first.weight": source["first.weight"] * factor}
        tensorizer.save(changed, nginx.root / name)
    engine = Engine.__new__(Engine)
    engine.stub, engine.options = stub, {}
    engine.config = SimpleNamespace(model=f"{nginx.http}/a", revision=None, experts=None, build=Big)
    engine.model = loader(stub).load_model(None, engine.config)
    engine.addresses = [tensor.data_ptr() for tensor in engine.model.parameters()]
    assert engine.reload(f"{nginx.http}/b") == ["first.weight"]
    # The file is opened twice, each time with its first MiB.
    assert nginx.sent("b") < 2.2 * (1 << 20)
    assert torch.equal(engine.model.first.weight, source["first.weight"] * 2)


def test_the_same_weights_are_read_again(stub, versions):
    """They are wanted because those in memory are lost."""
    engine = Engine(stub, versions[0])
    for path in (None, versions[0]):
        for parameter in engine.model.parameters():
            parameter.data.zero_()
        assert engine.reload(path) == ALL
        engine.assert_has(versions[0])
    engine.config.enable_sleep_mode = True
    assert engine.reload(versions[1]) == ALL


def test_a_file_that_was_replaced_has_new_weights(stub, versions, caplog):
    engine = Engine(stub, versions[0])
    own = versions[0] / "model.tensors"
    (versions[1] / "model.tensors").replace(own)
    # The first one, and its hashes, are gone.
    assert engine.reload() == ALL
    assert "the hashes of the file that was loaded before are not known" in caplog.text
    assert engine.reload(versions[2]) == ALL
    tensorizer.save(tensorizer.load(own, "cpu"), versions[2] / "model.tensors")
    assert engine.reload() == ALL
    weights = tensorizer.load(own, "cpu")
    weights["second.bias"] += 1
    tensorizer.save(weights, versions[2] / "model.tensors")
    assert engine.reload() == ["second.bias"]
    engine.assert_has(versions[2])


def test_a_file_that_is_replaced_meanwhile_is_refused(stub, versions, monkeypatch):
    engine = Engine(stub, versions[0])
    iterate = tensorizer.iterate

    def late(file, *args, **options):
        (versions[2] / "model.tensors").replace(file)
        return iterate(file, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tensorizer, "iterate", late)
        with pytest.raises(OSError, match="replaced while its hashes were compared"):
            engine.reload(versions[1])
    assert engine.reload(versions[1]) == ALL


def test_without_hashes_everything_is_read(stub, versions, caplog):
    engine = Engine(stub, versions[0])
    (versions[1] / "model.tensors").rename(versions[1] / "old")
    tensorizer.save(tensorizer.load(versions[1] / "old", "cpu"), versions[1] / "model.safetensors")
    assert sorted(engine.reload(versions[1])) == sorted(ALL)
    assert "all weights are read again, as the hashes of" in caplog.text
    assert engine.reload(versions[0]) == ALL
    engine.assert_has(versions[0])


def test_a_failed_reload_is_not_remembered(stub, versions):
    engine = Engine(stub, versions[0])
    assert engine.reload(versions[1]) == SECOND

    def fail(weights):
        next(iter(weights))
        raise RuntimeError("it does not fit")

    engine.model.load_weights, load_weights = fail, engine.model.load_weights
    with pytest.raises(RuntimeError, match="does not fit"):
        engine.reload(versions[0])
    engine.model.load_weights = load_weights
    assert engine.reload(versions[1]) == ALL
    engine.assert_has(versions[1])


def test_vllm_reloads_blocks_as_wholes(stub, monkeypatch, tmp_path):
    """A module of vLLM holds several weights of a file; without some of them it is not right."""
    monkeypatch.setitem(
        sys.modules, "vllm.model_executor.model_loader.reload", ModuleType("reload")
    )
    names = [
        *(f"model.layers.{n}.self_attn.{p}_proj.weight" for n in range(2) for p in "qk"),
        *(f"model.layers.{n}.mlp.experts.{e}.w1" for n in range(2) for e in range(2)),
        *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
        *("mlp.experts.0.w1", "mlp.experts.1.w1", "mlp.gate.weight"),
    ]
    weights = {name: torch.ones(2) for name in names}
    tensorizer.save(weights, tmp_path / "v0.tensors")

    class Any(Model):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.names, self.devices = [], set()

    config = SimpleNamespace(
        model=str(tmp_path / "v0.tensors"), revision=None, experts=None, build=Any
    )
    model = loader(stub).load_model(None, config)
    for changed, parts in [
        (names[0], [*names[:2], *names[4:6]]),
        (names[7], [*names[2:4], *names[6:8]]),
        (names[9], names[8:10]),
        (names[10], names[10:11]),
        (names[11], names[11:]),
    ]:
        weights[changed] = weights[changed] + 1
        config.model = str(tmp_path / f"{changed}.tensors")
        tensorizer.save(weights, config.model)
        model.names = []
        model.load_weights(loader(stub).get_all_weights(config, model))
        assert sorted(model.names) == sorted(parts)
