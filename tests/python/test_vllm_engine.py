"""vLLM's own loaders and one of its models, on the CPU: our load format and its own tensorizer's.

The other tests do not install vLLM, which brings gigabytes of kernels: make test-vllm. Its wheel
has none for the CPU, so that models are built and filled, but not run.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorizer
import torch
from scripted import FaultServer
from servers import free_port

platforms = pytest.importorskip("vllm.platforms", reason="vLLM is not installed: make test-vllm")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
# A wheel for CUDA finds no platform here, and modules keep what there is when they are imported.
platforms._current_platform = pytest.importorskip("vllm.platforms.cpu").CpuPlatform()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return a folder with a model as it was published, without weights; and its weights."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    return folder, transformers.LlamaForCausalLM(config).to(torch.float32).state_dict()


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    """Make the configuration of an engine, as the command does; it loads vLLM's plugins."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs

    def config_of(model, load_format, **extra):
        args = EngineArgs(
            model=str(model),
            load_format=load_format,
            model_loader_extra_config=extra,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
        )
        return args.create_engine_config()

    folder = tmp_path_factory.mktemp("engine")
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    with set_current_vllm_config(config_of(folder, "auto")):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield config_of
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def load(config):
    """Load a model as an engine's workers do."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(config):
        return get_model(vllm_config=config)


@pytest.fixture(scope="module")
def expected(config_of, published, tmp_path_factory):
    """Return the state dict that vLLM's default loader gives."""
    folder = model_folder(tmp_path_factory.mktemp("expected"), published[0])
    safetensors.save_file(published[1], folder / "model.safetensors")
    return load(config_of(folder, "auto")).state_dict()


def model_folder(folder, published):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((published / "config.json").read_bytes())
    return folder


def assert_same_state(model, expected):
    state = model.state_dict()
    assert list(state) == list(expected)
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


# Ours


