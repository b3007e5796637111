"""``tensorizer.transformers``: from a folder or an address to a model, by the library's own code.

diffusers and PEFT are stand-ins here; tests/frameworks has the libraries themselves.
"""

import http.server
import json
import multiprocessing.util
import shutil
import sys
import tempfile
import threading
from multiprocessing.pool import ThreadPool

import libraries_stub
import pytest
import tensorizer
import torch
from conftest import assert_same
from processes import run_python
from tensorizer import FormatError
from tensorizer.transformers import (
    config_sanitizer,
    diffusers_models,
    fetching,
    folders,
    from_pretrained,
    load_adapter,
    load_config,
    load_processor,
    load_tokenizer,
    weights,
)
from tensorizer_cli.main import main

transformers = pytest.importorskip("transformers", "5")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def no_temporary_folder_stays(tmp_path, monkeypatch):
    # That of multiprocessing stays as long as this process, and so is made elsewhere before.
    multiprocessing.util.get_temp_dir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    yield
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.fixture(scope="module")
def served(nginx):
    """Two models in folders of the server, one of them with tied weights."""
    torch.manual_seed(1)
    llama = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    mixtral = transformers.MixtralConfig(**SMALL, num_local_experts=2)
    for name, model in {
        "llama": transformers.LlamaForCausalLM(llama),
        "mixtral": transformers.MixtralForCausalLM(mixtral),
    }.items():
        model.bfloat16().save_pretrained(nginx.root / name, max_shard_size="2KB")
    return nginx


def asked(nginx, since=0):
    """Return the paths of the requests to a server, from a number on."""
    return [line.split()[6] for line in nginx.requests()[since:]]


def test_ranks_load_a_model_together(ranks, nginx):
    """Two ranks fetch the weights once, and have the same model as one that loads alone."""
    torch.manual_seed(2)
    config = transformers.LlamaConfig(**SMALL | {"hidden_size": 512, "intermediate_size": 2048})
    folder = nginx.root / "together"
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="8MB")
    alone = from_pretrained(f"{nginx.http}/together")
    weights = list(folder.glob("*.safetensors"))

    def sent():
        return sum(nginx.sent(f"together/{path.name}") for path in weights)

    before = sent()
    found = ranks.run("groups.pretrained", 2, f"{nginx.http}/together")
    size = sum(path.stat().st_size for path in weights)
    # The first rank reads half a megabyte of each file with its index.
    assert len(weights) > 1 and size <= sent() - before <= 1.01 * size + len(weights) * 530_000
    assert found == [[int(one.view(torch.int32).sum()) for one in alone.state_dict().values()]] * 2


def test_the_library_is_imported_by_the_calls_only():
    code = """
import sys, tensorizer
assert "tensorizer.transformers" not in sys.modules
print(tensorizer.transformers.from_pretrained.__module__, "transformers" in sys.modules)
"""
    done = run_python(code)
    assert done.stdout == "tensorizer.transformers False\n", done.stderr


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_same_as_the_librarys_own(served, name, tmp_path):
    folder, copied = served.root / name, tmp_path / "copied"
    assert main(["cp", f"{served.http}/{name}/", str(copied)]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[1, 5, 6, 7]])
    auto = transformers.AutoModelForCausalLM
    addresses = ((folder, None), (f"{served.http}/{name}", None), (str(folder), auto))
    for address, cls in (*addresses, (copied, None)):
        ours = from_pretrained(address, cls, device="cpu")
        assert type(ours) is type(theirs) and not ours.training
        assert list(ours.state_dict()) == list(theirs.state_dict())
        for key, tensor in theirs.state_dict().items():
            assert_same(ours.state_dict()[key], tensor)
        for key, tensor in theirs.named_buffers():
            assert_same(dict(ours.named_buffers())[key], tensor)
        with torch.no_grad():
            torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
        assert ours.name_or_path == str(address)
        tied = ours.get_input_embeddings().weight is ours.get_output_embeddings().weight
        assert tied == (name == "llama")


