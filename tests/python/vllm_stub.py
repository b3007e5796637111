"""A package called vllm with as much of vLLM's loaders as a load format meets, and a model.

For machines without vLLM, whose own loaders tests/python/test_vllm_engine.py takes. The shapes are
those of release 0.24.
"""

import stubs
import torch

FILES = {
    "vllm/__init__.py": "",
    "vllm/config/__init__.py": """
current = None
def get_current_vllm_config():
    return current
""",
    "vllm/distributed/__init__.py": """
import torch.distributed as dist
def get_tensor_model_parallel_rank():
    return dist.get_rank() if dist.is_initialized() else 0
""",
    "vllm/distributed/parallel_state.py": """
group = None
class Coordinator:
    @property
    def device_group(self):
        return group

def model_parallel_is_initialized():
    return group is not None

def get_tp_group():
    return Coordinator()
""",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/models/__init__.py": "",
    "vllm/model_executor/models/utils.py": """
def get_pp_missing_layer_names(model):
    return getattr(model, "missing", [])
""",
    "vllm/model_executor/model_loader/__init__.py": """
from .default_loader import DefaultModelLoader

loaders = {"auto": DefaultModelLoader}

def register_model_loader(load_format):
    def register(loader):
        assert load_format not in loaders
        loaders[load_format] = loader
        return loader
    return register

def get_model_loader(load_config):
    return loaders[load_config.load_format](load_config)
""",
    "vllm/model_executor/model_loader/base_loader.py": """
class BaseModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config

    def load_model(self, vllm_config, model_config, prefix=""):
        model = model_config.build()
        self.load_weights(model, model_config)
        model.processed = True
        return model.eval()
""",
    "vllm/model_executor/model_loader/ep_weight_filter.py": """
def should_skip_weight(name, local):
    expert = name.partition(".experts.")[2].partition(".")[0]
    return local is not None and expert.isdigit() and int(expert) not in local
""",
    "vllm/model_executor/model_loader/sharded_state_loader.py": """
import glob, os
from .base_loader import BaseModelLoader

class ShardedStateLoader(BaseModelLoader):
    DEFAULT_PATTERN = "model-rank-{rank}-part-{part}.safetensors"

    def load_weights(self, model, model_config):
        from vllm.distributed import get_tensor_model_parallel_rank
        name = self.DEFAULT_PATTERN.format(rank=get_tensor_model_parallel_rank(), part="*")
        state = model.state_dict()
        paths = glob.glob(os.path.join(model_config.model, name))
        for key, tensor in self.iterate_over_files(paths):
            state.pop(key).copy_(tensor)
        assert not state

    def iterate_over_files(self, paths):
        raise AssertionError("vLLM's own weights were asked for")
""",
    "vllm/model_executor/model_loader/default_loader.py": """
import dataclasses, glob, os
from .base_loader import BaseModelLoader

class DefaultModelLoader(BaseModelLoader):
    @dataclasses.dataclass
    class Source:
        model_or_path: str
        revision: str | None
        subfolder: str | None = None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: list | None = None

    counter_before_loading_weights = 0.0
    downloaded = ()

    def __init__(self, load_config):
        super().__init__(load_config)
        self.local_expert_ids = None
        if load_config.model_loader_extra_config:
            raise ValueError("Unexpected extra config keys")

    def _prepare_weights(
        self, model_name_or_path, subfolder, revision, fall_back_to_pt, allow_patterns_overrides
    ):
        if self.load_config.load_format != "auto":
            raise ValueError("Unknown load_format")
        if not os.path.isdir(model_name_or_path):
            self.downloaded = (*self.downloaded, model_name_or_path)
            model_name_or_path = self.load_config.download_dir
        folder = os.path.join(model_name_or_path, subfolder or "")
        for pattern in allow_patterns_overrides or ["*.safetensors", "*.bin", "*.pt"]:
            files = glob.glob(os.path.join(folder, pattern))
            if files:
                return folder, files, pattern.endswith(".safetensors")
        raise RuntimeError(f"Cannot find any model weights with `{folder}`")

    def _get_weights_iterator(self, source):
        raise AssertionError("vLLM's own weights were asked for")

    def get_all_weights(self, model_config, model):
        overrides = getattr(model, "allow_patterns_overrides", None)
        yield from self._get_weights_iterator(
            self.Source(
                model_config.model, model_config.revision, allow_patterns_overrides=overrides
            )
        )
        for source in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(source)

    def download_model(self, model_config):
        self._prepare_weights(
            model_name_or_path=model_config.model, subfolder=None, revision=model_config.revision,
            fall_back_to_pt=True, allow_patterns_overrides=None,
        )

    def load_weights(self, model, model_config):
        self.local_expert_ids = model_config.experts
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        missing = {name for name, _ in model.named_parameters()} - loaded
        if missing:
            raise ValueError(f"Following weights were not initialized from checkpoint: {missing}")
""",
}


def write(folder):
    """Write the package, and return the folder."""
    return stubs.write(FILES, folder)


def forget(monkeypatch):
    """Have the engine and the plugin imported anew, until the test ends."""
    stubs.forget(monkeypatch, "vllm", "tensorizer_vllm")


def install(monkeypatch, folder):
    """Have the package of a folder imported, and the plugin anew, until the test ends."""
    stubs.install(monkeypatch, FILES, folder, "tensorizer_vllm")


class Model(torch.nn.Module):
    """A model whose weights are copied in, as vLLM's are."""

    def __init__(self, device="cpu"):
        super().__init__()
        # The emulated CUDA has no kernels to initialize weights.
        self.first = torch.nn.utils.skip_init(torch.nn.Linear, 8, 16, device=device)
        self.second = torch.nn.utils.skip_init(torch.nn.Linear, 16, 4, device=device)
        self.devices, self.names = set(), []

    def load_weights(self, weights):
        for name, tensor in weights:
            self.names.append(name)
            self.devices.add(tensor.device)
            if name in dict(self.named_parameters()):
                self.get_parameter(name).data.copy_(tensor)
        return set(self.names)
