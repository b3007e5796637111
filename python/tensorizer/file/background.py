"""Saves tensors on a background thread."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from .. import _native
from .._types import FileFormat, Hashes
from ..tensors import devices, fake_mode, subclasses, without_data
from ..tensors.handles import copied, lend, refuse_short, take
from . import to_safetensors
from .encryption import EncryptionParams
from .file_writer import FileWriter
from .nesting import flatten, named_leaves

logger = logging.getLogger("tensorizer.serialization")


class SaveFuture(Future[None]):
    """The result of a save that runs on a separate thread.

    ``result()``, and ``await`` in a coroutine, wait for the save and raise its exception.
    ``done()``, ``exception()`` and ``add_done_callback()`` are those of
    :class:`concurrent.futures.Future`. It cannot be cancelled. In a child process forked during the
    save, it has failed with ``RuntimeError``, because the child has no thread that saves.

    Attributes:
        total_bytes: Bytes of tensor data to be written.

    """

    def __init__(self, file: FileWriter, total_bytes: int) -> None:
        super().__init__()
        self.total_bytes = total_bytes
        self._file = file
        self._outcome: tuple[BaseException | None] | None = None
        self.set_running_or_notify_cancel()
        _FUTURES.add(self)

    @property
    def saved_bytes(self) -> int:
        """Bytes of tensor data written so far, from any thread.

        When all of them are written, the file is still incomplete until ``done()`` is true.
        """
        return self._file.saved_bytes

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.wrap_future(self).__await__()

    def _run(self, tensors: Any, uri: str, safetensors: bool) -> None:
        try:
            with self._file as file:
                write = file.write_safetensors if safetensors else file.write_leaves
                write(*named_leaves(tensors))
        except BaseException as error:
            logger.error("saving to %s failed: %s", uri, error)
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._outcome = (error,)
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(error)

    def _forked(self) -> None:
        """Reset the future in a forked child: it keeps a known outcome, and else has failed."""
        outcome = self._outcome
        # Locks may be held by threads that the child lacks, and callbacks are for the parent.
        Future.__init__(self)
        self.set_running_or_notify_cancel()
        if outcome is None:
            what = "wait for a save in the process that started it: this is a forked child"
            outcome = (RuntimeError(what),)
        self._end(*outcome)


#: All futures that are still referenced, which a forked child resets.
_FUTURES: weakref.WeakSet[SaveFuture] = weakref.WeakSet()


def _in_child() -> None:
    for future in list(_FUTURES):
        future._forked()


os.register_at_fork(after_in_child=_in_child)


def save_async(
    tensors: Mapping[str, Any] | Sequence[Any],
    uri: str | os.PathLike[Any] | Any,
    *,
    alignment: int = 64,
    encryption: EncryptionParams | None = None,
    hashes: Hashes = "all",
    format: FileFormat | None = None,
    metadata: Mapping[str, str] | None = None,
    clear_metadata: bool = False,
    memory_limit: int | None = None,
    allow_meta: bool = False,
) -> SaveFuture:
    """Save a copy of the tensors in the background, so that the caller may change them meanwhile.

    The call returns as soon as the tensors are copied to host memory; the copies need as much
    memory as the tensors. A file, or an object of a cloud, appears once it is complete. A process
    that exits normally waits for the save; one that is killed leaves the earlier file in place.

    Args:
        tensors: The tensors, as for :func:`tensorizer.save`.
        uri: The target, as for :func:`tensorizer.save`.
        alignment: See :class:`TensorSerializer`.
        encryption: A key to encrypt the tensors' data with.
        hashes: See :class:`TensorSerializer`.
        format: See :func:`tensorizer.save`. A safetensors file is written in one piece.
        metadata: Strings by name; see :class:`TensorSerializer`.
        clear_metadata: True if an encrypted file may have metadata, which is not encrypted.
        memory_limit: The most bytes that the save has in flight in addition to the copies of the
            tensors; see :class:`TensorSerializer`.
        allow_meta: See :func:`tensorizer.save`.

    Raises:
        OSError, TypeError, ValueError, NotImplementedError: At once, if the file cannot be begun or
            the tensors cannot be saved. Later errors are raised by the future and logged.

    """
    safetensors = to_safetensors.is_safetensors_target(uri, format)
    if safetensors:
        to_safetensors.refuse_options(alignment, encryption, hashes, allow_meta=allow_meta)
        tensors = to_safetensors.checked(tensors)
    # Raises at once for values that cannot be saved.
    names, values = named_leaves(tensors)
    without_data.refuse(names, values, allow_meta=allow_meta)
    leaves = list(zip(names, values, strict=True))
    for name, tensor in leaves:
        subclasses.refuse(name, tensor)
    refuse_short(leaves)
    size = sum(t.numel() * t.element_size() for _, t in leaves if not t.is_meta)
    with fake_mode.suspended():
        copies = _copied(tensors)
    file = FileWriter(
        uri,
        alignment=alignment,
        encryption=encryption,
        hashes=hashes,
        metadata=metadata,
        clear_metadata=clear_metadata,
        memory_limit=memory_limit,
        allow_meta=allow_meta,
        closes_stream=False,
    )
    future = SaveFuture(file, size)
    thread = threading.Thread(
        target=future._run, args=(copies, str(uri), safetensors), name="tensorizer-save"
    )
    thread.start()
    return future


def _copied(value: Any) -> Any:
    """Return a nested structure with copies of its tensors in host memory."""
    found = [tensor for _, tensor in flatten(value)]
    copies: dict[int, torch.Tensor] = {}
    staged = [t for t in found if _is_plain(t) and devices.is_native(t.device)]
    if staged:
        plain = [t.detach().resolve_conj().resolve_neg().contiguous() for t in staged]
        taken = take(_native.snapshot(lend(plain)))
        copies = {id(tensor): copy for tensor, copy in zip(staged, taken, strict=True)}
    return _replaced(value, copies)


def _is_plain(tensor: torch.Tensor) -> bool:
    strided = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return strided and not tensor.is_meta


def _replaced(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) in copies:
            return copies[id(value)]
        value = value.detach()
        return value if value.is_meta else copied(value) if value.is_cpu else value.cpu()
    if isinstance(value, Mapping):
        return {key: _replaced(child, copies) for key, child in value.items()}
    return [_replaced(child, copies) for child in value]