def test_requests(served):
    since = len(served.requests())
    config = load_config(f"{served.http}/llama/")
    assert asked(served, since) == ["/llama/config.json"]
    assert config.hidden_size == 16 and config.name_or_path == f"{served.http}/llama/"
    since = len(served.requests())
    from_pretrained(f"{served.http}/llama", dtype=torch.float32)
    files = sorted(path.name for path in (served.root / "llama").glob("*.safetensors"))
    wanted = ["config.json", "generation_config.json", "model.safetensors"]
    wanted += ["model.safetensors.index.json", *files]
    assert sorted(asked(served, since)) == sorted(f"/llama/{name}" for name in wanted)


def test_a_file_and_a_configuration_that_is_given(served, tmp_path):
    config = load_config(served.root / "llama")
    plain = tensorizer.load(served.root / "llama")
    tensorizer.save(plain, tmp_path / "weights.tensors")
    with pytest.raises(FileNotFoundError, match=r"no config\.json at .*pass config="):
        from_pretrained(tmp_path / "weights.tensors")
    ours = from_pretrained(tmp_path / "weights.tensors", config=config, verify_hash=True)
    assert_same(ours.model.norm.weight.data, plain["model.norm.weight"])
    again = from_pretrained(served.root / "llama/model.safetensors.index.json", mmap=True)
    assert_same(again.model.norm.weight.data, plain["model.norm.weight"])


