"""``tensorizer cp --no-weights``: the configuration and the tokenizer of a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from tensorizer._native import local_path
from tensorizer.stream_io import open_stream
from tensorizer.streams.addresses import is_there
from tensorizer.transformers.configs import CONFIG, fetch_without_weights
from tensorizer.transformers.fetching import fetched_files
from tensorizer.transformers.folders import ModelFolder

from .arguments import SECRETS
from .file_description import size
from .output import Report, plural, without_password
from .targets import STREAM

#: The name of the weights of a model that is copied whole.
_WEIGHTS = "model.tensors"
#: Options that concern the weights.
_OF_WEIGHTS = (
    *("alignment", "verify", "max_shard_size", "drop_metadata", "skip_objects"),
    *(name.replace("-", "_") for name in SECRETS),
)


def copy(options: argparse.Namespace) -> int:
    """Copy the small files of a model into a folder; each appears complete or not at all.

    Raises:
        ValueError: An option is given that concerns the weights.
        OSError: The model has no configuration, or a file cannot be read or written.

    """
    for name in _OF_WEIGHTS:
        if getattr(options, name):
            raise ValueError(f"--no-weights and --{name.replace('_', '-')} exclude each other")
    if options.target in ("", STREAM):
        raise ValueError(f"expected a folder to copy to, found {options.target!r}")
    report = Report(options)
    target = (local_path(options.target) or options.target).rstrip("/")
    names, total = copy_files(options.file, target)
    shown = without_password(target)
    report.done(f"copied: {plural(len(names), 'file')}, {size(total)}, to {shown}")
    report.result(file=ModelFolder(options.file).shown, target=shown, files=names, bytes=total)
    return 0


def folder_to_copy(options: argparse.Namespace) -> str | None:
    """Return the folder into which a whole model is copied, and make its weights the target.

    That is so if a model's folder, with its configuration, is copied to a target that has not the
    name of a file. None for all other copies.
    """
    target = options.target.rstrip("/")
    is_file = target.lower().endswith((".tensors", ".safetensors"))
    if options.command != "cp" or is_file or target in ("", STREAM) or options.file == "/dev/stdin":
        return None
    if target.lower().startswith(("redis://", "rediss://", "/dev/", "/proc/")):
        return None
    path = local_path(options.file)
    if path is not None and not Path(path).is_dir():
        return None
    # An address is that of a folder if it says so, and that of a repository of the hub always.
    says_so = options.file.lower().startswith("hf://") or options.file.endswith("/")
    if path is None and not says_so:
        return None
    folder = ModelFolder(options.file)
    if folder.file is not None or not is_there(folder.join(CONFIG), PermissionError):
        return None
    local = local_path(target)
    if local is not None:
        Path(local).mkdir(parents=True, exist_ok=True)
    options.target = f"{target}/{_WEIGHTS}"
    return local or target


def copy_files(source: str, target: str) -> tuple[list[str], int]:
    """Copy the small files of a model into a folder; return their names and their bytes.

    Raises:
        OSError: The model has no configuration, or a file cannot be read or written.

    """
    total = 0
    with fetched_files(ModelFolder(source)) as files:
        names = fetch_without_weights(files)
        for name in names:
            place = f"{target}/{name}"
            path = local_path(place)
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open_stream(place, "wb") as stream:
                total += stream.write((files.path / name).read_bytes())
    return names, total
