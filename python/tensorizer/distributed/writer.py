"""Writing the checkpoints of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .._native import Call
from .._types import Hashes
from ..file import file_writer
from ..file.encryption import EncryptionParams
from ..file.file_writer import FileWriter
from ..streams import targets
from ..streams.addresses import is_address
from ..streams.held_folder import HeldPath
from ..streams.open import check_writable, open_stream
from ..tensors.batches import in_batches
from . import folders, layout, save_plan
from .items import ItemLocation

#: Bytes of tensors that are requested from a planner at a time: they may be copies.
_BATCH_BYTES = 256 << 20


class Writer(layout.InFolder, StorageWriter):
    """Saves for ``torch.distributed.checkpoint``, in a folder or below an address.

    ``dcp.save(state, storage_writer=Writer("s3://bucket/step-100"))``, also with ``async_save``.
    Every rank writes one ``.tensors`` file, which appears once it is complete and on the disk. Then
    the coordinator writes ``checkpoint.json``, which completes the checkpoint. Until then an older
    checkpoint in the same folder can be loaded; its files are removed afterwards (on servers they
    stay). Before a save writes, it removes files left by failed or killed saves. Objects other than
    tensors are stored in the format of ``torch.save``.

    Args:
        uri: The folder; None if ``dcp.save(checkpoint_id=...)`` names it.
        encryption: A key to encrypt the tensors' data with, the same on every rank.
            Names and shapes are not encrypted.
        hashes: The hashes of each tensor to store; see :class:`tensorizer.TensorSerializer`.
        timeout: The seconds that writing this rank's file, and completing the checkpoint, may take;
            then it is a ``TimeoutError``. None for no limit.
        overwrite: True if an existing checkpoint may be replaced.

    Raises:
        OSError: A file cannot be written.
        TypeError, ValueError: An option has a value that no save could use, or the address can only
            be read.
        FileExistsError: There is a checkpoint, and ``overwrite`` is false.
        NotImplementedError: A tensor is sparse, quantized or nested.

    """

    def __init__(
        self,
        uri: str | os.PathLike[Any] | None = None,
        *,
        encryption: EncryptionParams | None = None,
        hashes: Hashes = "all",
        timeout: float | None = None,
        overwrite: bool = True,
    ) -> None:
        super().__init__()
        file_writer.check_options(encryption=encryption, hashes=hashes, timeout=timeout)
        self._folder = None if uri is None else _writable_folder(uri)
        self._options: dict[str, Any] = {"encryption": encryption, "hashes": hashes}
        self._timeout = timeout
        self._overwrite = overwrite
        self._rank, self._save_id = 0, ""
        self._folder_lock: folders.FolderLock | None = None

    # torch.distributed.checkpoint calls the methods below in this order.

    def reset(self, checkpoint_id: str | os.PathLike[Any] | None = None) -> None:
        """Begin another checkpoint, in another folder if one is given."""
        self._folder_lock = None
        if checkpoint_id:
            self._folder = _writable_folder(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store the rank of this process, and make a new id for the save."""
        if not kwargs.get("use_collectives", True):
            raise NotImplementedError(
                "use_collectives=False writes a checkpoint for each rank: give each a Writer of "
                "its own folder, and no_dist=True"
            )
        self._rank = kwargs.get("rank") or 0
        self._folder_lock = None
        # A new id: files of an earlier checkpoint must stay until this one is complete.
        self._save_id = secrets.token_hex(8)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Raise if there is a checkpoint that may not be replaced."""
        self._refuse_to_replace()
        # The coordinator compares the folders of all ranks.
        return dataclasses.replace(plan, storage_data=targets.spellings(self.checkpoint_id))

    def _refuse_to_replace(self) -> None:
        if not self._overwrite and layout.is_there(self._open_folder):
            raise FileExistsError(
                f"there is a checkpoint at {self.checkpoint_id}, and overwrite is false"
            )

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Refuse plans of different folders or too large, and remove files left by failed saves."""
        targets.refuse_different([plan.storage_data or () for plan in plans])
        save_plan.check(plans, self.checkpoint_id)
        if not is_address(self.checkpoint_id):
            folders.remove_leftovers(self.checkpoint_id)
            self._folder_lock = self._folder_lock or folders.FolderLock(self.checkpoint_id)
        return plans

    @property
    def _open_folder(self) -> str:
        """The folder that this save holds open; before that, and on servers, its path."""
        return self.checkpoint_id if self._folder_lock is None else self._folder_lock.path

    def _path(self, name: str) -> str | HeldPath:
        lock = self._folder_lock
        return layout.join(self.checkpoint_id, name) if lock is None else lock.entry(name)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of this rank into its file."""
        done: Future[list[WriteResult]] = Future()
        with Call("Writer.write_data", self._timeout, True):
            done.set_result(self._write(plan.items, planner) if plan.items else [])
        return done

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        file = save_plan.file_of(self._rank, self._save_id)
        results: list[WriteResult] = []
        used_names: set[str] = set()
        lengths = list(map(_length, items))
        if not is_address(self.checkpoint_id):
            self._folder_lock = self._folder_lock or folders.FolderLock(self.checkpoint_id)
        with FileWriter(self._path(file), **self._options) as writer:
            for numbers in in_batches(range(len(items)), lengths.__getitem__, _BATCH_BYTES):
                batch = [items[number] for number in numbers]
                names = [save_plan.name_of(item, used_names) for item in batch]
                tensors = [_resolved(item, planner) for item in batch]
                writer.write_leaves(names, tensors)
                results += [
                    WriteResult(item.index, tensor.nbytes, ItemLocation(file, name))
                    for item, tensor, name in zip(batch, tensors, names, strict=True)
                ]
        return results

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``checkpoint.json``, and remove the files of an older checkpoint."""
        with Call("Writer.finish", self._timeout, True):
            locations = {one.index: one.storage_data for of_rank in results for one in of_rank}
            version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
            content = layout.encoded(dataclasses.replace(metadata, version=version), locations)
            before: list[str] = []
            now = {location.file for location in locations.values()}
            self._refuse_to_replace()
            if self._folder_lock is not None:
                folders.check(self._open_folder, now, self.checkpoint_id)
                # The file names of an older checkpoint are unknown if it cannot be read.
                with contextlib.suppress(OSError, ValueError):
                    _, before = layout.read(self._open_folder)
            with open_stream(self._path(layout.FILE), "wb") as file:
                file.write(content)
            folders.remove(self._open_folder, set(before) - now)
            self._folder_lock = None
            metadata.storage_data = locations
            metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> dcp.StorageMeta:
        """Return the folder and the id of the save, for planners."""
        return dcp.StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)


def _writable_folder(uri: str | os.PathLike[Any]) -> str:
    if isinstance(uri, str):
        check_writable(uri)
    return layout.folder_of(uri)


def _length(item: WriteItem) -> int:
    """Return the approximate bytes of an item; 0 for objects."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """Return the tensor of an item; for an object, its ``torch.save`` bytes as a tensor."""
    data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor):
        return data
    assert isinstance(data, io.BytesIO)
    content = bytearray(data.getvalue())
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