def test_missing_folders_and_files_are_named(served, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder of a model, and no file: .*nowhere"):
        from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=f"no config.json at {served.http}/nowhere: pass"):
        from_pretrained(f"{served.http}/nowhere")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*nowhere"):
        load_tokenizer(f"{served.http}/nowhere")
    with pytest.raises(FileNotFoundError, match=r"no processor at .*nowhere"):
        load_processor(f"{served.http}/nowhere")
    (tmp_path / "config.json").write_text((served.root / "llama/config.json").read_text())
    with pytest.raises(FileNotFoundError, match=r"no weights in .*model\.safetensors\.index"):
        from_pretrained(tmp_path)
    (served.root / "empty").mkdir(exist_ok=True)
    (served.root / "empty/config.json").write_text((tmp_path / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match=r"no weights at .*pytorch_model\.bin\.index"):
        from_pretrained(f"{served.http}/empty")


def test_passwords_and_queries_are_not_shown(served):
    host = served.http.partition("://")[2]
    for address in (
        f"http://user:word-hu5hw0rd@{host}/nowhere",
        f"http://{host}/nowhere/?signature=word-hu5hw0rd",
    ):
        for call in (from_pretrained, load_config, load_tokenizer):
            with pytest.raises(FileNotFoundError) as raised:
                call(address)
            assert "hu5hw0rd" not in str(raised.value) and "nowhere" in str(raised.value)
    model = from_pretrained(f"http://user:word-hu5hw0rd@{host}/auth/llama")
    assert model.name_or_path == f"http://{host}/auth/llama"
    with pytest.raises(PermissionError):
        load_config(f"{served.http}/auth/llama")


@pytest.mark.parametrize(
    ("address", "folder", "shown", "is_file"),
    [
        ("http://h/m/?a=b", "http://h/m/x?a=b", "http://h/m/", False),
        ("http://u:hu5hw0rd@h/m/model.safetensors?a=b", "http://u:hu5hw0rd@h/m/x?a=b",
         "http://h/m/model.safetensors", True),
        ("s3://b/k/model.tensors?versionId=1", "s3://b/k/x", "s3://b/k/model.tensors", True),
        ("hf://org/model.bin", "hf://org/model.bin/x", "hf://org/model.bin", False),
        ("hf://org/repo@v1/sub/model.bin", "hf://org/repo@v1/sub/x",
         "hf://org/repo@v1/sub/model.bin", True),
        ("abfss://c@account.dfs.core.windows.net/m", "abfss://c@account.dfs.core.windows.net/m/x",
         "abfss://c@account.dfs.core.windows.net/m", False),
    ],
)  # fmt: skip
def test_folders(address, folder, shown, is_file):
    found = folders.ModelFolder(address)
    assert (found.join("x"), found.shown) == (folder, shown)
    assert found.file == (address if is_file else None)


def test_addresses_that_are_refused():
    with pytest.raises(ValueError, match="redis:// has no folders: redis://h/prefix"):
        from_pretrained("redis://u:hu5hw0rd@h/prefix")
    with pytest.raises(TypeError, match="expected an address or a path, found bytes"):
        from_pretrained(b"folder")


def test_one_commit_of_the_hub():
    folder = folders.ModelFolder("hf://org/repo/sub")
    folder.pin("config.json", "hf://org/repo@main/sub/config.json")
    assert folder.join("x") == "hf://org/repo/sub/x"
    assert folder.needs_pinning
    commit = "5a" * 20
    folder.pin("config.json", f"hf://org/repo@{commit}/sub/config.json")
    assert folder.join("x") == f"hf://org/repo@{commit}/sub/x" and not folder.needs_pinning
    folder = folders.ModelFolder("hf://org/repo/sub/model.safetensors")
    folder.pin("config.json", f"hf://org/repo@{commit}/sub/config.json")
    assert folder.file == f"hf://org/repo@{commit}/sub/model.safetensors"
    assert not folders.ModelFolder("http://h/m").needs_pinning


def test_arguments_for_the_hub_are_refused(tmp_path, monkeypatch):
    for call in (from_pretrained, load_config, load_tokenizer, load_processor):
        with pytest.raises(TypeError, match="revision= is not supported: the address says which"):
            call(tmp_path, revision="main")
        with pytest.raises(TypeError, match="hf://org/repo is not local; with HF_HUB_OFFLINE=1"):
            call("hf://org/repo", local_files_only=True)
        with monkeypatch.context() as offline:
            offline.setenv("HF_HUB_OFFLINE", "1")
            with pytest.raises(OSError, match="hf://org/none@main.*HF_HUB_OFFLINE is set, and"):
                call("hf://org/none", local_files_only=True)
        with pytest.raises(TypeError, match="use_safetensors=False is not supported"):
            call(tmp_path, use_safetensors=False)
        with pytest.raises(OSError, match=r"no config\.json|no tokenizer|no processor"):
            call(tmp_path, token=None, proxies=None, force_download=False, subfolder="")
        with pytest.raises(OSError, match=r"no config\.json|no tokenizer|no processor"):
            call(tmp_path, local_files_only=True, use_safetensors=True, weights_only=True)
    with pytest.raises(TypeError, match="expected a class of transformers or diffusers"):
        from_pretrained(tmp_path, torch.nn.Linear, config={})
    with pytest.raises(ValueError, match="expected a variant such as 'fp16', found '../x'"):
        weights.names_of_weights("transformers", "../x")


def test_small_files_are_bounded(served, monkeypatch):
    monkeypatch.setattr(fetching, "CONFIG_BYTES", 100)
    with pytest.raises(FormatError, match=r"llama/config\.json is larger than 100 bytes"):
        load_config(f"{served.http}/llama")


def test_damaged_configurations_are_refused(served):
    (served.root / "damaged").mkdir()
    for text, said in (("[", "is not JSON"), ("[]", "expected a JSON object, found list")):
        (served.root / "damaged/config.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            from_pretrained(f"{served.http}/damaged")
    with pytest.raises(ValueError, match="names no class: pass a class"):
        from_pretrained(served.root / "llama", config=transformers.LlamaConfig(**SMALL))


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
from .parts import NAME
class OwnConfig(LlamaConfig):
    model_type = NAME
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_folder_is_run_when_that_is_said(served, monkeypatch, tmp_path):
    dynamic = sys.modules["transformers.dynamic_module_utils"]
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = served.root / "own"
    folder.mkdir()
    said = json.loads((served.root / "llama/config.json").read_text())
    said |= {"architectures": ["OwnModel"], "model_type": "own"}
    said["auto_map"] = {
        "AutoConfig": "code.OwnConfig",
        "AutoModelForCausalLM": "code.OwnModel",
        "AutoModel": "org/repo--code.OwnModel",
    }
    (folder / "config.json").write_text(json.dumps(said))
    (folder / "code.py").write_text(CODE)
    (folder / "parts.py").write_text("NAME = 'own'")
    tensorizer.save(tensorizer.load(served.root / "llama"), folder / "model.safetensors")
    address = f"{served.http}/own"
    since = len(served.requests())
    for call in (from_pretrained, load_config):
        with pytest.raises(ValueError, match="trust_remote_code|names 'OwnModel'"):
            call(address)
    assert not [path for path in asked(served, since) if path.endswith(".py")]
    for cls in (None, transformers.AutoModelForCausalLM):
        model = from_pretrained(address, cls, trust_remote_code=True)
        assert type(model).__name__ == "OwnModel" and model.config.model_type == "own"
        assert "GenerationMixin" in str(type(model).__mro__)
    config = load_config(address, trust_remote_code=True)
    given = from_pretrained(address, config=config, trust_remote_code=True)
    assert type(given).__name__ == "OwnModel"
    # One place in the library's cache, however often it is loaded.
    places = [path.name for path in (tmp_path / "modules/transformers_modules").iterdir()]
    assert [name[:4] for name in places if name.startswith("own")] == ["own_"]
    assert not [name for name in places if name.startswith("tensorizer")]
    with pytest.raises(ValueError, match=f"{address} contains custom code"):
        load_config(address)
    said["auto_map"]["AutoConfig"] = "../code.OwnConfig"
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"expected module\.Class in auto_map"):
        load_config(address, trust_remote_code=True)


def tokenizer(folder, **more):
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "word": 2}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")
    made.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_a_tokenizer(served):
    # Old tokenizers name files of the machine that made them.
    theirs = tokenizer(served.root / "words", special_tokens_map_file="/etc/passwd")
    since = len(served.requests())
    ours = load_tokenizer(f"{served.http}/words")
    requests = asked(served, since)
    assert len(requests) == len(set(requests)) <= 7
    assert type(ours) is type(theirs)
    expected = theirs("a word or two")["input_ids"]
    assert ours("a word or two")["input_ids"] == expected == [1, 2, 0, 0]
    assert "/etc/passwd" not in map(str, ours.init_kwargs.values())
    assert ours.name_or_path == f"{served.http}/words"
    kept = json.loads((served.root / "words/tokenizer_config.json").read_text())
    assert load_tokenizer(served.root / "words")("a")["input_ids"] == [1]
    assert json.loads((served.root / "words/tokenizer_config.json").read_text()) == kept
    assert ours.init_kwargs["name_or_path"] == f"{served.http}/words"
    processor = load_processor(f"{served.http}/words")
    assert processor("a")["input_ids"] == [1]
    assert processor.name_or_path == f"{served.http}/words"


