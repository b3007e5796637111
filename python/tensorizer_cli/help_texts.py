"""The end of each command's help: examples, and the meanings of columns."""

from __future__ import annotations

import textwrap

#: Texts before the examples, by the name of the command.
_NOTES = {
    "ls": """\
columns:
  name   name of the tensor; in a nested structure its path, as JSON
  dtype  name of the dtype in torch
  shape  dimensions
  bytes  number of bytes of its data in the file
  type   param or buffer for a module, or state_dict
""",
    "cp": """\
A target that ends with a slash, or is a folder, gets the name of the file; - is the standard input
for a file, and the standard output for a target.
""",
    "cache": """\
columns of ls:
  last use, bytes in the cache, size and address of each file
""",
}
#: The examples of each command.
_EXAMPLES = {
    "ls": """\
tensorizer ls model.tensors
tensorizer ls hf://Qwen/Qwen2-0.5B
cat model.tensors | tensorizer ls -""",
    "info": """\
tensorizer info model.safetensors.index.json
tensorizer info --depth 1 s3://bucket/model.tensors""",
    "load": """\
tensorizer load s3://bucket/model.tensors
tensorizer load --device cuda --verify model.tensors""",
    "verify": """\
tensorizer verify model.tensors
tensorizer verify --key-file key.bin https://host/encrypted.tensors""",
    "diff": """\
tensorizer diff model.tensors model.safetensors
tensorizer diff --key-file key.bin encrypted.tensors model.tensors""",
    "cp": """\
tensorizer cp model-folder/ model.tensors
tensorizer cp model.tensors model.safetensors --max-shard-size 5GB
tensorizer cp hf://Qwen/Qwen2-0.5B s3://bucket/models/
tensorizer cp --no-weights s3://bucket/llama llama    # config.json, the tokenizer and so on
tensorizer cp model.tensors - | ssh host 'cat > model.tensors'""",
    "encrypt": """\
tensorizer keygen key.bin
tensorizer encrypt --key-file key.bin model.tensors encrypted.tensors""",
    "decrypt": "tensorizer decrypt --key-file key.bin encrypted.tensors model.tensors",
    "rekey": "tensorizer rekey --key-file old.bin --new-key-file new.bin old.tensors new.tensors",
    "cache": """\
TENSORIZER_CACHE=/var/cache/models tensorizer cache ls
tensorizer cache clear --folder /var/cache/models""",
    "keygen": """\
tensorizer keygen key.bin
export KEY=$(tensorizer keygen -)    # for --key-env KEY""",
    "completion": """\
tensorizer completion bash > ~/.local/share/bash-completion/completions/tensorizer
tensorizer completion zsh > ~/.zfunc/_tensorizer    # a folder of fpath
tensorizer completion fish > ~/.config/fish/completions/tensorizer.fish""",
}


def epilog(command: str) -> str:
    """Return the end of a command's help."""
    note = f"{_NOTES[command]}\n" if command in _NOTES else ""
    return f"{note}examples:\n{textwrap.indent(_EXAMPLES[command], '  ')}"
