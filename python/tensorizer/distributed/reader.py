"""Reading the checkpoints of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .._types import VerifyHash
from ..file.encryption import DecryptionParams
from ..file.open_file import OpenFile
from ..file.options import check_reading
from ..tensors import fake_mode
from . import layout, other_formats
from .items import ItemLocation, ItemLocations
from .read_into_planner import read_tensors


class _UnreadableMetadata(dcp.Metadata):
    """Metadata that could not be read: any use of its fields raises the error of reading it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        raise self._error


class Reader(StorageReader):
    """Loads what :class:`Writer` has saved, into any number of ranks and any placement.

    Folders of torch's own ``FileSystemWriter``, and of safetensors files, are read as well. They
    have no hashes and no encryption. torch's readers read the local ones; the pickle of torch's
    metadata is read by an unpickler that accepts its classes only. torch's checkpoints at an
    address are read item by item, one request each.

    ``dcp.load(state, storage_reader=Reader("s3://bucket/step-100"))``. Every rank reads only the
    bytes of its own part, directly into its tensors where they are contiguous and of the same
    dtype.

    Args:
        uri: The folder; None if ``dcp.load(checkpoint_id=...)`` names it.
        verify_hash: Compare every tensor with the hashes in its file; the whole tensor is read for
            this. ``"crc32"`` compares only the CRC-32, which costs little.
        encryption: The key or passphrase of encrypted files.
        num_readers: Threads that read at once; None for as many as help.
        weights_only: Refuse objects that torch's restricted unpickler refuses. If false, a
            checkpoint can run any code.

    Raises ``TypeError`` or ``ValueError`` at once for values that no load could use.

    If a load fails on one rank, or in a single process, every rank raises torch's
    ``CheckpointException``. Its ``failures`` hold the following errors by rank.

    Raises:
        OSError: There is no checkpoint, or it cannot be read.
        FormatError: A file is damaged, or not one of this checkpoint.
        RuntimeError: Ranks have found different checkpoints.
        HashMismatchError, CryptographyError: See :class:`tensorizer.TensorDeserializer`.
        pickle.UnpicklingError: The restricted unpickler refuses an object.

    """

    def __init__(
        self,
        uri: str | os.PathLike[Any] | None = None,
        *,
        verify_hash: VerifyHash = False,
        encryption: DecryptionParams | None = None,
        num_readers: int | None = None,
        weights_only: bool = True,
    ) -> None:
        super().__init__()
        check_reading(verify_hash=verify_hash, encryption=encryption, num_readers=num_readers)
        self._options: dict[str, Any] = {
            "verify_hash": verify_hash,
            "encryption": encryption,
            "num_readers": num_readers,
        }
        self._weights_only = weights_only
        self._folder = None if uri is None else layout.folder_of(uri)
        self._locations: Mapping[dcp.MetadataIndex, ItemLocation] | ItemLocations = {}
        #: The identity of the checkpoint that this rank has found.
        self._checkpoint_identity: str | None = None
        #: The reader of a folder that :class:`Writer` did not save.
        self._other_reader: StorageReader | None = None
        #: That folder as it was when its metadata was read.
        self._other_folder: other_formats.FolderIdentity | None = None

    @property
    def checkpoint_id(self) -> str:
        """The folder of the checkpoint."""
        if self._folder is None:
            raise ValueError("expected Reader(uri) or checkpoint_id=")
        return self._folder

    # torch.distributed.checkpoint calls the methods below in this order. Files are read only in
    # methods whose errors it gathers from all ranks: elsewhere the other ranks would wait for one
    # that has raised.

    def reset(self, checkpoint_id: str | os.PathLike[Any] | None = None) -> None:
        """Set the folder to load from, if one is given."""
        if checkpoint_id:
            self._folder = layout.folder_of(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return the metadata of the checkpoint."""
        try:
            found, _ = layout.read(self.checkpoint_id)
            self._other_reader = None
            if isinstance(found.planner_data, bytes):
                what = f"the planner data of {self.checkpoint_id}"
                found.planner_data = layout.unpickled(found.planner_data, what, self._weights_only)
        except (FileNotFoundError, PermissionError) as error:
            # Servers that may not list a folder answer with 403 for a missing file.
            return self._read_other_format(error, *args, **kwargs)
        except Exception as error:
            # torch would ignore an error raised here, and report that there is no checkpoint.
            return _UnreadableMetadata(error)
        return found

    def _read_other_format(self, missing: Exception, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return metadata of a folder saved otherwise, or the error that there is no checkpoint."""
        try:
            folder = self.checkpoint_id
            self._other_folder = other_formats.FolderIdentity.of(folder)
            if self._other_folder is not None:
                folder = self._other_folder.path
            self._other_reader = other_formats.reader_of(
                folder, self._weights_only, self._options["num_readers"]
            )
            if self._other_reader is None:
                return _UnreadableMetadata(missing)
            if self._options["verify_hash"] or self._options["encryption"] is not None:
                raise ValueError(
                    f"{self.checkpoint_id} was not saved by Writer: it has neither hashes to "
                    "compare nor encryption"
                )
            return self._other_reader.read_metadata(*args, **kwargs)
        except Exception as error:
            return _UnreadableMetadata(error)

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Store the locations of the items."""
        if self._other_reader is not None:
            self._other_reader.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
            self._checkpoint_identity = type(self._other_reader).__name__
            return
        self._locations = metadata.storage_data
        self._checkpoint_identity = metadata.storage_meta.save_id if metadata.storage_meta else None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Put the identity of the checkpoint that this rank has found into its plan."""
        if self._other_reader is not None:
            plan = self._other_reader.prepare_local_plan(plan)
        return dataclasses.replace(plan, storage_data=self._checkpoint_identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise ``RuntimeError`` if ranks have found different checkpoints."""
        ranks: dict[str, list[int]] = {}
        for rank, plan in enumerate(plans):
            # Planners may make new plans, without the identity.
            if plan.storage_data is not None:
                ranks.setdefault(plan.storage_data, []).append(rank)
        if len(ranks) > 1:
            first, other, *_ = ranks.values()
            raise RuntimeError(
                f"ranks {first[0]} and {other[0]} have found different checkpoints at "
                f"{self.checkpoint_id}: one was replaced meanwhile, or each machine has its own "
                "folder there"
            )
        return (
            plans if self._other_reader is None else self._other_reader.prepare_global_plan(plans)
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank, file by file."""
        if self._other_reader is not None:
            checked: Any = other_formats.CheckingPlanner(planner, self.checkpoint_id)
            read = self._other_reader.read_data(plan, checked if self._weights_only else planner)
            if self._other_folder is not None:
                self._other_folder.check()
            return read
        by_file: dict[str, list[tuple[ReadItem, ItemLocation]]] = {}
        for item in plan.items:
            location = self._locations[item.storage_index]
            by_file.setdefault(location.file, []).append((item, location))
        for name, items in by_file.items():
            with OpenFile(layout.join(self.checkpoint_id, name), **self._options) as file:
                found = [(item, layout.find(file, location)) for item, location in items]
                self._read_objects(file, [one for one in found if _is_object(one[0])], planner)
                read_tensors(file, [one for one in found if not _is_object(one[0])], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_objects(
        self, file: OpenFile, wanted: list[tuple[ReadItem, int]], planner: LoadPlanner
    ) -> None:
        numbers = dict.fromkeys(number for _, number in wanted)
        with fake_mode.suspended():
            loaded = {one: tensor for one, tensor, _ in file.load([*numbers], torch.device("cpu"))}
            contents = {one: tensor.numpy().tobytes() for one, tensor in loaded.items()}
        for item, number in wanted:
            data = contents[number]
            if self._weights_only:
                # The planner will unpickle the object without restriction.
                what = f"{item.storage_index.fqn!r} of {self.checkpoint_id}"
                layout.unpickled(data, what, weights_only=True)
            planner.load_bytes(item, io.BytesIO(data))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[Any]) -> bool:
        """Return True if the argument is of a type that can name a folder."""
        return isinstance(checkpoint_id, (str, os.PathLike))


def _is_object(item: ReadItem) -> bool:
    return item.type is LoadItemType.BYTE_IO