def test_a_remote_tokenizer_opens_no_file_of_the_machine(served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private.txt").write_text("[UNK]\nsecret\n")
    (served.root / "bert").mkdir()
    (served.root / "bert/config.json").write_text('{"model_type": "bert"}')
    kind = "BertTokenizer"
    for said in (
        {"vocab": str(tmp_path / "private.txt")},
        {"vocab_file": "private.txt"},
        {"init_inputs": [str(tmp_path / "private.txt")]},
    ):
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            text = json.dumps(said | {"tokenizer_class": kind})
            (served.root / "bert" / name).write_text(text)
        assert "secret" not in load_tokenizer(f"{served.http}/bert").get_vocab()


def test_entries_that_name_files_of_the_machine(tmp_path):
    path = tmp_path / "config.json"
    kept = {"vocab": ["a"], "vocab_size": 3, "chat_template": "a/b_file", "unk_token": "/"}
    dropped = {"vocab": "x", "merges": "x", "source_spm": "x", "fast_tokenizer_files": ["x"]}
    path.write_text(json.dumps(kept | {"sp_model_kwargs": {"model_file": "x", "nbest_size": 1}}))
    config_sanitizer.drop_entries(path, config_sanitizer.names_vocabulary)
    assert json.loads(path.read_text()) == kept | {"sp_model_kwargs": {"nbest_size": 1}}
    path.write_text(json.dumps(dropped))
    config_sanitizer.drop_entries(path, config_sanitizer.names_vocabulary)
    assert json.loads(path.read_text()) == {}
    hub = {"repo_path": "org/repo", "image_processor": {"class_info_file": "ade20k.json"}}
    path.write_text(json.dumps(hub | {"part": {"class_info_file": str(path)}, "a_path": "../x"}))
    config_sanitizer.drop_entries(path, config_sanitizer.names_path)
    assert json.loads(path.read_text()) == hub | {"part": {}}


@pytest.mark.parametrize("config", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("name", ["pipeline", "Trainer", "AutoModel", {"a": 1}, 7])
def test_a_tokenizer_class_that_is_none(tmp_path, config, name):
    tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / config).write_text(json.dumps({"tokenizer_class": name}))
    with pytest.raises(ValueError, match="expected the name of a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "said",
    [["pipeline"], ["AutoConfig"], ["LlamaConfig"], ["AutoTokenizer"], [1], [None], {"a": 1}, 7],
)
def test_an_architecture_that_is_none(served, tmp_path, said):
    config = json.loads((served.root / "llama/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": said}))
    (tmp_path / "model.safetensors").write_bytes((b"\2" + bytes(7)) + b"{}")
    with pytest.raises(ValueError, match=r"no model of transformers|list of names of classes"):
        from_pretrained(tmp_path)


