"""Examples of the pages under docs that need libraries which are in this environment only."""

import re

import models
import peft
import tokenizers
import transformers
from conftest import ROOT
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from lightning.pytorch.demos.boring_classes import BoringModel
from python_conftest import assert_same
from tokenizers.models import WordLevel


def example(page, title):
    """Return the example of a page, for the CPU."""
    text = (ROOT / "docs/how-to" / page).read_text()
    (code,) = re.findall(f'```python title="{title}"\n(.+?)```', text, re.DOTALL)
    return code.replace('device="cuda"', 'device="cpu"')


def run(page, title, **names):
    """Run it with some names defined, and return all that it defines."""
    exec(example(page, title), names)
    return names


def upload(s3, folder, name):
    for path in folder.iterdir():
        s3.client().upload_file(path, "bucket", f"{name}/{path.name}")


def save_llama(folder):
    """Save a model with its tokenizer, and return its tensors."""
    model, _ = models.made(models.llama)
    model.save_pretrained(folder)
    plain = tokenizers.Tokenizer(WordLevel({"<unk>": 0, "weights": 1}, unk_token="<unk>"))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")
    made.save_pretrained(folder)
    return model.state_dict()


def assert_same_tensors(module, tensors):
    found = module.state_dict()
    for name, tensor in tensors.items():
        assert_same(found[name], tensor)


def test_a_model_and_its_tokenizer_from_s3(s3, tmp_path):
    tensors = save_llama(tmp_path)
    upload(s3, tmp_path, "llama")
    ran = run("transformers.md", title="from S3")
    assert_same_tensors(ran["model"], tensors)
    assert ran["tokenizer"]("weights")["input_ids"] == [1]


def test_a_model_in_a_block(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = save_llama(tmp_path / "folder")
    assert_same_tensors(run("safetensors.md", title="in a block")["model"], tensors)


def test_a_model_with_adapters(s3, tmp_path):
    save_llama(tmp_path / "llama")
    upload(s3, tmp_path / "llama", "llama")
    for name in ("adapter", "another"):
        base, _ = models.made(models.llama)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)
        peft.get_peft_model(base, config).save_pretrained(tmp_path / name)
        upload(s3, tmp_path / name, name)
    assert set(run("transformers.md", title="with adapters")["model"].peft_config) == {
        "default",
        "other",
    }


def test_a_trainer_of_lightning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("trainer.md", title="with Lightning", model=BoringModel())
    assert (tmp_path / "last.ckpt").exists() and (tmp_path / "last.ckpt.tensors").exists()


def test_prefetch_works_in_diffusers(s3, tmp_path, monkeypatch):
    assert example("load-a-model.md", "with diffusers").count('device="cpu"') == 1
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    unet = UNet2DModel(8, block_out_channels=(8, 16), norm_num_groups=4, **blocks)
    monkeypatch.chdir(tmp_path)
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained("ddpm")
    upload(s3, tmp_path / "ddpm/unet", "ddpm/unet")
    # The pipeline is not to read them itself.
    (tmp_path / "ddpm/unet/diffusion_pytorch_model.safetensors").unlink()
    ran = run("load-a-model.md", title="with diffusers")
    assert ran["pipeline"].unet is ran["unet"]
    assert_same_tensors(ran["unet"], unet.state_dict())
    assert len(ran["pipeline"](num_inference_steps=1).images) == 1