def write(kind, tensors, folder):
    if kind == "shards":
        tensorizer.save(tensors, folder / "model.safetensors", max_shard_size="100KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        return "model.safetensors.index.json"
    name = {"tensors": "model.tensors", "torch": "pytorch_model.bin"}.get(kind, f"model.{kind}")
    (torch if kind == "torch" else tensorizer).save(tensors, folder / name)
    return name


KINDS = ["tensors", "safetensors", "shards", "torch"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder(config_of, published, expected, tmp_path, kind):
    write(kind, published[1], model_folder(tmp_path, published[0]))
    config = config_of(tmp_path, "tensorizer_stream", buffer_bytes=1 << 16)
    assert_same_state(load(config), expected)


@pytest.mark.parametrize("kind", ["tensors", "safetensors", "torch"])
def test_an_address(config_of, published, expected, tmp_path, kind):
    """The configuration is in the folder, and the weights are elsewhere."""
    file = tmp_path / write(kind, published[1], tmp_path)
    with FaultServer(file.read_bytes()) as server:
        config = config_of(published[0], "tensorizer_stream", uri=server.url, num_readers=2)
        from vllm.model_executor.model_loader import get_model_loader

        get_model_loader(config.load_config).download_model(config.model_config)
        assert not server.requests
        assert_same_state(load(config), expected)
        assert server.requests


def test_the_plugin_is_found_by_vllm(config_of, published):
    from tensorizer_vllm.loader import VllmStreamLoader
    from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader

    config = config_of(published[0], "tensorizer_stream")
    loader = get_model_loader(config.load_config)
    assert isinstance(loader, VllmStreamLoader) and isinstance(loader, DefaultModelLoader)
    # vLLM's configuration is as it was.
    assert config.load_config.load_format == "tensorizer_stream"
    config.load_config.model_loader_extra_config = {"url": "x"}
    with pytest.raises(ValueError, match="has url, which tensorizer does not know"):
        get_model_loader(config.load_config)


def test_missing_weights(config_of, published, tmp_path):
    weights = dict(published[1])
    del weights["model.norm.weight"]
    tensorizer.save(weights, model_folder(tmp_path, published[0]) / "model.tensors")
    with pytest.raises(
        ValueError, match=r"not initialized from checkpoint: {'model\.norm\.weight'}"
    ):
        load(config_of(tmp_path, "tensorizer_stream"))


def test_weights_are_loaded_again(config_of, published, expected, tmp_path):
    """As an engine's reload_weights does."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    tensorizer.save(published[1], model_folder(tmp_path, published[0]) / "model.tensors")
    config = config_of(tmp_path, "tensorizer_stream")
    model = load(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loader = get_model_loader(config.load_config)
    with set_current_vllm_config(config):
        model.load_weights(loader.get_all_weights(config.model_config, model))
    assert_same_state(model, expected)


def test_new_weights_are_loaded_in_place(config_of, published, tmp_path):
    """As an engine's reload_weights does with a path: only blocks that have changed are read."""
    reload = pytest.importorskip("vllm.model_executor.model_loader.reload")
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    folder = model_folder(tmp_path, published[0])
    tensorizer.save(published[1], folder / "model.tensors")
    config = config_of(folder, "tensorizer_stream", uri=str(folder / "model.tensors"))
    model = load(config)
    objects = dict(model.named_parameters())
    addresses = {name: tensor.data_ptr() for name, tensor in objects.items()}
    weights = dict(published[1])
    parts = {
        "model.layers.1.self_attn.k_proj.weight": "model.layers.1.",
        "model.norm.weight": "model.norm.",
        "model.layers.0.mlp.up_proj.weight": "model.layers.0.",
    }
    for number, (changed, part) in enumerate(parts.items()):
        weights[changed] = weights[changed] + 1
        path = tmp_path / f"{number}.tensors"
        tensorizer.save(weights, path)
        config.model_config.model = str(path)
        loader = get_model_loader(config.load_config)
        with set_current_vllm_config(config):
            given = loader.get_all_weights(config.model_config, model)
            reload.initialize_layerwise_reload(model)
            names = []
            model.load_weights((names.append(name), (name, tensor))[1] for name, tensor in given)
            reload.finalize_layerwise_reload(model, config.model_config)
        assert changed in names and len(names) < len(weights) / 2
        assert part == "model.norm." or all(name.startswith(part) for name in names)
        fresh = model_folder(tmp_path / f"fresh{number}", published[0])
        tensorizer.save(weights, fresh / "model.tensors")
        for name, expected in load(config_of(fresh, "tensorizer_stream")).named_parameters():
            parameter = model.get_parameter(name)
            assert parameter is objects[name] and parameter.data_ptr() == addresses[name]
            assert torch.equal(parameter, expected) and parameter.stride() == expected.stride()


def test_experts_of_other_ranks(config_of, published, tmp_path):
    from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader

    names = [f"model.layers.0.mlp.experts.{n}.{p}.weight" for n in range(4) for p in ("up", "down")]
    names += ["model.layers.0.mlp.experts.1.up.scale", "model.norm.weight"]
    file = tmp_path / "model.tensors"
    tensorizer.save({name: torch.ones(2) for name in names}, file)
    loader = get_model_loader(config_of(published[0], "tensorizer_stream").load_config)
    loader.local_expert_ids = {0, 2}
    source = DefaultModelLoader.Source(str(tmp_path), None, prefix="p.")
    found = [name.removeprefix("p.") for name, _ in loader._get_weights_iterator(source)]
    others = {f"model.layers.0.mlp.experts.{n}.{p}.weight" for n in (1, 3) for p in ("up", "down")}
    assert found == [name for name in names if name not in others]


# vLLM's own tensorizer


@pytest.fixture
def vllm_tensorizer(monkeypatch):
    """Patch vLLM's tensorizer loader to load to the CPU, and not to use the hub; return it."""
    from vllm.model_executor.model_loader import tensorizer as theirs

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    hub = SimpleNamespace(snapshot_download=lambda *args, **kwargs: None)
    monkeypatch.setattr(theirs, "hf_api", lambda: hub)
    return theirs


def serialize(theirs, model, config, **options):
    config.model_config.served_model_name = "model"
    theirs.serialize_vllm_model(model, theirs.TensorizerConfig(**options), config.model_config)
    del model.vllm_tensorized_marker


@pytest.mark.parametrize("encrypted", [False, True])
def test_its_format(  # noqa: PLR0917  # fixtures
    config_of, published, expected, tmp_path, vllm_tensorizer, encrypted
):
    """Saved by vLLM's code, and loaded by it: from a file, a folder, and a server."""
    folder = model_folder(tmp_path, published[0])
    safetensors.save_file(published[1], folder / "model.safetensors")
    config = config_of(folder, "auto")
    uri, options = str(folder / "model.tensors"), {}
    if encrypted:
        options = {"encryption_keyfile": str(tmp_path / "key")}
        with vllm_tensorizer.open_stream(
            options["encryption_keyfile"], mode="wb+", s3_access_key_id=None
        ) as stream:
            stream.write(vllm_tensorizer.EncryptionParams.random().key)
    serialize(
        vllm_tensorizer,
        load(config),
        config,
        tensorizer_uri=uri,
        serialization_kwargs={"limit_cpu_concurrency": 2},
        **options,
    )
    assert tensorizer.info(uri).encrypted == encrypted
    for loads in ({}, {"verify_hash": True, "num_readers": 2}):
        again = load(config_of(folder, "tensorizer", **options, **loads))
        assert_same_state(again, expected)
    assert_same_state(
        load(config_of(folder, "tensorizer", tensorizer_uri=uri, **options)), expected
    )
    with FaultServer((folder / "model.tensors").read_bytes()) as server:
        config = config_of(folder, "tensorizer", tensorizer_uri=server.url, **options)
        assert_same_state(load(config), expected)
    if not encrypted:
        with pytest.raises(ValueError, match="was written by vLLM from a model of its own"):
            load(config_of(folder, "tensorizer_stream"))


@pytest.mark.parametrize("loads", [{}, {"verify_hash": True, "num_readers": 2}])
def test_its_format_with_published_weights(  # noqa: PLR0917  # fixtures
    config_of, published, expected, tmp_path, vllm_tensorizer, loads
):
    folder = model_folder(tmp_path, published[0])
    tensorizer.save(published[1], folder / "model.tensors")
    config = config_of(folder, "tensorizer", **loads)
    from vllm.model_executor.model_loader import get_model_loader

    get_model_loader(config.load_config).download_model(config.model_config)
    assert_same_state(load(config), expected)


def test_its_adapters(tmp_path, monkeypatch, vllm_tensorizer):
    if not hasattr(vllm_tensorizer, "tensorize_lora_adapter"):
        pytest.skip("this vLLM saves none")
    from vllm.lora import lora_model
    from vllm.lora.peft_helper import PEFTHelper

    monkeypatch.setattr(lora_model, "PIN_MEMORY", False)

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    weights = {name.format("A"): torch.randn(4, 64), name.format("B"): torch.randn(64, 4)}
    safetensors.save_file(weights, adapter / "adapter_model.safetensors")
    target = vllm_tensorizer.TensorizerConfig(tensorizer_dir=str(tmp_path / "out"))
    vllm_tensorizer.tensorize_lora_adapter(str(adapter), target)

    given = target.to_serializable()
    helper = PEFTHelper.from_local_dir(str(tmp_path / "out"), 64, given)
    assert helper.r == 4
    model = lora_model.LoRAModel.from_local_checkpoint(
        str(tmp_path / "out"),
        {"q_proj"},
        helper,
        lora_model_id=1,
        device="cpu",
        dtype=torch.float32,
        tensorizer_config_dict=given,
    )
    (layer,) = model.loras.values()
    assert torch.equal(layer.lora_a, weights[name.format("A")])
    assert torch.equal(layer.lora_b, weights[name.format("B")])


# Several ranks


@pytest.fixture(scope="module")
def models(nginx):
    """Return models of several kinds, published at a server as shards."""
    torch.manual_seed(9)
    small = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    for kind, config in {
        "dense": transformers.LlamaConfig(**small, architectures=["LlamaForCausalLM"]),
        "experts": transformers.MixtralConfig(
            **small, num_local_experts=4, architectures=["MixtralForCausalLM"]
        ),
        # Makes a list of its weights before it takes one.
        "lists": transformers.RobertaConfig(
            **small, max_position_embeddings=66, architectures=["RobertaModel"]
        ),
    }.items():
        model = getattr(transformers, config.architectures[0])(config).to(torch.float32)
        model.save_pretrained(nginx.root / kind, max_shard_size="4MB")
    return nginx


@pytest.mark.parametrize(
    ("kind", "world", "stages"),
    [
        ("dense", 2, 1),
        ("dense", 4, 1),
        ("dense", 4, 2),
        ("experts", 2, 1),
        ("lists", 2, 1),
        ("lists", 4, 1),
    ],
)
def test_ranks(models, kind, world, stages):
    """Each rank has what the default loader gives it, and the server sends the weights once."""
    folder = models.root / kind
    weights = list(folder.glob("*.safetensors"))
    index = f"{models.http}/{kind}/model.safetensors.index.json"
    before = sum(models.sent(f"{kind}/{path.name}") for path in weights)
    port = str(free_port())
    program = str(Path(__file__).with_name("vllm_rank.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(world), str(stages), port, folder, index],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output[-3000:]
    for output in outputs:
        assert "\nloaded " in output and "\nreloaded " in output, output[-3000:]
    sent = sum(models.sent(f"{kind}/{path.name}") for path in weights) - before
    size = sum(path.stat().st_size for path in weights)
    # The first rank of a group reads half a megabyte of each shard with its index; of files as
    # small as these, gaps count too.
    assert size <= sent <= 1.2 * size + stages * len(weights) * 530_000