def test_files_of_other_names_are_no_weights(served, tmp_path):
    plain = tensorizer.load(served.root / "llama")
    config = json.loads((served.root / "llama/config.json").read_text())
    for name in ("adapter_model.safetensors", "consolidated.safetensors"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        tensorizer.save(plain, folder / name)
        with pytest.raises(FileNotFoundError, match="no weights in"):
            from_pretrained(folder)
    # A name that the configuration says is that of the weights.
    path = folder / "config.json"
    path.write_text(json.dumps(config | {"transformers_weights": "consolidated.safetensors"}))
    assert_same(from_pretrained(folder).model.norm.weight.data, plain["model.norm.weight"])
    for name in ("../x.safetensors", "/x.safetensors", "x.bin", "a?b.safetensors", 3):
        path.write_text(json.dumps(config | {"transformers_weights": name}))
        with pytest.raises(ValueError, match="expected transformers_weights to name"):
            from_pretrained(folder)


def test_a_missing_shard_is_named(served):
    folder = served.root / "shards"
    shutil.copytree(served.root / "llama", folder)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    for address in (folder, f"{served.http}/shards"):
        with pytest.raises(FileNotFoundError, match=shard.name):
            from_pretrained(address)


def test_arguments_and_blocks_of_the_library(served, tmp_path, caplog):
    folder = served.root / "llama"
    model = from_pretrained(folder, torch_dtype=torch.float16)
    assert model.dtype == torch.float16
    auto = transformers.AutoModelForCausalLM
    assert from_pretrained(folder, auto, torch_dtype="auto").dtype == torch.bfloat16
    with torch.device("meta"), pytest.raises(RuntimeError, match="default device is 'meta'"):
        from_pretrained(folder)
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged/generation_config.json").write_text("{")
    (tmp_path / "damaged/adapter_config.json").write_text("{}")
    damaged = from_pretrained(tmp_path / "damaged")
    assert damaged.generation_config.eos_token_id == 2
    assert "has an adapter too, which is not attached" in caplog.text


# diffusers and PEFT


@pytest.fixture
def stubs(monkeypatch):
    libraries_stub.install(monkeypatch)


@pytest.fixture
def diffusion(served):
    """A folder of the server with a model of the stand-in, and its tensors."""
    torch.manual_seed(2)
    tensors = libraries_stub.TinyModel(4).state_dict()
    tensors["norm.weight"] += torch.rand(4)
    folder = served.root / "diffusion"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"_class_name": "TinyModel", "size": 4}')
    tensorizer.save(tensors, folder / "diffusion_pytorch_model.safetensors")
    return folder, tensors


def test_a_model_of_diffusers(stubs, served, diffusion):
    folder, tensors = diffusion
    for address in (folder, f"{served.http}/diffusion"):
        model = from_pretrained(address)
        assert not model.training and model.config == {"_name_or_path": str(address)}
        assert list(model.state_dict()) == list(tensors)
        for name, tensor in tensors.items():
            assert_same(model.state_dict()[name], tensor)
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert_same(model.table, torch.linspace(0, 1, 4))
    half = from_pretrained(folder, dtype="float16")
    assert half.proj.weight.dtype == half.table.dtype == torch.float16
    assert half.norm.weight.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    assert from_pretrained(folder, torch_dtype="float16").proj.weight.dtype == torch.float16
    assert load_config(folder) == {"_class_name": "TinyModel", "size": 4}


def test_models_of_diffusers_on_several_threads(stubs, diffusion):
    folder, _ = diffusion
    dtypes = [torch.float16, torch.bfloat16, torch.float64] * 4
    with ThreadPool(6) as pool:
        found = pool.map(lambda dtype: from_pretrained(folder, dtype=dtype).table.dtype, dtypes)
    assert found == dtypes
    assert torch.get_default_dtype() == torch.float32


def test_weights_that_do_not_fit_a_model_of_diffusers(stubs, diffusion, caplog):
    folder, tensors = diffusion
    path = folder / "diffusion_pytorch_model.safetensors"
    tensorizer.save(tensors | {"ignored.x": torch.ones(1), "y": torch.ones(1)}, path)
    _, names = from_pretrained(folder, output_loading_info=True, low_cpu_mem_usage=True)
    assert names["unexpected_keys"] == ["ignored.x", "y"] and names["missing_keys"] == []
    assert "not used by TinyModel: y" in caplog.text
    with pytest.raises(RuntimeError, match=r"size mismatch for proj\.weight"):
        from_pretrained(folder, size=5)
    del tensors["proj.bias"]
    tensorizer.save(tensors, path)
    with pytest.raises(RuntimeError, match=r"lacks weights of TinyModel: proj\.bias"):
        from_pretrained(folder)
    for name, value in {"device_map": "auto", "max_memory": {0: 1}, "offload_folder": "x"}.items():
        with pytest.raises(NotImplementedError, match=f"{name} is for from_pretrained of diffuse"):
            from_pretrained(folder, **{name: value})
    (folder / "config.json").write_text('{"_class_name": "PeftModel"}')
    with pytest.raises(ValueError, match="names 'PeftModel': expected a model of diffusers"):
        from_pretrained(folder)


def test_an_adapter(stubs, served):
    folder = served.root / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"task_type": "CAUSAL_LM"}')
    tensorizer.save({"factor": torch.tensor([2.0, 3.0])}, folder / "adapter_model.safetensors")
    base = torch.nn.Linear(2, 2)
    for address in (folder, f"{served.http}/adapter"):
        model = load_adapter(base, address)
        assert type(model) is libraries_stub.PeftModelForCausalLM and model.base_model is base
        assert not model.training and not model.factors["default"].requires_grad
        assert_same(model.factors["default"].data, torch.tensor([2.0, 3.0]))
    again = load_adapter(model, folder, adapter_name="more", is_trainable=True)
    assert again is model and again.factors["more"].requires_grad
    for address in (folder, f"{served.http}/adapter"):
        with pytest.raises(FileNotFoundError, match=r"load_adapter\(model, uri\)"):
            from_pretrained(address)
    tensorizer.save(
        {"factor": torch.ones(2), "x": torch.ones(1)}, folder / "adapter_model.safetensors"
    )
    with pytest.warns(UserWarning, match=r"adapter has keys that the model does not use: x"):
        load_adapter(base, folder)
    with pytest.raises(NotImplementedError, match="key_mapping is for PeftModel"):
        load_adapter(base, folder, key_mapping={"a": "b"})
    with pytest.raises(FileNotFoundError, match=r"no adapter_config\.json at .*llama"):
        load_adapter(base, f"{served.http}/llama")


