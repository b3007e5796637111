"""``tensorizer cp --no-weights``: the configuration and the tokenizer of a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from tensorizer._native import local_path
from tensorizer.stream_io import open_stream
from tensorizer.transformers.configs import fetch_without_weights
from tensorizer.transformers.fetching import fetched_files
from tensorizer.transformers.folders import ModelFolder

from .arguments import SECRETS
from .file_description import size
from .output import Report, plural, without_password
from .targets import STREAM

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
    folder = ModelFolder(options.file)
    target = (local_path(options.target) or options.target).rstrip("/")
    total = 0
    with fetched_files(folder) as files:
        names = fetch_without_weights(files)
        for name in names:
            place = f"{target}/{name}"
            path = local_path(place)
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open_stream(place, "wb") as stream:
                total += stream.write((files.path / name).read_bytes())
    shown = without_password(target)
    report.done(f"copied: {plural(len(names), 'file')}, {size(total)}, to {shown}")
    report.result(file=folder.shown, target=shown, files=names, bytes=total)
    return 0
