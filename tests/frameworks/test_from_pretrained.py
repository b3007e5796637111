"""Models that ``tensorizer.transformers`` builds are those of the libraries' own loaders."""

import json
import shutil

import diffusers
import models
import peft
import pytest
import tensorizer
import torch
import transformers
from hub import Hub
from python_conftest import assert_same
from tensorizer.transformers import from_pretrained, load_adapter, load_config, load_tokenizer

ALL = [*models.TRANSFORMERS, *models.DIFFUSERS]


def assert_same_model(ours, theirs, inputs):
    """State, buffers, ties, modes, configuration and outputs agree."""
    assert type(ours) is type(theirs) and not ours.training
    state, expected = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert_same(state[name], tensor)
    assert {n for n, _ in ours.named_parameters()} == {n for n, _ in theirs.named_parameters()}
    gradients = dict(theirs.named_parameters())
    assert all(gradients[n].requires_grad == p.requires_grad for n, p in ours.named_parameters())
    buffers = dict(theirs.named_buffers())
    assert buffers.keys() == dict(ours.named_buffers()).keys()
    for name, buffer in ours.named_buffers():
        assert_same(buffer, buffers[name])
    with torch.no_grad():
        assert_equal(outputs(ours, inputs), outputs(theirs, inputs))
    if hasattr(theirs, "generation_config"):
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


