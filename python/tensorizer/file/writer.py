"""Writing: :class:`TensorSerializer`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from .._native import MAX_DEPTH, Writer, cpu_count
from .._types import Name, TensorType
from ..modules import state
from ..streams.addresses import open_address
from ..streams.atomic import AtomicRandom
from ..streams.upload import UploadFile
from ..tensors.exchange import lend
from . import opening
from .encryption import EncryptionParams, native_encryption

if TYPE_CHECKING:
    import numpy.typing as npt

logger = logging.getLogger("tensorizer.serialization")

#: Module indices take 16 bits in the file; modules beyond share the last one.
_LAST_MODULE_INDEX = 0xFFFF


class TensorSerializer:
    """Writes tensors into a ``.tensors`` file.

    A path is written atomically: until :meth:`close` the old file stays, and a file beside it,
    without a name or with a hidden one, takes the bytes; then it replaces the old one and is like
    it in owner, group and permissions. An object of S3 appears as a whole too. As a context
    manager it closes at the end of the block; if the block raises, nothing appears.

    A serializer that is forgotten without :meth:`close` finishes its file, with a
    ``RuntimeWarning``, where no other has its name; where one has, that stays as it is, and what
    was written is called ``<name>.unclosed``. An object of S3 is given up, and so is a file of
    which a write has failed half-way. Only the process that
    made a serializer finishes or removes anything; in one that was forked off, methods raise
    ``ClosedError``.

    Args:
        file_obj: A path, ``os.PathLike``, ``s3://`` address, file descriptor (which stays the
            caller's), or binary file object that can be read, written and sought in; the file
            begins at its position, and it is closed with this object. A stream of
            :func:`tensorizer.stream_io.open_stream` is written by the native code.
        compress_tensors: Has no effect.
        encryption: A key to encrypt the tensors' data with; the tensors stay as they are.
        limit_cpu_concurrency: Threads that hash and write at once; None for one a core.
        alignment: Each tensor's data begin at a multiple of this many bytes in the file, a power
            of two. 64 lets tensors be used in place from a mapping; 1 gives the same bytes as
            version 2.12.1 of the package.
        hashes: Which hashes of each tensor to store: ``"all"`` (CRC-32 and SHA-256) or
            ``"crc32"``, which finds damage by accident and costs little. Readers verify those that
            are there.

    Raises:
        OSError: The file cannot be created, written or, because of its folder, replaced.
        TypeError, ValueError: An argument is not one of the above.

    """

    def __init__(
        self,
        file_obj: str | bytes | os.PathLike[Any] | int | BinaryIO | Any,
        compress_tensors: bool = False,
        *,
        encryption: EncryptionParams | None = None,
        limit_cpu_concurrency: int | None = None,
        alignment: int = 64,
        hashes: str = "all",
    ) -> None:
        self._file_obj: Any = None
        self._writer: Writer | None = None
        self._process = os.getpid()
        # Whether there is something to keep if this object is forgotten.
        self._complete = False
        self._total_tensor_bytes = 0
        self._encryption = native_encryption(encryption)
        if compress_tensors:
            warnings.warn("compress_tensors has no effect", stacklevel=2)
        self.compress_tensors = bool(compress_tensors)
        self.total_compressed_tensor_bytes = 0
        self.lz4_frame = None
        if limit_cpu_concurrency is not None:
            if not isinstance(limit_cpu_concurrency, int):
                raise TypeError(
                    f"limit_cpu_concurrency must be an int or None, not {limit_cpu_concurrency!r}"
                )
            if limit_cpu_concurrency < 1:
                raise ValueError(
                    f"limit_cpu_concurrency must be at least 1, not {limit_cpu_concurrency}"
                )
        self.cpu_limit: int = limit_cpu_concurrency or cpu_count
        file_obj = open_address(file_obj, "wb")
        options = {
            "alignment": alignment,
            "threads": limit_cpu_concurrency,
            "hashes": hashes,
            "encryption": self._encryption,
        }
        self._writer = self._open(file_obj, options)
        if not isinstance(file_obj, (str, bytes, os.PathLike, int)):
            self._file_obj = file_obj
        if isinstance(file_obj, AtomicRandom):
            file_obj.belongs_to_serializer = True

    @property
    def total_tensor_bytes(self) -> int:
        """Bytes of tensor data written so far."""
        return self._total_tensor_bytes

    def _open(self, file_obj: Any, options: dict[str, Any]) -> Writer:
        if isinstance(file_obj, UploadFile):
            sink, base = file_obj._native_sink(self)
            return Writer.to_sink(sink, base, options)
        return _open(file_obj, options)

    # Writing

    def _write(
        self,
        names: Sequence[Name],
        kinds: Sequence[TensorType],
        modules: Sequence[int],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        if self._writer is None:
            raise ValueError("I/O operation on closed file")
        for name, tensor in zip(names, tensors, strict=True):
            if state.is_sharded(tensor):
                raise NotImplementedError(
                    f"{name!r} is a DTensor, of which this process has a part: save what its "
                    "full_tensor() returns, on one rank"
                )
        handle = lend(tensors)
        try:
            self._writer.write(handle, names, [int(kind) for kind in kinds], modules)
            self._complete = True
        finally:
            # What was refused before anything was written leaves what is there.
            self._complete = self._complete and not self._writer.failed
        self._total_tensor_bytes = self._writer.total_tensor_bytes

    def write_tensor(
        self,
        idx: int,
        name: str,
        tensor_type: TensorType,
        tensor: torch.Tensor | npt.NDArray[Any],
    ) -> None:
        """Write one tensor.

        Args:
            idx: Index of the owning module, 0 to 65535. The reader hands it back.
            name: Its name, which no other tensor of the file has.
            tensor_type: What it is.
            tensor: A torch tensor, or a numpy array of a dtype that torch has.

        Raises:
            TypeError: The name is not a string, or the tensor neither of the above.
            ValueError: The index is out of range, or the name is taken or too long.
            NotImplementedError: The tensor is sparse, quantized, nested, or of a subclass
                without storage of its own.

        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, not {type(name).__name__}")
        if not 0 <= idx <= _LAST_MODULE_INDEX:
            raise ValueError(f"idx must be 0 to {_LAST_MODULE_INDEX}, not {idx}")
        if not isinstance(tensor, torch.Tensor):
            with warnings.catch_warnings():
                # Of read-only arrays: nothing writes to the tensor.
                warnings.simplefilter("ignore", UserWarning)
                tensor = torch.from_numpy(tensor)
        self._write([name], [TensorType(tensor_type)], [idx], [tensor])

    def write_module(
        self,
        m: torch.nn.Module,
        remove_tensors: bool = False,
        *,
        include_non_persistent_buffers: bool = True,
    ) -> None:
        """Write all parameters and buffers of a module, in the order of ``named_modules()``.

        Tensors are called ``"<module path>.<attribute>"``; those of the root module begin with
        a dot. A tensor with two names is written under both.

        Args:
            m: The module.
            remove_tensors: Set the module's tensors to None once they are written.
            include_non_persistent_buffers: Write buffers too that ``state_dict()`` leaves out.

        Raises:
            NotImplementedError: See :meth:`write_tensor`.

        """
        found = [
            item
            for item in state.walk(m)
            if include_non_persistent_buffers
            or item[3].attribute not in item[3].module._non_persistent_buffers_set
        ]
        self._write(
            [name for _, name, _, _, _ in found],
            [kind for _, _, kind, _, _ in found],
            [min(index, _LAST_MODULE_INDEX) for index, _, _, _, _ in found],
            [tensor for _, _, _, _, tensor in found],
        )
        if remove_tensors:
            for _, _, _, place, _ in found:
                setattr(place.module, place.attribute, None)

    def write_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Any]) -> None:
        """Write nested mappings and sequences of tensors.

        Tuples come back as lists, and empty containers not at all. A tensor's key at the top may
        also be the tuple of its whole path, as :func:`tensorizer.load` returns it.

        Raises:
            TypeError: A key is neither, or a leaf not a tensor.
            NotImplementedError: See :meth:`write_tensor`.
            ValueError: A container contains itself.

        """
        leaves = list(flatten(state_dict))
        names: list[Name] = []
        for path, _ in leaves:
            first = path[0]
            names.append(first if len(path) == 1 and isinstance(first, str) else path)
        self._write(
            names,
            [TensorType.STATE_DICT] * len(leaves),
            [0] * len(leaves),
            [tensor for _, tensor in leaves],
        )

    # Ending

    def close(self) -> None:
        """Finish the file and close it. Closing again does nothing."""
        if self._process != os.getpid() and self._writer is not None:
            self._writer.finish()  # raises, and what is the parent's stays as it is
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.finish()
            if self._file_obj is not None and not isinstance(self._file_obj, UploadFile):
                self._file_obj.seek(writer.end)
        except BaseException:
            self._close_file_obj(keep=False)
            raise
        self._close_file_obj()

    def _close_forgotten(self) -> None:
        """Keep what was written, and what has its name."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        uri = writer.uri
        if isinstance(self._file_obj, UploadFile):
            kept, beside = False, None
            writer.abandon()
            self._close_file_obj(keep=False)
        else:
            kept, beside = writer.finish_unclosed()
            file_obj, self._file_obj = self._file_obj, None
            if isinstance(file_obj, AtomicRandom):
                kept, beside = file_obj.close_forgotten(writer.end)
            elif file_obj is not None and not getattr(file_obj, "closed", False):
                file_obj.seek(writer.end)
                file_obj.close()
        if beside is not None:
            what = f"the file of that name stays as it was, and what was written is {beside}"
        elif kept:
            what = "what was written has been finished"
        else:
            what = "it was given up, and nothing was uploaded"
        warnings.warn(
            f"{uri} was not closed: {what}; call close(), or use a with block",
            RuntimeWarning,
            stacklevel=2,
        )

    def _abandon(self) -> None:
        writer, self._writer = self._writer, None
        if self._process != os.getpid():
            return
        if writer is not None:
            writer.abandon()
        self._close_file_obj(keep=False)

    def _close_file_obj(self, keep: bool = True) -> None:
        file_obj, self._file_obj = self._file_obj, None
        if isinstance(file_obj, UploadFile) or (not keep and hasattr(file_obj, "abandon")):
            # Published by now, or given up.
            file_obj.abandon()
        elif file_obj is not None:
            file_obj.close()

    def __enter__(self) -> TensorSerializer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def __del__(self) -> None:
        # Callers of the old package may forget to close: what was written in full is kept.
        if getattr(self, "_writer", None) is None or self._process != os.getpid():
            return
        try:
            if self._complete:
                self._close_forgotten()
            else:
                self._abandon()
        except Exception:
            logger.exception("a file that was not closed could not be finished")


def _open(file_obj: Any, options: dict[str, Any]) -> Writer:
    target = opening.classify(file_obj)
    if isinstance(target, opening.Remote):
        raise ValueError(f"expected a writable file: {target.uri}")
    if isinstance(target, opening.LocalPath):
        return Writer.to_path(target.path, options)
    if not isinstance(file_obj, int):
        for ability in ("readable", "writable", "seekable"):
            check = getattr(file_obj, ability, None)
            if check is not None and not check():
                raise ValueError(f"expected a {ability} file: {target.uri}")
        if not hasattr(file_obj, "seek"):
            raise ValueError(f"expected a seekable file: {target.uri}")
    if isinstance(target, opening.Descriptor):
        return Writer.to_fd(target.number, target.uri, target.base, options)
    return Writer.to_object(target.file, target.uri, target.base, options)


def _is_container(value: Any) -> bool:
    text = (str, bytes, bytearray, memoryview)
    return isinstance(value, Mapping) or (
        isinstance(value, Sequence) and not isinstance(value, text)
    )


def flatten(state_dict: Any) -> Iterator[tuple[tuple[str | int, ...], torch.Tensor]]:
    """Yield the paths and tensors of nested mappings and sequences.

    Raises:
        TypeError: A key is not a string, a leaf not a tensor, or this not a container.
        ValueError: A container contains itself.

    """
    if not _is_container(state_dict):
        raise TypeError(f"expected a mapping or a sequence, not {type(state_dict).__name__}")
    if isinstance(state_dict, Mapping):
        rest = {}
        for key, value in state_dict.items():
            if isinstance(key, tuple) and isinstance(value, torch.Tensor):
                yield _checked_path(key), value
            else:
                rest[key] = value
        state_dict = rest
    yield from _flatten(state_dict)


def _checked_path(path: tuple[Any, ...]) -> tuple[str | int, ...]:
    if not path:
        raise ValueError("a path is empty")
    for step in path:
        if not isinstance(step, (str, int)) or isinstance(step, bool):
            raise TypeError(f"a path has strings and integers, found {step!r} in {path!r}")
    return path


def _flatten(top: Any) -> Iterator[tuple[tuple[str | int, ...], torch.Tensor]]:
    # Containers from the top down to where we are, each with what is left of it; and their path.
    open_ = [(top, _items(top, []))]
    above = {id(top)}
    path: list[str | int] = [""]
    while open_:
        container, items = open_[-1]
        for path[-1], value in items:
            if isinstance(value, torch.Tensor):
                yield tuple(path), value
                continue
            if not _is_container(value):
                raise TypeError(f"expected a tensor at {path}, found {type(value).__name__}")
            if id(value) in above:
                raise ValueError(f"the container at {path} contains itself")
            if len(path) == MAX_DEPTH:
                raise ValueError(
                    f"nested too deeply: expected at most {MAX_DEPTH} levels, below {path[:9]}"
                )
            above.add(id(value))
            open_.append((value, _items(value, path)))
            path.append("")
            break
        else:
            above.discard(id(container))
            open_.pop()
            path.pop()


def _items(container: Any, path: list[str | int]) -> Iterator[tuple[str | int, Any]]:
    if not isinstance(container, Mapping):
        yield from enumerate(container)
        return
    for key, value in container.items():
        if not isinstance(key, str):
            raise TypeError(f"keys must be str, found {key!r} at {path[:-1]}")
        yield key, value
