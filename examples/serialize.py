"""Saves a model of transformers to a file, or straight to S3.

python examples/serialize.py [URI] [--model NAME]

A URI is a path, ``model.tensors`` if there is none, or ``s3://bucket/key``. NAME is one of Hugging
Face's hub, or a folder; without it the model is a small one that needs no network.
Needs ``pip install transformers``.
"""

import argparse

import torch
from small_model import config_of
from tensorizer import TensorSerializer
from tensorizer.utils import convert_bytes
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description="Save a model of transformers.")
    parser.add_argument("uri", nargs="?", default="model.tensors")
    parser.add_argument("--model", metavar="NAME")
    args = parser.parse_args()

    if args.model is not None:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(None))

    # An error in the block leaves what was at the address before.
    with TensorSerializer(args.uri) as serializer:
        serializer.write_module(model)
    print(f"saved {convert_bytes(serializer.total_tensor_bytes)} to {args.uri}")


if __name__ == "__main__":
    main()