def outputs(model, inputs):
    """Return what a model computes, with weights at addresses of one alignment.

    The last bits of products depend on how operands are aligned, which differs between loaders.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    found = model(**inputs)
    values = found.values() if hasattr(found, "values") else found
    return [value for value in values if isinstance(value, torch.Tensor)]


def assert_equal(left, right):
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        assert_same(one, other)


def theirs_of(model, folder, **options):
    return type(model).from_pretrained(folder, **options)


@pytest.mark.parametrize("build", ALL, ids=lambda build: build.__name__)
@pytest.mark.parametrize("form", ["whole", "shards", "bf16", "bin"])
def test_models_equal_those_of_the_library(build, form, tmp_path, nginx):
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    model, inputs = models.made(build, dtype)
    folder = nginx.root / f"{build.__name__}-{form}"
    model.save_pretrained(folder, max_shard_size="20KB" if form == "shards" else "5GB")
    is_diffusers = build in models.DIFFUSERS
    if form == "shards":
        assert len(list(folder.glob("*.safetensors"))) > 1
    if form == "bin":
        stem = "diffusion_pytorch_model" if is_diffusers else "model"
        whole = folder / f"{stem}.safetensors"
        name = "diffusion_pytorch_model.bin" if is_diffusers else "pytorch_model.bin"
        torch.save(tensorizer.load(whole), folder / name)
        whole.unlink()
    theirs = theirs_of(model, folder, **({"torch_dtype": dtype} if is_diffusers else {}))
    for address in (folder, f"{nginx.http}/{folder.name}"):
        assert_same_model(from_pretrained(address), theirs, inputs)
    assert_same_model(from_pretrained(folder, type(model)), theirs, inputs)


def test_tied_weights_stay_tied(tmp_path):
    model, _ = models.made(models.tied_llama)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in tensorizer.info(tmp_path).tensors
    ours = from_pretrained(tmp_path)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight


def test_parameters_are_the_loaded_tensors_without_copies(tmp_path, monkeypatch):
    """The model has no copies of them."""
    from tensorizer.transformers import weights

    model, _ = models.made(models.llama)
    model.save_pretrained(tmp_path)
    loaded = {}
    load = weights.LoadPlan.load

    def noted(self, *args):
        found = load(self, *args)
        loaded.update({name: tensor.data_ptr() for name, tensor in found.items()})
        return found

    monkeypatch.setattr(weights.LoadPlan, "load", noted)
    ours = from_pretrained(tmp_path)
    assert {name: tensor.data_ptr() for name, tensor in ours.state_dict().items()} == loaded


@pytest.mark.parametrize("build", [models.llama, models.mixtral, models.unet])
def test_dtype_casts_parameters(build, tmp_path):
    model, inputs = models.made(build)
    model.save_pretrained(tmp_path)
    inputs = {n: v.bfloat16() if v.is_floating_point() else v for n, v in inputs.items()}
    ours = from_pretrained(tmp_path, dtype="bfloat16")
    assert from_pretrained(tmp_path, torch_dtype=torch.bfloat16).dtype == torch.bfloat16
    name = "torch_dtype" if build is models.unet else "dtype"
    assert_same_model(ours, theirs_of(model, tmp_path, **{name: torch.bfloat16}), inputs)


def test_auto_classes_and_their_arguments_are_accepted(tmp_path):
    model, inputs = models.made(models.llama)
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModelForCausalLM
    options = {"attn_implementation": "eager", "rms_norm_eps": 1e-4}
    ours, theirs = (
        from_pretrained(tmp_path, auto, **options),
        auto.from_pretrained(tmp_path, **options),
    )
    assert ours.config._attn_implementation == "eager" and ours.config.rms_norm_eps == 1e-4
    assert_same_model(ours, theirs, inputs)
    base = from_pretrained(tmp_path, transformers.AutoModel)
    assert_same_model(base, transformers.AutoModel.from_pretrained(tmp_path), inputs)
    with pytest.raises(ValueError, match="AutoModelForSpeechSeq2Seq has no model for LlamaConfig"):
        from_pretrained(tmp_path, transformers.AutoModelForSpeechSeq2Seq)


def test_a_part_of_a_composite_model_is_loaded(tmp_path):
    model, inputs = models.made(models.clip)
    model.save_pretrained(tmp_path)
    cls = transformers.CLIPTextModel
    inputs.pop("pixel_values")
    ours = from_pretrained(tmp_path, cls)
    assert_same_model(ours, cls.from_pretrained(tmp_path), inputs)


def test_variants_and_tensors_files_are_found(tmp_path):
    model, inputs = models.made(models.llama)
    model.save_pretrained(tmp_path, variant="fp16")
    with pytest.raises(FileNotFoundError, match=r"no weights in .*model\.int8\.safetensors"):
        from_pretrained(tmp_path, variant="int8")
    ours = from_pretrained(tmp_path, variant="fp16")
    theirs = theirs_of(model, tmp_path, variant="fp16")
    assert_same_model(ours, theirs, inputs)
    tensors = tensorizer.load(tmp_path / "model.fp16.safetensors")
    (tmp_path / "model.fp16.safetensors").unlink()
    tensorizer.save(tensors, tmp_path / "model.tensors")
    assert_same_model(from_pretrained(tmp_path, verify_hash=True), theirs, inputs)
    with tensorizer.TensorSerializer(tmp_path / "module.tensors") as file:
        file.write_module(model)
    assert_same_model(from_pretrained(tmp_path / "module.tensors"), theirs, inputs)


def test_missing_and_unknown_weights_are_errors(tmp_path, caplog):
    model, _ = models.made(models.llama)
    model.save_pretrained(tmp_path)
    tensors = tensorizer.load(tmp_path)
    del tensors["model.norm.weight"]
    tensorizer.save(tensors | {"other": torch.ones(2)}, tmp_path / "model.safetensors")
    ours, info = from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"model.norm.weight"} and info["unexpected_keys"] == {"other"}
    assert torch.equal(ours.model.norm.weight, torch.ones(32))


def test_missing_weights_of_diffusers_are_errors(tmp_path, caplog):
    model, _ = models.made(models.unet)
    model.save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    tensors = tensorizer.load(path)
    tensorizer.save(tensors | {"other": torch.ones(2)}, path)
    _, names = from_pretrained(tmp_path, output_loading_info=True)
    _, expected = theirs_of(model, tmp_path, output_loading_info=True)
    assert names.keys() == expected.keys()
    assert set(names["unexpected_keys"]) == set(expected["unexpected_keys"]) == {"other"}
    assert "not used by UNet2DConditionModel: other" in caplog.text
    del tensors["conv_in.bias"]
    tensorizer.save(tensors, path)
    with pytest.raises(RuntimeError, match=r"lacks weights of UNet2DConditionModel: conv_in\.bias"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("where", ["local", "http", "s3", "hub"])
def test_models_load_from_every_kind_of_address(where, tmp_path, nginx, request, monkeypatch):
    model, inputs = models.made(models.mixtral)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    theirs = theirs_of(model, tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    if where == "local":
        assert_same_model(from_pretrained(tmp_path / "model"), theirs, inputs)
    elif where == "http":
        shutil.copytree(tmp_path / "model", nginx.root / "everywhere")
        assert_same_model(from_pretrained(f"{nginx.http}/everywhere/"), theirs, inputs)
    elif where == "s3":
        s3 = request.getfixturevalue("s3")
        for name, data in files.items():
            s3.client().put_object(Bucket="bucket", Key=f"a model/{name}", Body=data)
        assert_same_model(from_pretrained("s3://bucket/a model"), theirs, inputs)
    else:
        request.getfixturevalue("no_settings_of_the_machine")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        with Hub() as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
            monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
            hub.repo("org/repo", files)
            ours = from_pretrained("hf://org/repo")
            assert_same_model(ours, theirs, inputs)
            assert ours.config.name_or_path == "hf://org/repo"
            of_file = from_pretrained("hf://org/repo/model.safetensors.index.json")
            assert_same_model(of_file, theirs, inputs)


def test_an_adapter_is_loaded(tmp_path, nginx):
    base, inputs = models.made(models.llama)
    folder = nginx.root / "adapter"
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(folder)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = peft.PeftModel.from_pretrained(models.made(models.llama, dtype)[0], folder)
        for address in (folder, f"{nginx.http}/adapter"):
            ours = load_adapter(models.made(models.llama, dtype)[0], address)
            assert_same_model(ours, theirs, inputs)
            assert ours.peft_config["default"].to_dict() == theirs.peft_config["default"].to_dict()
    twice = load_adapter(ours, folder, adapter_name="second", is_trainable=True)
    assert twice is ours and set(ours.peft_config) == {"default", "second"}
    # A further adapter that is trained.
    theirs.load_adapter(folder, "second", is_trainable=True)
    trained = {name for name, one in theirs.named_parameters() if one.requires_grad}
    assert trained == {name for name, one in ours.named_parameters() if one.requires_grad} != set()
    options = {"low_cpu_mem_usage": True, "torch_device": "cpu"}
    theirs, ours = (
        load(models.made(models.llama, torch.bfloat16)[0], folder, **options)
        for load in (peft.PeftModel.from_pretrained, load_adapter)
    )
    assert_same_model(ours, theirs, inputs)
    with pytest.raises(FileNotFoundError, match=r"load_adapter\(model, uri\)"):
        from_pretrained(f"{nginx.http}/adapter")


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_complete_adapter_gives_no_warning(config, tmp_path, recwarn):
    peft.get_peft_model(models.made(models.llama)[0], config).save_pretrained(tmp_path)
    load_adapter(models.made(models.llama)[0], tmp_path)
    assert not [one for one in recwarn if str(tmp_path) in str(one.message)]


def test_an_adapter_beside_a_model_is_not_attached(tmp_path, caplog):
    base, _ = models.made(models.llama)
    base.save_pretrained(tmp_path)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4)
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path, transformers.AutoModelForCausalLM)
    assert not any("lora" in name for name, _ in ours.named_parameters())
    assert "has an adapter too, which is not attached" in caplog.text


def test_a_folder_of_a_pipeline_is_loaded(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="folder of a pipeline"):
        from_pretrained(tmp_path)


def test_diffusers_auto_models_and_quantization_are_accepted(tmp_path):
    model, inputs = models.made(models.dit)
    model.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path, diffusers.AutoModel)
    assert_same_model(ours, theirs_of(model, tmp_path), inputs)
    models.made(models.clip)[0].save_pretrained(tmp_path / "clip")
    encoder = diffusers.AutoModel.from_pretrained(str(tmp_path / "clip"))
    assert type(from_pretrained(tmp_path / "clip", diffusers.AutoModel)) is type(encoder)
    assert load_config(tmp_path)["_class_name"] == "DiTTransformer2DModel"
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(NotImplementedError, match="quantization_config is for from_pretrained"):
        from_pretrained(tmp_path, config=config | {"quantization_config": {"quant_method": "x"}})


def test_a_tokenizer_is_loaded(tmp_path, nginx):
    from tokenizers import Tokenizer, models as kinds, pre_tokenizers

    plain = Tokenizer(kinds.WordLevel({"[UNK]": 0, "a": 1, "word": 2}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")
    made.chat_template = "{{ messages }}"
    folder = nginx.root / "tokenizer"
    made.save_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for address in (folder, f"{nginx.http}/tokenizer"):
        ours = load_tokenizer(address)
        assert type(ours) is type(theirs) and ours.chat_template == theirs.chat_template
        assert ours("a word or two")["input_ids"] == theirs("a word or two")["input_ids"]
        assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


def assert_same_tensors(left, right):
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert_same(left[name], tensor)


def test_a_folder_that_torchao_has_quantized(tmp_path, nginx):
    """Its files hold the parts of each tensor, and metadata that put them together."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    how = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=how
    )
    words = torch.arange(10)[None]
    for name, options in (("whole", {}), ("shards", {"max_shard_size": "20KB"})):
        folder = nginx.root / f"torchao-{name}"
        model.save_pretrained(folder, **options)
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(words).logits
        for uri in (folder, f"{nginx.http}/torchao-{name}/"):
            found = from_pretrained(uri)
            assert type(found.model.layers[0].self_attn.q_proj.weight).__name__ == "Int8Tensor"
            assert torch.equal(found(words).logits, expected)


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("safe", [True, False])
def test_shards_of_diffusers_are_found(tmp_path, nginx, variant, safe):
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    folder = nginx.root / f"unet-{variant}-{safe}"
    options = {"safe_serialization": safe} | ({} if variant is None else {"variant": variant})
    model.save_pretrained(folder, max_shard_size="100KB", **options)
    assert len([*folder.glob("*-of-*")]) > 1
    for uri in (folder, f"{nginx.http}/{folder.name}/"):
        found = from_pretrained(uri, **({} if variant is None else {"variant": variant}))
        assert_same_tensors(found.state_dict(), model.state_dict())
        assert_same_tensors(tensorizer.load(uri), model.state_dict())


def test_weights_of_older_torch_are_loaded(tmp_path):
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=32, vocab_size=50)  # fmt: skip
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(
        model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    assert_same_tensors(from_pretrained(tmp_path).state_dict(), model.state_dict())
