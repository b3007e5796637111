"""The functions :func:`load` and :func:`save`: one call to load a file, one to save."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._types import FileFormat, FilterFuncType, Hashes, Head, Name, NameT, VerifyHash
from ..group import inherited  # noqa: F401  # looks at each fork
from ..tensors import sharding
from ..tensors.sharding import Shard
from . import to_safetensors
from .arguments import DeviceOf, DeviceType, names_of
from .choice import Choice
from .encryption import DecryptionParams, EncryptionParams
from .file_writer import FileWriter
from .nesting import named_leaves
from .progress import Progress, ProgressType, data_bytes
from .slices import Index
from .tensor_file import TensorFile

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    clone: bool = False,
    mmap: bool = False,
    encryption: DecryptionParams | None = None,
    verify_hash: VerifyHash = False,
    num_readers: int | None = None,
    memory_limit: int | None = None,
    cache_dir: str | os.PathLike[Any] | None = None,
    progress: ProgressType = False,
) -> dict[NameT, torch.Tensor]:
    """Load the tensors of a file, each straight into the memory where it stays.

    ``names``, ``filter_func``, ``slices``, ``shard`` and ``group`` choose the tensors and parts.
    ``device``, ``out``, ``like``, ``dtype``, ``clone`` and ``mmap`` choose their memory and dtype.
    The other arguments control the reading of the file.

    Args:
        uri: The file, as for :class:`TensorDeserializer`.
        device: The device of the tensors; None for torch's default device. A function is called
            with each tensor's name and returns its device, as for a model that is spread over
            several devices: these are filled at the same time.
        names: Load only these, and return them in this order; a string is one name. Those of nested
            structures are tuples of keys and indices, or in their stored form: U+001E and a JSON
            array.
        filter_func: Called with each tensor's name; those for which it returns something false are
            left out.
        slices: Load only a part of some tensors, and read only its bytes: by name ``(dimension,
            start, end)``, or an index as in brackets, ``(slice(0, 10), ..., 3)``. See
            :class:`TensorSlice`.
        shard: Give every rank its part of each tensor, and read only that: for ranks without
            DTensors. See :class:`Shard`.
        group: A process group whose members all make this call. Every byte is fetched by one member
            and given to the others; members may choose different tensors or parts. If all members
            are on one machine, each of them reads a local file by itself. A failure of one, or
            Ctrl-C, ends the call at all of them, by the time-out of the group at the latest. Views
            of one storage in a checkpoint of ``torch.save`` become separate tensors.
        out: Fill these tensors, by name and on any device, instead of making new ones. They must
            have the dtype and shape of what is loaded, and be contiguous; of a ``DTensor`` the
            local part is filled. Without ``names``, only these are loaded. If the load fails
            half-way, they hold some of the new bytes.
        like: Make tensors like these, by name: on their devices (unless ``device`` is given). For a
            ``DTensor``, the result has its mesh and placements, and this process reads only its
            part. For a tensor on the ``meta`` device, the result is on the device of its mesh, or
            on torch's default device. Shapes are those of the file, and dtypes those of the file
            too, or ``dtype=``. Without ``names``, only these are loaded; values that are no tensors
            are skipped.
        dtype: Cast floating-point tensors.
        clone: On CUDA, give each tensor a storage of its own. Otherwise small tensors share one,
            all of which ``torch.save`` of one of them writes. See :class:`TensorDeserializer`.
        mmap: True to map a file instead of reading it; see :class:`TensorDeserializer`.
        encryption: The key or passphrase of an encrypted file.
        verify_hash: Compare every tensor with the hashes in the file; ``"crc32"`` with the cheap
            one only. For files of a hub see :class:`TensorDeserializer`.
        num_readers: Threads that read at once.
        memory_limit: The most bytes that the load has in flight beside the tensors: buffers of
            connections, staging memory, batches of a group, gaps between tensors that are read
            along. As many connections and batches are used as fit. None for the value of
            ``TENSORIZER_MEMORY_MB``.
        cache_dir: A folder that caches data from an HTTP server or S3 for the next load of the same
            file; None for the folder in ``TENSORIZER_CACHE``. See ``docs/how-to/cache.md``.
        progress: Called with the bytes of tensor data that are loaded and with how many there are,
            at least at the end, as ``progress(done, total)``: on the calling thread, which waits
            for it. What it raises ends the load. True shows a bar where stderr is a terminal.
            With a group, the bytes that this process reads count, and the others at the end.

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
            :class:`TensorDeserializer`. Another member's error is raised at all of them.

    """
    told = Progress(progress)
    members = None
    if group is not None:
        from ..group.members import Members  # torch.distributed is slow to import

        members = Members.of(group)

    def opened(heads: Sequence[Head] | None, wanted: Sequence[Name] | None = None) -> TensorFile:
        return TensorFile(
            uri,
            dtype=dtype,
            num_readers=num_readers,
            verify_hash=verify_hash,
            encryption=encryption,
            mmap=mmap,
            clone=clone,
            heads=heads,
            progress=told,
            cache_dir=cache_dir,
            memory_limit=memory_limit,
            wanted=wanted,
        )

    what = Choice(names_of(names), filter_func, slices or {}, out, like, shard, device)
    if members is None or members.size == 1:
        with told, opened(None, what.asked()) as file:
            return what.load(file, told)
    from .together import open_together  # as above

    with told, members:
        file, by_each = open_together(members, opened)
        with file:
            loaded = what.load_together(file, members, told, by_each=by_each)
            members.done()
            return loaded


def save(
    tensors: Mapping[Any, Any],
    uri: str | os.PathLike[Any] | Any,
    *,
    alignment: int = 64,
    encryption: EncryptionParams | None = None,
    hashes: Hashes = "all",
    format: FileFormat | None = None,
    metadata: Mapping[str, str] | None = None,
    clear_metadata: bool = False,
    max_shard_size: int | str | None = None,
    progress: ProgressType = False,
    memory_limit: int | None = None,
) -> None:
    """Save tensors to a file, atomically if it is a path.

    ``DTensor`` are saved as whole tensors, and all processes of their mesh make this call. The
    tensors are gathered a few at a time, and the first process writes them (for a safetensors file,
    once it has all of them in its memory). The call returns at all processes when the file is
    complete.

    Args:
        tensors: Tensors by name. A nested structure of dicts and lists is saved as such, and so is
            a result of :func:`load`.
        uri: The target, as for :class:`TensorSerializer`.
        alignment: Each tensor's data begin at a multiple of this many bytes in the file.
        encryption: A key to encrypt the tensors' data with.
        hashes: The hashes of each tensor to store; see :class:`TensorSerializer`.
        format: ``"tensors"`` or ``"safetensors"``; None for the latter if ``uri`` is a path or an
            address that ends with ``.safetensors``, and else for the former. Safetensors files hold
            tensors by name, which share no memory, and neither hashes nor encryption. With None,
            names that end with ``.pt``, ``.pth`` or ``.bin`` are refused, because ``torch.load``
            could not read such files.
        metadata: Strings by name, which :func:`tensorizer.info` returns; see
            :class:`TensorSerializer`.
        clear_metadata: True if an encrypted file may have metadata, which is not encrypted.
        max_shard_size: Split a safetensors file that would have more bytes of tensors, as in
            ``5_000_000_000``, ``"5GB"`` or ``"4GiB"``: ``model.safetensors`` becomes
            ``model-00001-of-00002.safetensors`` and so on, with ``model.safetensors.index.json``,
            which is written last.
        progress: Called with the bytes of tensor data that are written and with how many there
            are, at least at the end, as ``progress(done, total)``: on the calling thread, which
            waits for it. What it raises ends the call, and the file is abandoned. True shows a bar
            where stderr is a terminal.
        memory_limit: The most bytes that the save has in flight beside the tensors: see
            :class:`TensorSerializer`.

    Raises:
        FileExistsError: Shards would replace others, or be hidden by a file.
        OSError, TypeError, ValueError, NotImplementedError: See :class:`TensorSerializer`.

    """
    if to_safetensors.is_meant(uri, format):
        to_safetensors.refuse_options(alignment, encryption, hashes)
        with Progress(progress) as told:
            to_safetensors.save_safetensors(
                tensors, uri, metadata, max_shard_size, told, memory_limit=memory_limit
            )
        return
    if max_shard_size is not None:
        raise ValueError("max_shard_size= is for safetensors files")
    leaves = named_leaves(tensors)
    told = Progress(progress, data_bytes(leaves[1]))

    def opened() -> FileWriter:
        return FileWriter(
            uri,
            alignment=alignment,
            encryption=encryption,
            hashes=hashes,
            metadata=metadata,
            clear_metadata=clear_metadata,
            progress=told,
            memory_limit=memory_limit,
        )

    if any(map(sharding.is_sharded, leaves[1])):
        from ..group.gather import Gathering  # imported already by code with DTensors

        with told:
            Gathering(leaves[1]).save(*leaves, opened, told.finish)
        return
    with told, opened() as file:
        file.write_leaves(*leaves)
    # Deleted here, and not when this call ends: then memory of tensors is freed, and a Ctrl-C that
    # came meanwhile would be raised in the file's __del__, where Python loses it.
    del file
