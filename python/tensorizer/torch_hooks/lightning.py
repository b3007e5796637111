"""The plugin for Lightning's trainers, which saves a checkpoint as two files."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .._native import check_target, local_path
from ..checkpoints.save_lock import SaveLock
from .save_and_load import tensorizer_loading, tensorizer_saving

#: The modules that define ``CheckpointIO``: of ``lightning``, and of ``pytorch_lightning``.
_INTERFACES = (
    "lightning.fabric.plugins.io.checkpoint_io",
    "lightning_fabric.plugins.io.checkpoint_io",
)
#: The default of `map_location`, as in Lightning: tensors stay in host memory.
_AS_READ = "cpu"


class TensorizerCheckpointIO:
    """Saves the checkpoints of a Lightning ``Trainer`` or ``Fabric`` through tensorizer.

    By default, Lightning saves to memory first, where :func:`tensorizer_saving` has no effect. This
    plugin saves to the path of the checkpoint: ``last.ckpt`` has the structure, and
    ``last.ckpt.tensors`` in the same folder has the bytes. Both files appear or neither, and both
    are removed together. Checkpoints that Lightning wrote without the plugin still load.

    Args:
        saving: Arguments of :func:`tensorizer_saving`, such as ``hashes`` or ``encryption``.
        loading: Arguments of :func:`tensorizer_loading`, such as ``verify_hash`` or ``encryption``.

    """

    def __init__(
        self, *, saving: Mapping[str, Any] | None = None, loading: Mapping[str, Any] | None = None
    ) -> None:
        self._saving, self._loading = dict(saving or {}), dict(loading or {})
        # Refuses arguments that no checkpoint could use.
        tensorizer_saving(**self._saving)
        tensorizer_loading(**self._loading)
        loaded = [name for name in _INTERFACES if name.partition(".")[0] in sys.modules]
        for name in loaded or _INTERFACES:
            # Trainers check that a plugin is an instance of this interface. Neither package must be
            # there.
            with contextlib.suppress(ImportError):
                interface: Any = importlib.import_module(name)
                interface.CheckpointIO.register(type(self))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint.

        Args:
            checkpoint: The states of the model and the trainer.
            path: The file of the structure; the folders above it are made.
            storage_options: None.

        Raises:
            TypeError: ``storage_options`` were given.
            ValueError: The path is an address, also a misspelled one, or begins with ``~/``.
            OSError: A file cannot be written; the earlier checkpoint of this path is as it was.

        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options: expected None")
        file = _local(path)
        check_target(str(file))
        file.parent.mkdir(parents=True, exist_ok=True)
        with tensorizer_saving(**self._saving):
            torch.save(checkpoint, file)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = _AS_READ,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return a checkpoint.

        Args:
            path: The file of the structure, or a link to it.
            map_location: The devices of its tensors; see ``torch.load``.
            weights_only: See ``torch.load``.

        Raises:
            FileNotFoundError: One of the two files is not there.
            ValueError: The path is an address.
            PairMismatchError, HashMismatchError, CryptographyError: See :func:`tensorizer_loading`.

        """
        # The file of bytes lies beside the file that a link names.
        file = Path(os.path.realpath(_local(path)))
        if not file.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        with tensorizer_loading(**self._loading):
            return torch.load(file, map_location=map_location, weights_only=weights_only)  # type: ignore[no-any-return]

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove both files of a checkpoint, or a folder. A link is removed without its target.

        Raises:
            ValueError: The path is an address.
            OSError: A file cannot be removed.

        """
        file = _local(path)
        if file.is_symlink():
            file.unlink()
        elif file.is_dir():
            shutil.rmtree(file)
        else:
            tensors = file.with_name(f"{file.name}.tensors")
            # A save in the background may be about to put one of them there.
            with SaveLock(tensors):
                file.unlink(missing_ok=True)
                tensors.unlink(missing_ok=True)

    def teardown(self) -> None:
        """Do nothing: the plugin holds nothing to release."""


def _local(path: str | os.PathLike[str]) -> Path:
    """Return a path of this machine.

    Raises:
        ValueError: It is an address.

    """
    text = os.fsdecode(path)
    local = local_path(text)
    if local is None:
        raise ValueError(f"{text}: expected the path of a local checkpoint, found an address")
    return Path(local)
