"""A package called sglang with as much of SGLang as a load format meets.

For machines without SGLang, whose own loader tests/frameworks/test_sglang.py takes. The shapes are
those of release 0.5.23.
"""

import stubs
import vllm_stub

FILES = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/arg_groups/__init__.py": "",
    "sglang/srt/arg_groups/choices.py": """
LOAD_FORMAT_CHOICES = ["auto", "safetensors"]
add_load_format_choices = LOAD_FORMAT_CHOICES.extend
""",
    "sglang/srt/distributed/__init__.py": "",
    "sglang/srt/distributed/parallel_state.py": vllm_stub.FILES[
        "vllm/distributed/parallel_state.py"
    ],
    "sglang/srt/configs/__init__.py": "",
    "sglang/srt/configs/load_config.py": """
import enum, json
from dataclasses import dataclass, field

class LoadFormat(str, enum.Enum):
    AUTO = "auto"
    SAFETENSORS = "safetensors"
    GGUF = "gguf"

@dataclass
class LoadConfig:
    load_format: object = LoadFormat.AUTO
    download_dir: object = None
    model_loader_extra_config: object = field(default_factory=dict)
    draft_model_idx: object = None

    def __post_init__(self):
        extra = self.model_loader_extra_config or {}
        if isinstance(extra, str):
            self.model_loader_extra_config = json.loads(extra)
        self.load_format = LoadFormat(self.load_format.lower())
""",
    "sglang/srt/model_loader/__init__.py": """
from sglang.srt.model_loader.loader import get_model_loader
""",
    "sglang/srt/model_loader/weight_utils.py": """
import os

def maybe_add_mtp_safetensors(files, folder, index_file, hf_config):
    left_out = os.path.join(folder, "mtp.safetensors")
    return [*files, left_out] if hf_config == "mtp" and os.path.exists(left_out) else files
""",
    "sglang/srt/model_loader/loader.py": """
import dataclasses, glob, os, re
from sglang.srt.configs.load_config import LoadFormat

class GGUFModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config

class DefaultModelLoader:
    _MTP_PATTERN = re.compile(r"model\\.mtp\\.layers\\.(\\d+)\\.")

    @dataclasses.dataclass
    class Source:
        model_or_path: str
        revision: str | None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: list | None = None
        model_config: object = None

    counter_before_loading_weights = 0.0
    downloaded = ()

    def __init__(self, load_config):
        self.load_config = load_config
        if load_config.model_loader_extra_config:
            raise ValueError("Unexpected extra config keys for load format")

    def _prepare_weights(self, model, revision, fall_back_to_pt, allow_patterns_overrides=None):
        if self.load_config.load_format != LoadFormat.AUTO:
            raise ValueError("Unknown load_format")
        if not os.path.isdir(model):
            self.downloaded = (*self.downloaded, model)
            model = self.load_config.download_dir
        for pattern in allow_patterns_overrides or ["*.safetensors", "*.bin", "*.pt"]:
            files = glob.glob(os.path.join(model, pattern))
            if files:
                return model, files, pattern.endswith(".safetensors")
        raise RuntimeError(f"Cannot find any model weights with `{model}`")

    def _get_weights_iterator(self, source, *, resolved_source=None):
        raise AssertionError("SGLang's own weights were asked for")

    @classmethod
    def _filter_mtp_weights(cls, weights_iterator, prefix, draft_model_idx):
        for name, tensor in weights_iterator:
            match = cls._MTP_PATTERN.match(name)
            if match is not None:
                if int(match.group(1)) != draft_model_idx:
                    continue
                name = name.replace(match.group(), "model.mtp.layers.0.")
            yield prefix + name, tensor

    def _get_all_weights(self, model_config, model):
        yield from self._get_weights_iterator(
            self.Source(model_config.model_path, None, model_config=model_config)
        )
        for source in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(source)

    def download_model(self, model_config):
        self._prepare_weights(model_config.model_path, None, fall_back_to_pt=True)

    def load_model(self, *, model_config, device_config):
        model = model_config.build()
        model.load_weights(self._get_all_weights(model_config, model))
        model.processed = True
        return model.eval()

def get_model_loader(load_config, model_config=None):
    if load_config.load_format == LoadFormat.GGUF or model_config == "gguf":
        return GGUFModelLoader(load_config)
    return DefaultModelLoader(load_config)
""",
    "sglang/srt/plugins/__init__.py": """
from importlib.metadata import entry_points
from .hook_registry import HookRegistry

def load_plugins():
    for found in entry_points(group="sglang.srt.plugins"):
        found.load()()
    HookRegistry.apply_hooks()
""",
    "sglang/srt/plugins/hook_registry.py": """
import enum, functools, pkgutil, sys

class HookType(enum.Enum):
    AFTER = "after"
    AROUND = "around"

class HookRegistry:
    _hooks = {}

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER):
        assert target not in cls._hooks
        cls._hooks[target] = hook, hook_type

    @classmethod
    def apply_hooks(cls):
        for target, (hook, kind) in cls._hooks.items():
            path, name = target.rsplit(".", 1)
            holder = pkgutil.resolve_name(path)
            original = getattr(holder, name)

            @functools.wraps(original)
            def wrapped(*args, original=original, hook=hook, kind=kind, **kwargs):
                if kind == HookType.AROUND:
                    return hook(original, *args, **kwargs)
                result = original(*args, **kwargs)
                modified = hook(result, *args, **kwargs)
                return result if modified is None else modified

            setattr(holder, name, wrapped)
            for module in list(sys.modules.values()):
                if getattr(module, name, None) is original:
                    setattr(module, name, wrapped)
""",
}


def write(folder):
    """Write the package, and return the folder."""
    return stubs.write(FILES, folder)


def forget(monkeypatch):
    """Have the engine and the plugin imported anew, until the test ends."""
    stubs.forget(monkeypatch, "sglang", "tensorizer_sglang")


def install(monkeypatch, folder):
    """Have the package of a folder imported, and the plugin anew, until the test ends."""
    stubs.install(monkeypatch, FILES, folder, "tensorizer_sglang")
