"""The writer of a file of tensors, for all functions that save."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from .._errors import GroupError
from .._native import Call, Handle, Source, TensorWriter
from .._numbers import check_number
from .._types import Name, TensorType
from ..streams.addresses import open_address
from ..streams.atomic import AtomicRandom, WholeFile, warn_of_overtaking
from ..streams.upload import UploadFile
from ..tensors import sharding, subclasses, without_data
from ..tensors.handles import lend
from . import opening
from .arguments import checked_memory_limit
from .encryption import native_encryption
from .options import SaveOptions
from .progress import ProgressReporter

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..group.gathered_save import GatheredSave

logger = logging.getLogger("tensorizer.serialization")


class FileWriter(AbstractContextManager["FileWriter"]):
    """Writes tensors into a file, which is complete and visible once this is closed.

    As a context manager it abandons the file if the block raises. For a writer that is never
    closed, see :class:`tensorizer.TensorSerializer`.

    Args:
        file_obj: The target, as for :class:`tensorizer.TensorSerializer`.
        limit_cpu_concurrency: Threads that hash and write at once; None for one per core.
        progress: Reports the bytes that are written.
        reserved_memory: The bytes of the limit that are reserved for something else.
        allow_meta: True if tensors of the meta device may be recorded without data.
        closes_stream: False to leave a file object of the caller open.
        room_for_more: False if one write follows: the index gets no room for more tensors.
        options: See :class:`tensorizer.SaveOptions`. The ``timeout`` is that of each call.

    Raises:
        OSError, TypeError, ValueError: See :class:`tensorizer.TensorSerializer`.

    Attributes:
        total_tensor_bytes: Bytes of tensor data written so far.
        native: The writer of the native module. Its ``progress`` is the number of bytes written so
            far, from any thread and during a write; its ``pair_id`` is the file's identity, of
            which one of the content depends on the tensors written so far.

    """

    def __init__(
        self,
        file_obj: Any,
        *,
        limit_cpu_concurrency: int | None = None,
        progress: ProgressReporter | None = None,
        reserved_memory: int = 0,
        allow_meta: bool = False,
        closes_stream: bool = True,
        room_for_more: bool = True,
        **options: Unpack[SaveOptions],
    ) -> None:
        self._target, self._timeout = file_obj, options.get("timeout")
        self._call()  # refuses a time limit that is not positive
        self._stream: Any = None
        self._writer: TensorWriter | None = None
        self._process = os.getpid()
        #: The processes that hold parts of the tensors, and write this file together.
        self._gathering: GatheredSave | None = None
        # True if a file that is never closed would have tensors worth keeping.
        self._complete = False
        self._allow_meta = allow_meta
        self.total_tensor_bytes = 0
        alignment, hashes = options.get("alignment", 64), options.get("hashes", "all")
        check_number("alignment", alignment, needed=True)
        check_number("limit_cpu_concurrency", limit_cpu_concurrency)
        if hashes not in ("all", "crc32"):
            raise ValueError(f"hashes must be 'all' or 'crc32', not {hashes!r}")
        #: True if the file was dropped because a later save to its path was complete before.
        self.overtaken = False
        arguments = {
            "alignment": alignment,
            "threads": limit_cpu_concurrency,
            "hashes": hashes,
            "encryption": native_encryption(options.get("encryption")),
            "metadata": _metadata_pairs(options.get("metadata")),
            "clear_metadata": bool(options.get("clear_metadata")),
            "room_for_more": room_for_more,
            "memory": checked_memory_limit(options.get("memory_limit")),
            "reserved_memory": reserved_memory,
        }
        names = ("max_bytes_per_second", "headers", "timeout")
        stream = open_address(file_obj, "wb", **{name: options.get(name) for name in names})
        self.native = self._writer = _open(stream, arguments)
        self._progress = progress or ProgressReporter(False)
        report = self._progress.part()
        if report is not None:
            self.native.watch(report)
        if not isinstance(stream, (str, bytes, os.PathLike, int)):
            self._stream = stream
        # Streams of this package complete their file when they are closed.
        own = stream is not file_obj or isinstance(stream, WholeFile)
        self._closes_stream = closes_stream or own
        if isinstance(stream, WholeFile):
            stream.belongs_to_serializer = True

    def _call(self) -> Call:
        return Call("TensorSerializer", self._timeout, True)

    def set_pair_id(self, identity: bytes | None) -> None:
        """Give the file an identity: one that is given, or for None a hash of its content."""
        self.native.set_pair_id(identity)

    def write(
        self,
        names: Sequence[Name],
        kinds: Sequence[TensorType],
        modules: Sequence[int],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Write tensors, each with its name, its role, and the index of the owning module."""
        numbers = [int(kind) for kind in kinds]

        def write(which: slice, whole: Sequence[torch.Tensor]) -> None:
            rows = names[which], numbers[which], modules[which]
            self._write(rows[0], whole, lambda writer, handle: writer.write(handle, *rows))

        with self._call():
            self._progress.attach()
            if self._gathering is None and any(map(sharding.is_sharded, tensors)):
                self._gather(tensors)
            if self._gathering is None:
                write(slice(None), tensors)
            else:
                self._gathering.write(names, tensors, write)

    def _gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write from now on together with other processes, one of which writes the file."""
        if self._writer is None:
            raise ValueError("I/O operation on closed file")
        from ..group.gathered_save import GatheredSave  # imported already by code with DTensors

        self._gathering = GatheredSave(tensors, self._target)
        if not self._gathering.writes:
            self._abandon()
        self._gathering.join()

    def _write(
        self,
        names: Sequence[Name],
        tensors: Sequence[torch.Tensor],
        write: Callable[[TensorWriter, Handle], None],
    ) -> None:
        if self._writer is None:
            raise ValueError("I/O operation on closed file")
        without_data.refuse(names, tensors, allow_meta=self._allow_meta)
        for name, tensor in zip(names, tensors, strict=True):
            subclasses.refuse(name, tensor)
        handle = lend(tensors)
        try:
            write(self._writer, handle)
            self._complete = True
        finally:
            # A call that was refused before it wrote anything leaves the earlier tensors intact.
            self._complete = self._complete and not self._writer.failed
        self.total_tensor_bytes = self._writer.total_tensor_bytes

    def write_safetensors(self, names: Sequence[Name], tensors: Sequence[torch.Tensor]) -> None:
        """Write all tensors of a safetensors file."""
        with self._call():
            self._progress.attach()
            self._write(
                names, tensors, lambda writer, handle: writer.write_safetensors(handle, names)
            )

    def write_leaves(self, names: Sequence[Name], tensors: Sequence[torch.Tensor]) -> None:
        """Write tensors of nested mappings and sequences."""
        count = len(tensors)
        self.write(names, [TensorType.STATE_DICT] * count, [0] * count, tensors)

    # Ending

    def close(self) -> None:
        """Finish the file and close it. Closing again does nothing."""
        with self._call():
            self._progress.attach()
            self._close_together()

    def _close_together(self) -> None:
        gathering, self._gathering = self._gathering, None
        if gathering is None:
            self._close()
        elif gathering.failed:
            self._abandon()
            raise GroupError("the file was abandoned: not all processes have written their part")
        else:
            # All processes learn whether the file was completed.
            gathering.members.run_on_all(self._close)

    def _close(self) -> None:
        if self._process != os.getpid() and self._writer is not None:
            self._writer.finish()  # raises in a forked child; the parent's file stays as it is
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            self.overtaken = not writer.finish()
            if self._stream is not None and not _is_ended(self._stream):
                self._stream.seek(writer.end)
        except BaseException:
            self._abandon_stream()
            raise
        stream, self._stream = self._stream, None
        if stream is not None and self._closes_stream:
            stream.close()
            self.overtaken = self.overtaken or getattr(stream, "overtaken", False)
        if self.overtaken:
            warn_of_overtaking(writer.uri)

    def abandon(self) -> None:
        """Abandon the file: an earlier one of its name stays."""
        gathering, self._gathering = self._gathering, None
        if gathering is not None and not gathering.failed:
            # The other processes need not wait for this one.
            gathering.members.leave()
        self._abandon()

    def _abandon(self) -> None:
        writer, self._writer = self._writer, None
        if self._process != os.getpid():
            return
        if writer is not None:
            writer.abandon()
        self._abandon_stream()

    def _abandon_stream(self) -> None:
        stream, self._stream = self._stream, None
        if hasattr(stream, "abandon"):
            stream.abandon()
        elif stream is not None and self._closes_stream:
            stream.close()

    def _finish_unclosed(self) -> None:
        """Finish a file that was never closed, without replacing one of its name.

        Callers of the old package often do not close their files.
        """
        writer, self._writer = self.native, None
        uri = writer.uri
        is_complete, other_path = False, None
        if isinstance(self._stream, WholeFile) and self._stream.ended:
            # The caller has closed or abandoned the stream, and has seen any error.
            writer.finish()
            return
        if isinstance(self._stream, UploadFile):
            writer.abandon()
            self._abandon_stream()
        else:
            is_complete, other_path = writer.finish_unclosed()
            stream, self._stream = self._stream, None
            if isinstance(stream, AtomicRandom):
                is_complete, other_path = stream.publish_unclosed(writer.end)
            elif stream is not None and not getattr(stream, "closed", False):
                stream.seek(writer.end)
                stream.close()
        if other_path is not None:
            what = f"the file of that name is unchanged, and the new one is {other_path}"
        elif is_complete:
            what = "the file was completed with what was written"
        else:
            what = "the upload was aborted, and there is no new object"
        warnings.warn(
            f"{uri} was not closed: {what}; call close(), or use a with block",
            RuntimeWarning,
            stacklevel=2,
        )

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __del__(self) -> None:
        if getattr(self, "_writer", None) is None or self._process != os.getpid():
            return
        try:
            if self._complete:
                self._finish_unclosed()
            else:
                self.abandon()
        except Exception:
            logger.exception("a file that was not closed could not be finished")


def check_options(**options: Any) -> None:
    """Refuse options with which no file could be written.

    Raises:
        TypeError, ValueError: See :class:`FileWriter`, whose options these are.

    """
    FileWriter(io.BytesIO(), **options).abandon()


def _is_ended(stream: Any) -> bool:
    """Tell whether a stream's position cannot be set any more, or never could be."""
    return isinstance(stream, UploadFile) or bool(getattr(stream, "closed", False))


