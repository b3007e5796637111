"""Saves a model of transformers with its configuration and tokenizer, and loads all of it again.

python examples/hf_serialization.py INPUT OUTPUT [--model_type transformers] [--validate]

INPUT is a name of Hugging Face's hub or a folder. A folder with a ``config.json`` and no weights
gives a model with random ones. OUTPUT is a folder, or an address such as ``s3://bucket/folder``:
``model.tensors`` and ``model-config.json`` are written there, and the files of the tokenizer, if
there is one and OUTPUT is a folder. ``--validate`` loads the model from there and compares it.
Needs ``pip install transformers``.
"""

import argparse
import json
from pathlib import Path

import torch
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.stream_io import open_stream
from tensorizer.utils import convert_bytes, get_device, no_init_or_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def make_model(source: str) -> torch.nn.Module:
    """Return the model of a folder or of the hub; a random one if the folder has no weights."""
    folder = Path(source)
    if folder.is_dir() and not [*folder.glob("*.safetensors*"), *folder.glob("*.bin*")]:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return AutoModelForCausalLM.from_pretrained(source, dtype="auto")


def save_model(model: torch.nn.Module, prefix: str) -> int:
    """Save a model and its configuration under a prefix; return the bytes of its tensors."""
    with open_stream(f"{prefix}-config.json", "wb") as config:
        config.write(model.config.to_json_string(use_diff=False).encode())
    with TensorSerializer(f"{prefix}.tensors") as serializer:
        serializer.write_module(model)
    return serializer.total_tensor_bytes


def load_model(prefix: str, device: torch.device) -> torch.nn.Module:
    """Return the model that :func:`save_model` has saved."""
    with open_stream(f"{prefix}-config.json") as config:
        fields = json.load(config)
    with device, no_init_or_tensor():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    TensorDeserializer(f"{prefix}.tensors", device, verify_hash=True).load_into_module(model)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Save a model of transformers, and try it.")
    parser.add_argument("input_directory", metavar="INPUT")
    parser.add_argument("output_prefix", metavar="OUTPUT")
    parser.add_argument("--model_type", choices=["transformers"], default="transformers")
    parser.add_argument("--validate", action="store_true")
    args = parser.parse_args()
    prefix = f"{args.output_prefix.rstrip('/')}/model"

    model = make_model(args.input_directory).eval()
    print(f"saved {convert_bytes(save_model(model, prefix))} to {prefix}.tensors")

    tokenizer = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.input_directory)
    except (OSError, ValueError) as error:
        print(f"without a tokenizer: {str(error).splitlines()[0]}")
    if tokenizer is not None and "://" not in args.output_prefix:
        tokenizer.save_pretrained(args.output_prefix)

    if args.validate:
        device = get_device()
        loaded = load_model(prefix, device)
        saved = model.to(device).state_dict()
        assert loaded.state_dict().keys() == saved.keys()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
        tokens = torch.tensor([[1, 2, 3]], device=device)
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
        print(f"loaded to {device}: the same {len(saved)} tensors, and the same answer")


if __name__ == "__main__":
    main()
