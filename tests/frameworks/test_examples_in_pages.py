"""Examples of the pages under docs that need libraries which are in this environment only."""

import re

from conftest import ROOT
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from python_conftest import assert_same


def test_prefetch_works_in_diffusers(s3, tmp_path, monkeypatch):
    text = (ROOT / "docs/how-to/load-a-model.md").read_text()
    (code,) = re.findall(r'```python title="with diffusers"\n(.+?)```', text, re.DOTALL)
    assert code.count('device="cuda"') == 1
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    unet = UNet2DModel(8, block_out_channels=(8, 16), norm_num_groups=4, **blocks)
    monkeypatch.chdir(tmp_path)
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained("ddpm")
    for path in (tmp_path / "ddpm/unet").iterdir():
        s3.client().upload_file(path, "bucket", f"ddpm/unet/{path.name}")
    # The pipeline is not to read them itself.
    (tmp_path / "ddpm/unet/diffusion_pytorch_model.safetensors").unlink()
    ran = {}
    exec(code.replace('device="cuda"', 'device="cpu"'), ran)
    assert ran["pipeline"].unet is ran["unet"]
    for name, tensor in unet.state_dict().items():
        assert_same(ran["unet"].state_dict()[name], tensor)
    assert len(ran["pipeline"](num_inference_steps=1).images) == 1
