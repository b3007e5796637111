"""The function :func:`save`: one call to save a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import Unpack

from .._types import FileFormat
from ..group import inherited_group  # noqa: F401  # looks at each fork
from ..tensors import sharding
from . import to_safetensors
from .file_writer import FileWriter
from .nesting import named_leaves
from .options import SaveOptions, takes
from .progress import ProgressReporter, ProgressType, data_bytes


@takes(SaveOptions)
def save(
    tensors: Mapping[Any, Any],
    uri: str | os.PathLike[Any] | Any,
    *,
    format: FileFormat | None = None,
    max_shard_size: int | str | None = None,
    progress: ProgressType = False,
    allow_meta: bool = False,
    **options: Unpack[SaveOptions],
) -> None:
    """Save tensors to a file, atomically if it is a path.

    ``DTensor`` are saved as whole tensors, and all processes of their mesh make this call. The
    tensors are gathered a few at a time, and the first process writes them (for a safetensors file,
    once it has all of them in its memory). The call returns on all processes when the file is
    complete.

    Args:
        tensors: Tensors by name. A nested structure of dicts and lists is saved as such, and so is
            a result of :func:`load`.
        uri: The target, as for :class:`TensorSerializer`. A file object stays open, at the end of
            what was saved; a stream of :func:`tensorizer.stream_io.open_stream` is completed.
        format: ``"tensors"`` or ``"safetensors"``. None for ``"safetensors"`` if ``uri`` is a path
            or an address that ends with ``.safetensors`` in any case, otherwise for ``"tensors"``.
            Safetensors files hold tensors by name that share no memory, and support neither hashes
            nor encryption. With None, names that end like those of other formats are refused,
            because their programs could not read such files: ``.pt``, ``.pth``, ``.bin``,
            ``.ckpt``, ``.safetensor``, ``.gguf``, ``.npz``, ``.h5`` and ``.onnx``.
        max_shard_size: Split a safetensors file that would have more bytes of tensors, such as
            ``5_000_000_000``, ``"5GB"`` or ``"4GiB"``: ``model.safetensors`` becomes
            ``model-00001-of-00002.safetensors`` and so on, with ``model.safetensors.index.json``,
            which is written last.
        progress: Called as ``progress(done, total)`` with the bytes of tensor data that are written
            and with their total number, at least at the end, on the calling thread, which waits for
            it. An exception from it ends the call, and the file is abandoned. True shows a bar on a
            terminal or in a notebook.
        allow_meta: True to record names, dtypes and shapes of tensors on the ``meta`` device, which
            a load returns as zeros; otherwise they are refused. Only for ``.tensors`` files.
        options: How the file is written: see :class:`SaveOptions`.

    Raises:
        FileExistsError: The shards would replace other shards, or an existing file would be
            loaded in their place.
        ValueError: A tensor has no data: it is on the ``meta`` device (without ``allow_meta``),
            uninitialised, or a placeholder of DeepSpeed's ZeRO-3.
        OSError, TypeError, ValueError, NotImplementedError: See :class:`TensorSerializer`.

    """
    if to_safetensors.is_safetensors_target(uri, format):
        to_safetensors.refuse_options(options, allow_meta=allow_meta)
        with ProgressReporter(progress) as reporter:
            to_safetensors.save_safetensors(
                tensors, uri, max_shard_size, progress=reporter, **options
            )
        return
    if max_shard_size is not None:
        raise ValueError("max_shard_size= is for safetensors files")
    leaves = named_leaves(tensors)
    reporter = ProgressReporter(progress, data_bytes(leaves[1]))
    # Sharded tensors are gathered and written a few at a time: the index needs room for more.
    any_sharded = any(map(sharding.is_sharded, leaves[1]))

    def opened() -> FileWriter:
        return FileWriter(
            uri,
            progress=reporter,
            allow_meta=allow_meta,
            closes_stream=False,
            room_for_more=any_sharded,
            **options,
        )

    if any_sharded:
        from ..group.gathered_save import GatheredSave  # imported already by code with DTensors

        gathering = GatheredSave(leaves[1], uri)
        with reporter, gathering.members as members:
            target, _ = members.run_on_all(lambda: opened() if gathering.writes else None)

            def write(selected: slice, whole: list[torch.Tensor]) -> None:
                if target is not None:
                    target.write_leaves(leaves[0][selected], whole)

            try:
                gathering.write(*leaves, write)
                members.run_on_all(reporter.finish)
            except BaseException:
                if target is not None:
                    target.abandon()
                raise
            members.run_on_all(lambda: None if target is None else target.close())
        return
    with reporter, opened() as file:
        file.write_leaves(*leaves)
    # Deleted here, and not when this call ends: then memory of tensors is freed, and a Ctrl-C that
    # came meanwhile would be raised in the file's __del__, where Python loses it.
    del file
