"""The writer of files, :class:`TensorSerializer`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from .._native import check_tensors_name, cpu_count
from .._types import Name, TensorType
from ..modules import held_elsewhere, state, vllm_files
from ..tensors import sharding, subclasses, without_data
from .file_writer import FileWriter
from .nesting import named_leaves
from .options import SaveOptions, takes
from .progress import ProgressReporter, ProgressType, data_bytes

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Unpack

#: Module indices take 16 bits in the file; modules beyond share the last one.
_LAST_MODULE_INDEX = 0xFFFF


class TensorSerializer:
    """Writes tensors into a ``.tensors`` file.

    A path is written atomically: the old file stays until :meth:`close`. The bytes go to a file in
    the same folder, without a name or with a hidden one. Then that file replaces the old one, and
    gets its owner, group and permissions. An object of S3 or Google, or a blob of Azure, also
    appears only when it is complete. As a context manager the serializer closes at the end of the
    block; if the block raises, nothing appears. Only an empty file that exists and the path of an
    open file, such as ``/dev/stdout``, are written in place, and left empty if the save fails.

    A serializer that is garbage-collected without :meth:`close` finishes its file, with a
    ``RuntimeWarning``. If another file has its name, that file stays unchanged, and the written one
    is named ``<name>.unclosed``. An object on a server is abandoned, and so is a file after a write
    failed half-way. Only the process that made a serializer finishes or removes the file; in a
    forked child, methods raise ``ClosedError``.

    Args:
        file_obj: A path, ``os.PathLike``, ``s3://``, ``gs://`` or ``az://`` address, file
            descriptor (which stays the caller's), or binary file object that can be read, written
            and sought in; the file begins at its position, and it is closed with this object. A
            stream of :func:`tensorizer.stream_io.open_stream` is written by the native code.
        compress_tensors: Has no effect.
        limit_cpu_concurrency: The number of threads that hash and write at once; None for one per
            core.
        progress: Called as ``progress(done, total)`` with the bytes of tensor data that are written
            and with those of all writes that were begun, on the thread of each write. True shows a
            bar on a terminal or in a notebook.
        options: How the file is written: see :class:`SaveOptions`.

    Raises:
        OSError: The file cannot be created, written or, because of its folder, replaced.
        TypeError, ValueError: An argument is not one of the above, the name of the file ends like
            those of another format (such as ``.safetensors``), or the file is encrypted
            and has metadata without ``clear_metadata``. If ``memory_limit`` is less than the
            minimum, the first write raises a ``ValueError`` that states the minimum.

    """

    @takes(SaveOptions)
    def __init__(
        self,
        file_obj: str | bytes | os.PathLike[Any] | int | BinaryIO | Any,
        compress_tensors: bool = False,
        *,
        limit_cpu_concurrency: int | None = None,
        progress: ProgressType = False,
        **options: Unpack[SaveOptions],
    ) -> None:
        if compress_tensors:
            warnings.warn("compress_tensors has no effect", stacklevel=3)
        if isinstance(file_obj, (str, bytes, os.PathLike)):
            check_tensors_name(os.fsdecode(file_obj), allows_torch=True)
        self.compress_tensors = bool(compress_tensors)
        self.total_compressed_tensor_bytes = 0
        self.lz4_frame = None
        self._progress = ProgressReporter(progress, grows=True)
        self._file = FileWriter(
            file_obj,
            limit_cpu_concurrency=limit_cpu_concurrency,
            progress=self._progress,
            allow_meta=True,
            **options,
        )
        self.cpu_limit: int = limit_cpu_concurrency or cpu_count

    @property
    def total_tensor_bytes(self) -> int:
        """Bytes of tensor data written so far."""
        return self._file.total_tensor_bytes

    # Writing

    def write_tensor(
        self, idx: int, name: str, tensor_type: TensorType, tensor: torch.Tensor | npt.NDArray[Any]
    ) -> None:
        """Write one tensor.

        Args:
            idx: Index of the owning module, 0 to 65535. The reader returns it.
            name: Its name, which no other tensor of the file has.
            tensor_type: Its role: parameter, buffer, or entry of a state dict.
            tensor: A torch tensor, or a numpy array of a dtype that torch supports.

        Raises:
            TypeError: The name is not a string, or the tensor is neither of the above.
            ValueError: The index is out of range, or the name is taken or too long; or the tensor
                is uninitialised, or a placeholder of DeepSpeed's ZeRO-3.
            NotImplementedError: The tensor is sparse, quantized, nested, or of a subclass that
                is more than its bytes.

        A tensor of the ``meta`` device is recorded without data, with a warning that names it.

        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, not {type(name).__name__}")
        if not 0 <= idx <= _LAST_MODULE_INDEX:
            raise ValueError(f"idx must be 0 to {_LAST_MODULE_INDEX}, not {idx}")
        if not isinstance(tensor, torch.Tensor):
            with warnings.catch_warnings():
                # torch warns about read-only arrays; nothing writes to the tensor.
                warnings.simplefilter("ignore", UserWarning)
                tensor = torch.from_numpy(tensor)
        _warn_of_meta([name], [tensor])
        self._write([name], [TensorType(tensor_type)], [idx], [tensor])

    def write_module(
        self,
        m: torch.nn.Module,
        remove_tensors: bool = False,
        *,
        include_non_persistent_buffers: bool = True,
    ) -> None:
        """Write all parameters and buffers of a module, in the order of ``named_modules()``.

        What ``get_extra_state()`` of a module returns is not written, with a warning. The name of a
        tensor is ``"<module path>.<attribute>"``; names in the root module begin with a dot. A
        tensor with two names is written under both. Paths in a wrapped module contain the attribute
        of the wrapper, such as ``module.`` of ``DistributedDataParallel``;
        :meth:`TensorDeserializer.load_into_module` loads them with and without it.

        ``DTensor`` parameters (FSDP2, tensor parallel) are written as whole tensors. All processes
        of their mesh make the same calls, including the constructor (which must be able to open the
        file on each of them) and :meth:`close`. Tensors are gathered a few at a time, and the first
        process writes them. Parameters that FSDP2 has gathered for a forward pass are resharded
        first, as ``state_dict()`` does.

        Args:
            m: The module.
            remove_tensors: Set the module's tensors to None once they are written.
            include_non_persistent_buffers: Also write buffers that ``state_dict()`` leaves out.

        Raises:
            RuntimeError: FSDP's first version or accelerate holds the weights of the module
                elsewhere; the message has the call to make.
            NotImplementedError, ValueError: See :meth:`write_tensor`.

        """
        if not isinstance(m, torch.nn.Module):
            raise TypeError(
                f"write_module takes a torch.nn.Module, not {type(m).__name__}: write_state_dict "
                "takes mappings of tensors"
            )
        held_elsewhere.put_in_place(m, to_load=False)
        found = [
            item
            for item in state.walk(m)
            if include_non_persistent_buffers
            or item[3].attribute not in item[3].module._non_persistent_buffers_set
        ]
        for _, name, _, slot, tensor in found:
            sharded = sharding.is_sharded(tensor)
            if not sharded and (why := subclasses.reason_in(slot.module, tensor)):
                raise NotImplementedError(f"{name!r} is a {why}")
        names, tensors = [item[1] for item in found], [item[4] for item in found]
        _warn_of_meta(names, tensors)
        _warn_of_extra_state(m)
        strides = vllm_files.strides_to_store(names, tensors)
        if strides is not None and not self.total_tensor_bytes:
            self._file.native.add_metadata(*strides)
        kinds = [kind for _, _, kind, _, _ in found]
        indices = [min(index, _LAST_MODULE_INDEX) for index, _, _, _, _ in found]
        self._write(names, kinds, indices, tensors)
        if remove_tensors:
            for _, _, _, slot, _ in found:
                setattr(slot.module, slot.attribute, None)

    def write_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Any]) -> None:
        """Write nested mappings and sequences of tensors.

        Tuples are loaded as lists, and empty containers are lost. At the top level, the key of a
        tensor may also be the tuple of its whole path, as :func:`tensorizer.load` returns it.

        Raises:
            TypeError: A key is neither a string nor such a tuple, or a leaf is not a tensor.
            NotImplementedError: See :meth:`write_tensor`.
            ValueError: A container contains itself; or see :meth:`write_tensor`.

        """
        names, tensors = named_leaves(state_dict)
        _warn_of_meta(names, tensors)
        count = len(tensors)
        self._write(names, [TensorType.STATE_DICT] * count, [0] * count, tensors)

    def _write(
        self,
        names: Sequence[Name],
        kinds: Sequence[TensorType],
        modules: Sequence[int],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        added = data_bytes(tensors)
        self._progress.total += added
        try:
            self._file.write(names, kinds, modules, tensors)
        except BaseException:
            self._progress.total -= added
            raise
        self._progress.flush()

    # Ending

    def close(self) -> None:
        """Finish the file and close it. Closing again has no effect."""
        try:
            self._file.close()
        finally:
            self._progress.close()

    def __enter__(self) -> TensorSerializer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.abandon()
            self._progress.close()


def _warn_of_extra_state(module: torch.nn.Module) -> None:
    """Warn the caller of a method of the state of submodules that is no parameter or buffer."""
    plain = torch.nn.Module.get_extra_state
    some = [path for path, one in module.named_modules() if type(one).get_extra_state is not plain]
    if some:
        warnings.warn(
            f"the extra state of {len(some):,} modules, such as {some[0]!r}, is not written: "
            "write_state_dict(module.state_dict()) writes it, if it is a tensor",
            stacklevel=3,
        )


def _warn_of_meta(names: Sequence[Name], tensors: Sequence[torch.Tensor]) -> None:
    """Warn the caller of a method that tensors of the meta device are written without data."""
    found = without_data.without_data(names, tensors).get(without_data.META, ())
    last = [name.rpartition(".")[2] if isinstance(name, str) else name[-1] for name in found]
    if some := [name for name, end in zip(found, last, strict=True) if end not in state.MARKERS]:
        warnings.warn(
            f"{without_data.listed(some)} {without_data.META}: the file records names, dtypes and "
            f"shapes alone, and a load gives zeros; {without_data.INSTEAD[without_data.META]}",
            stacklevel=3,
        )
