"""The function :func:`load`: one call to load a file."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .._types import FilterFuncType, NameT
from ..group import inherited_group  # noqa: F401  # looks at each fork
from ..tensors import fake_mode
from ..tensors.sharding import Shard
from .arguments import DeviceOf, DeviceType, names_of
from .load_plan import LoadPlan
from .open_file import OpenFile
from .options import LoadOptions, refuse_hash_of_group, takes
from .progress import ProgressReporter, ProgressType
from .request import Request
from .slices import Index

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack


@takes(LoadOptions)
def load(
    uri: str | os.PathLike[Any] | Any,
    device: DeviceType | DeviceOf = None,
    *,
    names: Iterable[NameT] | None = None,
    filter_func: FilterFuncType | None = None,
    slices: Mapping[NameT, tuple[int, int, int] | Index] | None = None,
    shard: Shard | None = None,
    group: ProcessGroup | None = None,
    out: Mapping[NameT, torch.Tensor] | None = None,
    like: Mapping[NameT, Any] | None = None,
    dtype: torch.dtype | str | None = None,
    progress: ProgressType = False,
    **options: Unpack[LoadOptions],
) -> dict[NameT, torch.Tensor]:
    """Load the tensors of a file, each straight into the memory where it stays.

    Most calls need ``device``, ``names``, ``dtype``, ``verify_hash`` and ``progress`` only.
    ``names``, ``filter_func``, ``slices``, ``shard`` and ``group`` choose the tensors and parts;
    ``device``, ``out``, ``like`` and ``dtype`` choose their memory and dtype; the options control
    the reading of the file.

    Args:
        uri: The file, as for :class:`TensorDeserializer`. A file object stays
            open, at the end of what was loaded. Another file may begin there, but not behind an
            archive of ``torch.save``, nor behind safetensors at the beginning of a file object.
        device: The device of the tensors; None for torch's default device. A function is called
            with each tensor's name and returns its device, as for a model that is spread over
            several devices: these are filled at the same time.
        names: Load only these, and return them in this order; a string is one name. Names of nested
            structures are tuples of keys and indices, or their stored form: U+001E and a JSON
            array.
        filter_func: Called with each tensor's name; a tensor is left out if it returns something
            false.
        slices: Load only a part of some tensors, and read only its bytes: by name ``(dimension,
            start, end)``, or an index as in brackets, ``(slice(0, 10), ..., 3)``. See
            :class:`TensorSlice`. Ends outside of a dimension are an ``IndexError``.
        shard: Load only this rank's part of each tensor, for programs that do not use DTensors. See
            :class:`Shard`.
        group: A process group whose members all make this call. Every byte is fetched by one member
            and given to the others; members may choose different tensors or parts. If all members
            are on one machine, each of them reads a local file by itself. A failure of one member,
            or Ctrl-C, ends the call on all members, at the latest by the time-out of the group.
            Views of one storage in a checkpoint of ``torch.save`` become separate tensors.
        out: Fill these tensors, by name and on any device, instead of making new ones. They must
            have the dtype and shape of the loaded tensors, and be contiguous. A ``DTensor`` gets
            its local part. Without ``names``, only these are loaded. If the load fails half-way,
            they hold some of the new bytes.
        like: Make tensors like these, by name: on their devices (unless ``device`` is given). For a
            ``DTensor``, the result has its mesh and placements, and this process reads only its
            part. For a tensor on the ``meta`` device, the result is on the device of its mesh, or
            on torch's default device. Shapes are those of the file, and so are dtypes unless
            ``dtype`` is given. Without ``names``, only these are loaded; values other than tensors
            are skipped.
        dtype: Cast floating-point tensors, except those of 8 bits or fewer, which have their scales
            elsewhere.
        progress: Called as ``progress(done, total)`` with the bytes of tensor data that are loaded
            and with their total number, at least at the end, on the calling thread, which waits for
            it. An exception from it ends the load. True shows a bar on a terminal or in a notebook.
            With a group, the bytes that this process reads count at once, and the rest at the end.
        options: How the file is read: see :class:`LoadOptions`.

    Returns:
        Plain tensors (not parameters) by name, in the order of the file. Names of nested
        structures are tuples of keys and indices. :func:`save` takes what this returns.

    Raises:
        KeyError: The file has no tensor of one of the names.
        IndexError, TypeError: A slice does not fit its tensor.
        NotImplementedError: A ``DTensor`` has a placement that is neither ``Shard`` nor
            ``Replicate``.
        GroupError: Another member of the group was lost or interrupted.
        OSError, ValueError, HashMismatchError, CryptographyError: See
            :class:`TensorDeserializer`. An error of one member is raised on all members.

    """
    reporter = ProgressReporter(progress)
    members = None
    refuse_hash_of_group(group, options)
    # Under FakeTensorMode each member makes its tensors alone.
    if group is not None and not fake_mode.is_active():
        from ..group.members import Members  # torch.distributed is slow to import

        members = Members.of(group)

    opened = functools.partial(OpenFile, uri, dtype=dtype, progress=reporter, **options)
    chosen = names_of(names)

    def requested() -> Request:
        return Request(
            chosen, None, filter_func, slices or {}, shard, out=out, like=like, device=device
        )

    if members is None or members.size == 1:
        request = requested()
        with reporter, opened(wanted=request.wanted_names()) as file:
            loaded = LoadPlan(request, file, reporter).load()
            file.seek_behind(uri)
            return loaded
    from .collective_load import load_collectively  # as above

    with reporter:
        return load_collectively(
            members, opened, lambda file: LoadPlan(requested(), file, reporter), reporter
        )
