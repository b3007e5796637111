"""Stand-ins for diffusers and PEFT, with the parts that ``tensorizer.transformers`` calls.

tests/frameworks runs with the libraries themselves.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch


class TinyModel(torch.nn.Module):
    """A model of diffusers: built from a dictionary, which it keeps."""

    _keep_in_fp32_modules = "norm"
    _keys_to_ignore_on_load_unexpected = (r"^ignored\.",)

    def __init__(self, size):
        super().__init__()
        self.proj = torch.nn.Linear(size, size)
        self.norm = torch.nn.LayerNorm(size)
        self.register_buffer("table", torch.linspace(0, 1, size), persistent=False)

    @classmethod
    def from_config(cls, config, **changes):
        model = cls((config | changes)["size"])
        model.config = {}
        return model

    def register_to_config(self, **more):
        self.config |= more


class PeftConfig:
    """A configuration of PEFT."""

    def __init__(self, said):
        self.task_type = said["task_type"]

    @classmethod
    def from_pretrained(cls, folder):
        return cls(json.loads((Path(folder) / "adapter_config.json").read_text()))


class PeftModel(torch.nn.Module):
    """A model with adapters: here each is a factor."""

    def __init__(self, model, config, adapter_name="default", low_cpu_mem_usage=False):
        super().__init__()
        self.base_model, self.peft_config = model, {}
        self.factors = torch.nn.ParameterDict()
        self.add_adapter(adapter_name, config)

    def add_adapter(self, name, config):
        self.peft_config[name] = config
        self.factors[name] = torch.nn.Parameter(
            torch.zeros(2), requires_grad=not config.inference_mode
        )


class PeftModelForCausalLM(PeftModel):
    pass


def set_peft_model_state_dict(
    model, state, adapter_name, ignore_mismatched_sizes=False, low_cpu_mem_usage=False
):
    model.factors[adapter_name].data.copy_(state["factor"])
    unexpected = [name for name in state if name != "factor"]
    return SimpleNamespace(missing_keys=[], unexpected_keys=unexpected)


def install(monkeypatch):
    """Put the stand-ins in the place of the libraries."""
    contents = {
        "diffusers": [TinyModel],
        "peft": [PeftConfig, PeftModel, PeftModelForCausalLM, set_peft_model_state_dict],
    }
    for name, found in contents.items():
        module = ModuleType(name)
        for one in found:
            monkeypatch.setattr(one, "__module__", name)
            setattr(module, one.__name__, one)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["peft"].MODEL_TYPE_TO_PEFT_MODEL_MAPPING = {"CAUSAL_LM": PeftModelForCausalLM}