def test_a_library_that_is_missing_or_old(served, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="needs the library peft: pip install peft"):
        load_adapter(torch.nn.Linear(1, 1), served.root)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.0")
    with pytest.raises(ImportError, match=r"needs transformers 5 or newer, found 4\.57\.0"):
        load_config(served.root / "llama")


# The parts


def test_files_of_the_hub_are_asked_for_alone_until_one_is_pinned(tmp_path, monkeypatch):
    files = fetching.FetchedFiles(folders.ModelFolder("hf://org/repo"), tmp_path)
    rounds = []

    def note(names):
        rounds.append(names)
        if "b" in names:
            files.folder.pin("b", f"hf://org/repo@{'5a' * 20}/b")

    monkeypatch.setattr(files, "_fetch_concurrently", note)
    files.fetch(["a", "b", "c", "d"])
    assert rounds == [["a"], ["b"], ["c", "d"]]


def test_a_file_of_a_server_without_ranges_is_whole(tmp_path):
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "9")
            self.end_headers()
            self.wfile.write(b'{"a": 12}')

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        fetching.FetchedFiles(folders.ModelFolder(address), tmp_path).fetch(["config.json"])
        server.shutdown()
    assert (tmp_path / "config.json").read_text() == '{"a": 12}'
    assert len(requests) <= 4


