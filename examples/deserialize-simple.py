"""Loads into a model what serialize.py has saved, with as little code as that takes.

python examples/deserialize-simple.py [URI] [--model NAME]

URI and NAME are those of serialize.py; the URI may be ``https://host/model.tensors`` too.
Needs ``pip install transformers``.
"""

import argparse

import torch
from small_model import config_of
from tensorizer import TensorDeserializer
from tensorizer.utils import no_init_or_tensor
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser(description="Load a model of transformers.")
parser.add_argument("uri", nargs="?", default="model.tensors")
parser.add_argument("--model", metavar="NAME")
args = parser.parse_args()

# Its parameters have shapes, and neither memory nor values yet.
with no_init_or_tensor():
    model = AutoModelForCausalLM.from_config(config_of(args.model))

# To CUDA if there is any, else to the CPU.
TensorDeserializer(args.uri).load_into_module(model, strict=True)

tokens = torch.tensor([[1, 2, 3]], device=model.device)
print(model.eval().generate(tokens, max_new_tokens=8, do_sample=False).tolist()[0])
