"""Reading the checkpoints of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch
from torch.distributed.checkpoint import metadata as dcp, state_dict_loader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from .._errors import FormatError
from .._native import Call
from .._types import VerifyHash
from ..file.encryption import DecryptionParams
from ..file.open_file import OpenFile
from ..file.options import check_reading
from ..modules.state import without_overlaps
from ..streams.addresses import is_address
from ..tensors import fake_mode
from ..tensors.handles import dtype_of, is_fillable, refuse_short
from . import layout, other_formats
from .items import ItemLocation

#: Bytes loaded at a time where tensors are loaded first and then copied to their targets.
_BATCH_BYTES = 256 << 20
#: The requests of a planner, each with the number of its tensor in a file.
_Wanted: TypeAlias = "list[tuple[ReadItem, int]]"
#: The identity of all checkpoints of torch's own format.
_TORCH = "torch"


class _UnreadableMetadata(dcp.Metadata):
    """Metadata that could not be read: any use of its fields raises the error of reading it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        raise self._error


class Reader(layout.InFolder, FileSystemReader):
    """Loads what :class:`Writer` has saved, into any number of ranks and any placement.

    Folders of torch's own ``FileSystemWriter``, and of safetensors files, are read as well. They
    have no hashes and no encryption. torch's own reader reads the former, of which this class is a
    subclass; their metadata is a pickle, for which an unpickler accepts torch's classes only. At an
    address they are read item by item, one request each.

    ``dcp.load(state, storage_reader=Reader("s3://bucket/step-100"))``. Every rank reads only the
    bytes of its own part, directly into its tensors where they are contiguous and of the same
    dtype.

    Args:
        uri: The folder; None if ``dcp.load(checkpoint_id=...)`` names it.
        verify_hash: Compare every tensor with the hashes in its file; the whole tensor is read for
            this. ``"crc32"`` compares only the CRC-32, which costs little.
        encryption: The key or passphrase of encrypted files.
        num_readers: Threads that read at once; None for as many as help.
        timeout: The seconds that reading the metadata, and reading the items, may take on this
            rank; then it is a ``TimeoutError``. None for no limit.
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
        timeout: float | None = None,
        weights_only: bool = True,
    ) -> None:
        super().__init__("")
        self._options: dict[str, Any] = {
            "verify_hash": verify_hash,
            "encryption": encryption,
            "num_readers": num_readers,
            "timeout": timeout,
        }
        check_reading(**self._options)
        self._weights_only = weights_only
        self._folder = None if uri is None else layout.folder_of(uri)
        self.fs = other_formats.FileSystem()
        #: The folder that is read: that of another format as it was when its metadata was read.
        self.path: str = ""
        self._folder_stat: os.stat_result | None = None
        #: The identity of the checkpoint that this rank has found.
        self._checkpoint_identity: str | None = None

    # torch.distributed.checkpoint calls the methods below in this order. Files are read only in
    # methods whose errors it gathers from all ranks: elsewhere the other ranks would wait for one
    # that has raised.

    def reset(self, checkpoint_id: str | os.PathLike[Any] | None = None) -> None:
        """Set the folder to load from, if one is given."""
        super().reset()
        if checkpoint_id:
            self._folder = layout.folder_of(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return the metadata of the checkpoint, or of the rank that torch gives then.

        Raises:
            other_formats.OfRanksError: Each rank has metadata of its own; torch gives the rank.

        """
        try:
            with Call("Reader.read_metadata", self._options["timeout"]):
                return self._read_metadata(kwargs.get("rank"))
        except other_formats.OfRanksError:
            raise
        except Exception as error:
            # torch would ignore an error raised here, and report that there is no checkpoint.
            return _UnreadableMetadata(error)

    def _read_metadata(self, rank: int | None) -> dcp.Metadata:
        self.path, self._folder_stat = self.checkpoint_id, None
        try:
            found, _ = layout.read(self.path)
        except (FileNotFoundError, PermissionError):
            # Servers that may not list a folder answer with 403 for a missing file.
            if other := self._read_other_format(rank):
                return other
            raise
        if isinstance(found.planner_data, bytes):
            what = f"the planner data of {self.path}"
            found.planner_data = layout.unpickled(found.planner_data, what, self._weights_only)
        self._checkpoint_identity = getattr(found.storage_meta, "save_id", None)
        return found

    def _read_other_format(self, rank: int | None) -> dcp.Metadata | None:
        """Return the metadata of a folder saved otherwise; None if it is of no known format."""
        if not is_address(self.path):
            # Links in the path may change during a load.
            self.path = os.path.realpath(self.path)
            if not Path(self.path).is_dir():
                return None
            self._folder_stat = Path(self.path).stat()
        found: dcp.Metadata | None
        is_torchs = other_formats.is_torchs(self.path, rank)
        if not is_torchs and rank is None and other_formats.is_torchs(self.path, 0):
            raise other_formats.OfRanksError(f"{self.path} has metadata of each rank only")
        self._checkpoint_identity = _TORCH if is_torchs else "safetensors"
        if not is_torchs:
            found = other_formats.safetensors_metadata(self.path, self._options["num_readers"])
        elif self._weights_only:
            found = other_formats.torch_metadata(self.path, rank)
            about = found.storage_meta or dcp.StorageMeta()
            found.storage_meta = dataclasses.replace(about, load_id=self.load_id)
        else:
            found = super().read_metadata(**({} if rank is None else {"rank": rank}))
        if found and (self._options["verify_hash"] or self._options["encryption"] is not None):
            raise ValueError(
                f"{self.checkpoint_id} was not saved by Writer: it has neither hashes to compare "
                "nor encryption"
            )
        return found

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Put the identity of the checkpoint that this rank has found into its plan."""
        return dataclasses.replace(plan, storage_data=self._checkpoint_identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise ``RuntimeError`` if ranks have found different checkpoints."""
        ranks: dict[str, int] = {}
        for rank, plan in enumerate(plans):
            # Planners may make new plans, without the identity.
            if plan.storage_data is not None:
                ranks.setdefault(plan.storage_data, rank)
        if len(ranks) > 1:
            first, other, *_ = ranks.values()
            raise RuntimeError(
                f"ranks {first} and {other} have found different checkpoints at "
                f"{self.checkpoint_id}: one was replaced meanwhile, or each machine has its own "
                "folder there"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank, file by file."""
        checked: Any = other_formats.CheckingPlanner(planner, self.checkpoint_id)
        planner = checked if self._weights_only else planner
        done: Future[None] = Future()
        with Call("Reader.read_data", self._options["timeout"]):
            if self._checkpoint_identity == _TORCH:
                done = super().read_data(plan, planner)
            else:
                self._read_files(plan, planner)
                done.set_result(None)
        before = self._folder_stat
        if before is not None and not os.path.samestat(before, Path(self.path).stat()):
            raise RuntimeError(
                f"{self.path} was replaced while the checkpoint was loaded from it, so tensors may "
                "be of two versions: load it again"
            )
        return done

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        """Return the bytes of an item for torch's reader; at an address by one request."""
        part = super()._slice_file(file, sinfo)
        if not is_address(self.path):
            return part
        size = file.seek(0, os.SEEK_END)
        if sinfo.offset + sinfo.length > size:
            raise FormatError(
                f"{file.name} has {size} bytes: expected an item of {sinfo.length} from "
                f"{sinfo.offset}"
            )
        part.seek(0)
        return io.BytesIO(part.read())

    def _read_files(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        by_file: dict[str, list[tuple[ReadItem, ItemLocation]]] = {}
        for item in plan.items:
            location = self.storage_data[item.storage_index]
            by_file.setdefault(location.file, []).append((item, location))
        for name, items in by_file.items():
            with OpenFile(layout.join(self.path, name), **self._options) as file:
                found = [(item, layout.find(file, location)) for item, location in items]
                _read_objects(file, [one for one in found if _is_object(one[0])], planner)
                _read_tensors(file, [one for one in found if not _is_object(one[0])], planner)


def _read_objects(file: OpenFile, wanted: _Wanted, planner: LoadPlanner) -> None:
    numbers = [*dict.fromkeys(number for _, number in wanted)]
    with fake_mode.suspended():
        loaded = {one: tensor.numpy() for one, tensor, _ in file.load(numbers, torch.device("cpu"))}
    for item, number in wanted:
        planner.load_bytes(item, io.BytesIO(loaded[number].tobytes()))


def _is_object(item: ReadItem) -> bool:
    return item.type is LoadItemType.BYTE_IO


def _read_tensors(file: OpenFile, wanted: _Wanted, planner: LoadPlanner) -> None:
    """Read tensors and parts of tensors into the tensors of a planner.

    The hashes of tensors that are read as a whole are compared without a copy.

    Args:
        file: The file.
        wanted: The requests.
        planner: The planner.

    Raises:
        ValueError: A tensor of the planner has another shape than its request.

    """
    wanted = sorted(wanted, key=lambda one: one[1])
    slices: list[tuple[int, list[tuple[int, int]] | None]] = []
    for item, number in wanted:
        ends = [(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True)]
        is_whole = list(item.lengths) == file.reader.describe(number)[1]
        slices.append((number, None if is_whole else ends))
    parts = file.sliced(slices)
    targets = [planner.resolve_tensor(item).detach() for item, _ in wanted]
    refuse_short((item.dest_index.fqn, t) for (item, _), t in zip(wanted, targets, strict=True))
    direct: list[tuple[int, torch.Tensor]] = []
    for number, target in enumerate(targets):
        dtype, shape, _ = parts.reader.describe(number)
        if list(target.shape) != shape:
            raise ValueError(
                f"{wanted[number][0].dest_index.fqn!r}: the checkpoint has {shape} for it, and the "
                f"tensor to load into is {list(target.shape)}"
            )
        fits = target.dtype == dtype_of(dtype) and is_fillable(target)
        if fits and parts.can_fill_on(target.device) and parts.reader.seekable:
            direct.append((number, target))
    apart = dict(without_overlaps(direct))
    # Of tensors that share memory, such as tied parameters, one of each storage is filled, too.
    shared = {one.untyped_storage().data_ptr(): (n, one) for n, one in direct if n not in apart}
    filled = apart | dict(shared.values())
    if filled:
        parts.fill([*filled.values()], [*filled])
    rest = sorted({*range(len(targets))} - filled.keys())
    for batch in parts.in_batches(rest, parts.length_of(rest), _BATCH_BYTES):
        for number, tensor, _ in parts.load(batch, torch.device("cpu")):
            targets[number].copy_(tensor)
    for (item, _), target in zip(wanted, targets, strict=True):
        planner.commit_tensor(item, target)


def load_state(uri: str | os.PathLike[Any], **options: Any) -> dict[str, Any]:
    """Return the whole state of a checkpoint, nested as it was saved, on the CPU.

    The result is what torch's ``dcp_to_torch_save`` saves: ``torch.save(load_state(uri), path)``.
    It can be saved again as a checkpoint of one process: by ``dcp.save(state,
    storage_writer=Writer(other), no_dist=True)``, or by torch's own ``FileSystemWriter``. Objects
    such as the number of the step are included. A dict whose keys are integers becomes a list, as
    in torch, because the paths in a checkpoint do not distinguish the two.

    Args:
        uri: A folder that :class:`Reader` reads: of :class:`Writer`, of torch, or of safetensors
            files.
        options: The arguments of :class:`Reader`.

    Raises:
        CheckpointException: See :class:`Reader`; it has the error of this process.

    """
    state: dict[str, Any] = {}
    reader, planner = Reader(uri, **options), _EmptyStateDictLoadPlanner()
    state_dict_loader._load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return state