def test_a_file_that_ends_with_an_error_is_not_there(tmp_path):
    """A server that refuses the rest of a file: its beginning is no file."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            start, last = map(int, self.headers["Range"].split("=")[1].split("-"))
            if start > 0:
                self.send_error(status)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes 0-{last}/{20 << 20}")
            self.send_header("Content-Length", str(last + 1))
            self.send_header("ETag", '"x"')
            self.end_headers()
            self.wfile.write(bytes(last + 1))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for status in (404, 403):
            files = fetching.FetchedFiles(folders.ModelFolder(address), tmp_path)
            with pytest.raises(OSError, match=str(status)):
                files.fetch(["merges.txt"])
        server.shutdown()


def test_tensors_that_are_handed_out_once():
    once = weights.SingleUseTensor(torch.ones(2))
    assert once.dtype == torch.float32 and once[0] == 1
    assert_same(once[...], torch.ones(2))
    with pytest.raises(RuntimeError, match="handed out before"):
        once[...]


def test_casts_of_models_are_those_of_loads():
    eight = torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"a.weight": eight, "a.bias": torch.ones(1), "norm.weight": torch.ones(1)}
    diffusers_models._cast(tensors, torch.bfloat16, ["norm"])
    found = {name: tensor.dtype for name, tensor in tensors.items()}
    assert found == {
        "a.weight": torch.float8_e4m3fn,
        "a.bias": torch.bfloat16,
        "norm.weight": torch.float32,
    }
    for argument in ("dtype", "torch_dtype"):
        with pytest.raises(ValueError, match="dtype=torch.int8: expected a floating-point"):
            from_pretrained("nowhere", **{argument: torch.int8})


def test_links_of_a_local_folder_are_followed_once(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1/model.safetensors").write_bytes(b"")
    (tmp_path / "current").symlink_to("v1")
    for given in (tmp_path / "current", tmp_path / "current/model.safetensors"):
        found = folders.ModelFolder(given)
        assert found.path == (tmp_path / "v1").resolve()
        assert found.shown == str(given)
        assert found.file in (None, str(found.path / "model.safetensors"))
