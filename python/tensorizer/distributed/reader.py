"""Reading the checkpoints of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..file.encryption import DecryptionParams
from ..file.tensor_file import TensorFile
from ..tensors.exchange import dtype_of
from . import layout


class Reader(StorageReader):
    """Loads what :class:`Writer` has saved, into any number of ranks and any placement.

    ``dcp.load(state, storage_reader=Reader("s3://bucket/step-100"))``. Every rank reads only the
    bytes of its own part, directly into its tensors where they are contiguous and of the same
    dtype.

    Args:
        uri: The folder; None where ``dcp.load(checkpoint_id=...)`` names it.
        verify_hash: Compare every tensor with the hashes in its file, for which it is read as a
            whole. ``"crc32"`` compares the cheap one only.
        encryption: What encrypted files are decrypted with.
        num_readers: Threads that read at once; None for as many as help.
        weights_only: Refuse what is no tensor unless torch's restricted unpickler takes it. Without
            that, a checkpoint can run any code.

    Raises:
        OSError: There is no checkpoint, or it cannot be read.
        FormatError: A file is damaged, or not one of this checkpoint.
        HashMismatchError, CryptographyError: See :class:`tensorizer.TensorDeserializer`.
        pickle.UnpicklingError: The restricted unpickler refuses an object.

    """

    def __init__(
        self,
        uri: str | os.PathLike[Any] | None = None,
        *,
        verify_hash: bool | str = False,
        encryption: DecryptionParams | None = None,
        num_readers: int | None = None,
        weights_only: bool = True,
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] = {
            "verify_hash": verify_hash,
            "encryption": encryption,
            "num_readers": num_readers,
        }
        self._weights_only = weights_only
        self._folder = ""
        self._metadata: dcp.Metadata | None = None
        if uri is not None:
            self.reset(uri)

    @property
    def checkpoint_id(self) -> str:
        """The folder."""
        return self._folder

    # What torch.distributed.checkpoint calls, in this order

    def reset(self, checkpoint_id: str | os.PathLike[Any] | None = None) -> None:
        """Read what a folder says that it holds."""
        if checkpoint_id:
            # Here, as torch passes over what read_metadata raises.
            self._folder = layout.folder_of(checkpoint_id)
            self._metadata, _ = layout.read(self._folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return what the checkpoint holds."""
        if self._metadata is None:
            raise ValueError("expected Reader(uri) or checkpoint_id=")
        return self._metadata

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Learn where the items are."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank, file by file."""
        places: dict[dcp.MetadataIndex, layout.Place] = self.read_metadata().storage_data
        by_file: dict[str, list[tuple[ReadItem, str]]] = {}
        for item in plan.items:
            place = places[item.storage_index]
            by_file.setdefault(place.file, []).append((item, place.name))
        for name, items in by_file.items():
            with TensorFile(layout.join(self._folder, name), **self._options) as file:
                self._read_objects(file, items, planner)
                self._read_tensors(file, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_objects(
        self, file: TensorFile, items: list[tuple[ReadItem, str]], planner: LoadPlanner
    ) -> None:
        found = [(item, layout.find(file, name)) for item, name in items if _is_object(item)]
        for item, number in found:
            (_, loaded, _), *_ = file.load([number], torch.device("cpu"))
            data = io.BytesIO(loaded.numpy().tobytes())
            if self._weights_only:
                # A planner unpickles without restriction what has passed here.
                torch.load(data, map_location="cpu", weights_only=True)
                data.seek(0)
            planner.load_bytes(item, data)

    def _read_tensors(
        self, file: TensorFile, items: list[tuple[ReadItem, str]], planner: LoadPlanner
    ) -> None:
        wanted = [(item, layout.find(file, name)) for item, name in items if not _is_object(item)]
        slices = []
        for item, number in wanted:
            ends = zip(item.storage_offsets, item.lengths, strict=True)
            slices.append((number, [(start, start + length) for start, length in ends]))
        if not wanted:
            return
        sliced = file.sliced(slices)
        targets = [planner.resolve_tensor(item).detach() for item, _ in wanted]
        direct: list[int] = []
        for at, ((item, _), target) in enumerate(zip(wanted, targets, strict=True)):
            dtype, shape, _ = sliced.reader.describe(at)
            if list(target.shape) != shape:
                raise ValueError(
                    f"{item.dest_index.fqn!r}: the checkpoint has {shape} for it, and the tensor "
                    f"to load into is {list(target.shape)}"
                )
            fits = target.dtype == dtype_of(dtype) and target.is_contiguous()
            if fits and not target.is_meta and file.can_fill_on(target.device):
                direct.append(at)
        if direct:
            sliced.fill([targets[at] for at in direct], direct)
        others = sorted(set(range(len(targets))) - set(direct))
        for at, tensor, _ in sliced.load(others, torch.device("cpu")):
            targets[at].copy_(tensor)
        for (item, _), target in zip(wanted, targets, strict=True):
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[Any]) -> bool:
        """Tell whether a folder can be named so."""
        return isinstance(checkpoint_id, (str, os.PathLike))


def _is_object(item: ReadItem) -> bool:
    return item.type is LoadItemType.BYTE_IO
