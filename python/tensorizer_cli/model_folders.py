"""``tensorizer cp`` of the folder of a model, or of all but its weights."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from tensorizer._native import check_tensors_name, local_path, model_files
from tensorizer.stream_io import open_stream
from tensorizer.streams.addresses import is_there
from tensorizer.transformers.configs import CONFIG, fetch_without_weights
from tensorizer.transformers.fetching import fetched_files
from tensorizer.transformers.folders import ModelFolder

from .arguments import SECRETS
from .file_description import size
from .output import Report, plural, without_password
from .targets import STREAM

#: The name of the weights in the copy of a model.
WEIGHTS = "model.tensors"
#: The beginnings of names that are never folders of models.
_NO_FOLDERS = ("redis://", "rediss://", "/dev/", "/proc/")
#: Files by which folders are recognised that are no model's.
_OTHER_FOLDERS = {"adapter_config.json": "an adapter", "model_index.json": "a pipeline"}
#: Options that concern the weights.
_OF_WEIGHTS = (
    *("alignment", "verify", "max_shard_size", "drop_metadata", "skip_objects", "sha256", "sums"),
    *("key", "require_manifest", "num_readers", "memory_limit"),
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
    target = _folder(options.target)
    with ModelCopy(ModelFolder(options.file), target) as model:
        names, total = model.write_files()
    shown = without_password(target)
    report.done(f"copied: {plural(len(names), 'file')}, {size(total)}, to {shown}")
    report.result(file=ModelFolder(options.file).shown, target=shown, files=names, bytes=total)
    return 0


class ModelCopy(contextlib.AbstractContextManager["ModelCopy"]):
    """A copy of what a model has beside its weights; fetched here, and written later.

    Args:
        source: The folder of the model.
        target: The path or address of the folder of the copy.

    Raises:
        OSError: The model has no configuration, or a file cannot be read.

    """

    def __init__(self, source: ModelFolder, target: str) -> None:
        self.source, self.target = source, target
        with contextlib.ExitStack() as opened:
            self._files = opened.enter_context(fetched_files(source))
            self._names = fetch_without_weights(self._files)
            self._opened = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def make_folder(self) -> None:
        """Make the folder of the copy, which must not hold another model.

        Raises:
            FileExistsError: It does: the copy would be mixed with it, or never be loaded.

        """
        weights = model_files()[0]
        before = weights[: weights.index(WEIGHTS)]
        for name in (CONFIG, *before):
            if is_there(f"{self.target}/{name}", PermissionError):
                raise FileExistsError(
                    f"{without_password(self.target)} holds a model already ({name}): remove it, "
                    "or name another folder"
                )
        local = local_path(self.target)
        if local is not None:
            Path(local).mkdir(parents=True, exist_ok=True)

    def write_files(self) -> tuple[list[str], int]:
        """Write the files; return their names and their bytes.

        Each appears complete or not at all. The configuration comes last: without it, the folder is
        no model's.
        """
        total = 0
        for name in sorted(self._names, key=lambda name: (name == CONFIG, name)):
            place = f"{self.target}/{name}"
            path = local_path(place)
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open_stream(place, "wb") as stream:
                total += stream.write((self._files.path / name).read_bytes())
        return self._names, total


def whole_model(options: argparse.Namespace) -> ModelCopy | None:
    """Return the copy of a whole model, and make its weights the file and the target to copy.

    That is a copy of a folder with a configuration to a target that is no file: neither its ending
    nor what is there says so. The address of a folder of an HTTP server ends with a slash. None for
    all other copies.

    Raises:
        ValueError: The target ends like a file of another format.
        OSError: See :class:`ModelCopy`.

    """
    file, target = options.file, options.target
    is_file = target.lower().endswith((".tensors", ".safetensors")) or target.endswith("://")
    if is_file or target in ("", STREAM) or target.lower().startswith(_NO_FOLDERS):
        return None
    path, local = local_path(file), local_path(target)
    is_no_folder = file.endswith("://") or (file.lower().startswith("http") and file[-1] != "/")
    if (
        is_no_folder
        or file.lower().startswith(_NO_FOLDERS)
        or (path is not None and not Path(path).is_dir())
    ):
        return None
    if local is not None and Path(local).is_file():
        return None
    source = ModelFolder(file)
    if source.file is not None:
        return None
    if not is_there(source.join(CONFIG), PermissionError):
        for name, kind in _OTHER_FOLDERS.items():
            if is_there(source.join(name), PermissionError):
                raise ValueError(
                    f"{source.shown} is the folder of {kind} ({name}), which cp does not copy as a "
                    "whole: copy its files one by one"
                )
        return None
    check_tensors_name(target, allows_torch=False)
    model = ModelCopy(source, _folder(target))
    if file.lower().startswith("hf://"):
        # Of the same commit as the other files.
        options.file = source.join("")
    options.target = f"{model.target}/{WEIGHTS}"
    return model


def _folder(target: str) -> str:
    return (local_path(target) or target).rstrip("/") or "/"