def _metadata_pairs(metadata: Mapping[str, str] | None) -> list[tuple[str, str]] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict of strings, found {type(metadata).__name__}")
    for name, value in metadata.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"metadata must be a dict of strings, found {value!r} at {name!r}")
        try:
            f"{name}{value}".encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"metadata must be valid Unicode, found a lone surrogate: {error}"
            ) from None
    return list(metadata.items())


#: What the message says of a file object without an ability.
_WITHOUT = {
    "seekable": ", found a pipe or the like (the index at the beginning is written last: save to a "
    "file and copy that)",
    "readable": ', as of open(path, "wb+")',
}


def _open(file_obj: Any, options: dict[str, Any]) -> TensorWriter:
    if isinstance(file_obj, UploadFile):
        return file_obj.hand_over(options)
    file, uri, base, _ = opening.classify(file_obj)
    if isinstance(file, Source):
        raise ValueError(f"expected a writable file: {uri}")
    if isinstance(file, str):
        return TensorWriter.to_path(file, options, getattr(file_obj, "shown", None))
    if not isinstance(file_obj, int):
        if not hasattr(file_obj, "seek"):
            raise ValueError(f"expected a seekable file: {uri}")
        for ability in ("seekable", "readable", "writable"):
            check = getattr(file_obj, ability, None)
            if check is not None and not check():
                raise ValueError(f"expected a {ability} file{_WITHOUT.get(ability, '')}: {uri}")
    if isinstance(file, int):
        return TensorWriter.to_fd(file, uri, base, options)
    return TensorWriter.to_object(file, uri, base, options)
