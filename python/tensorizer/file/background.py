"""Saves tensors on a background thread."""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from typing_extensions import Unpack

from .. import _native
from .._types import FileFormat
from ..tensors import devices, fake_mode, subclasses, without_data
from ..tensors.handles import copied, lend, refuse_short, take
from . import to_safetensors
from .file_writer import FileWriter, logger
from .nesting import named_leaves
from .options import SaveOptions, takes
from .progress import ProgressReporter, ProgressType, data_bytes


class SaveFuture(Future[None]):
    """The result of a save that runs on a separate thread.

    ``result()``, and ``await`` in a coroutine, wait for the save and raise its exception.
    ``done()``, ``exception()`` and ``add_done_callback()`` are those of
    :class:`concurrent.futures.Future`. It cannot be cancelled. In a child process forked during the
    save, it has failed with ``RuntimeError``, because the child has no thread that saves.

    The process ends after the save. If the save has failed and no call has asked for the result,
    the exit status is 120.

    Attributes:
        total_bytes: Bytes of tensor data to be written.

    """

    def __init__(self, file: FileWriter, reporter: ProgressReporter) -> None:
        super().__init__()
        self.total_bytes = reporter.total
        self._file, self._reporter = file, reporter
        self._number = next(_NUMBERS)
        self.set_running_or_notify_cancel()
        _FUTURES.add(self)

    @property
    def saved_bytes(self) -> int:
        """Bytes of tensor data written so far, from any thread.

        When all of them are written, the file is still incomplete until ``done()`` is true.
        """
        return self._file.native.progress

    @property
    def overtaken(self) -> bool:
        """True if the file was dropped because a later save was complete before.

        That is a save of this process to the same path or address, which began after this one.
        """
        return self._file.overtaken

    def result(self, timeout: float | None = None) -> None:
        """Wait for the save, and raise its exception."""
        try:
            super().result(timeout)
        finally:
            self._note_asked()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save, and return its exception."""
        try:
            return super().exception(timeout)
        finally:
            self._note_asked()

    def _note_asked(self) -> None:
        if self.done():
            _UNSEEN.pop(self._number, None)

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.wrap_future(self).__await__()

    def _run(
        self, call: _native.Call, write: Callable[[Any], None], boxed: list[Any], uri: str
    ) -> None:
        """Write what is in a box, and empty it: no copy is left when the result is known."""
        error = None
        try:
            with call, self._reporter, self._file:
                write(boxed.pop())
        except BaseException as raised:
            error = raised
            logger.error("saving to %s failed: %s", uri, error)
            _UNSEEN[self._number] = f"saving to {uri} failed: {error}"
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(error)

    def _forked(self) -> None:
        """Reset the future in a forked child: it keeps a known outcome, and else has failed."""
        outcome = self._exception
        if self._state != "FINISHED":
            what = "wait for a save in the process that started it: this is a forked child"
            outcome = RuntimeError(what)
        # Locks may be held by threads that the child lacks, and callbacks are for the parent.
        Future.__init__(self)
        self.set_running_or_notify_cancel()
        self._end(outcome)


#: All futures that are still referenced, which a forked child resets.
_FUTURES: weakref.WeakSet[SaveFuture] = weakref.WeakSet()
_NUMBERS = itertools.count()
#: Failures by the number of their future, until a call asks for the result.
_UNSEEN: dict[int, str] = {}


class _LastFlush:
    """Standard output whose flush fails at the end of the interpreter: the exit status is 120."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush, and raise for failed saves of which no call has asked the result."""
        self._stream.flush()
        if sys.is_finalizing() and _UNSEEN:
            raise OSError("; ".join(_UNSEEN.values()))


@atexit.register
def _fail_exit() -> None:
    """Have the process end with status 120, unless failed saves are asked for their results."""
    if _UNSEEN and sys.stdout is not None and not isinstance(sys.stdout, _LastFlush):
        sys.stdout = _LastFlush(sys.stdout)


def _start(future: SaveFuture, *arguments: Any) -> None:
    """Run a save on a thread or, if the interpreter is ending, at once.

    Raises:
        RuntimeError: The interpreter ends, and stops the thread of this call.

    """
    ends = not threading.main_thread().is_alive()
    if ends and threading.current_thread() is threading.main_thread():
        # In a handler of ``atexit``: the interpreter waits for no more threads.
        future._run(*arguments)
        _fail_exit()
    elif ends and threading.current_thread().daemon:
        raise RuntimeError("cannot save on this thread: the interpreter is ending")
    else:
        # Not a daemon, whatever this thread is: the interpreter would stop it while it saves.
        name = "tensorizer-save"
        threading.Thread(target=future._run, args=arguments, name=name, daemon=False).start()


def _in_child() -> None:
    _UNSEEN.clear()
    for future in list(_FUTURES):
        future._forked()


os.register_at_fork(after_in_child=_in_child)


@takes(SaveOptions)
def save_async(
    tensors: Mapping[str, Any] | Sequence[Any],
    uri: str | os.PathLike[Any] | Any,
    *,
    format: FileFormat | None = None,
    progress: ProgressType = False,
    allow_meta: bool = False,
    **options: Unpack[SaveOptions],
) -> SaveFuture:
    """Save a copy of the tensors in the background, so that the caller may change them meanwhile.

    The call returns as soon as the tensors are copied to host memory; the copies need as much
    memory as the tensors. A file, or an object of a cloud, appears once it is complete. A process
    that exits normally waits for the save; in a handler of ``atexit``, the call itself does. One
    that is killed leaves the earlier file in place. Of several saves to one path or address by this
    process, the one that was called last stays: see :attr:`SaveFuture.overtaken`.

    Args:
        tensors: The tensors, as for :func:`tensorizer.save`.
        uri: The target, as for :func:`tensorizer.save`.
        format: See :func:`tensorizer.save`. A safetensors file is written in one piece.
        progress: See :func:`tensorizer.save`. It is called on the thread that saves, and an
            exception from it fails the save.
        allow_meta: See :func:`tensorizer.save`.
        options: How the file is written: see :class:`SaveOptions`.

    Raises:
        OSError, TypeError, ValueError, NotImplementedError: At once, if the file cannot be begun or
            the tensors cannot be saved. Later errors are raised by the future and logged.

    """
    safetensors = to_safetensors.is_safetensors_target(uri, format)
    if safetensors:
        to_safetensors.refuse_options(options, allow_meta=allow_meta)
        tensors = to_safetensors.checked(tensors)
    # Raises at once for values that cannot be saved.
    names, values = named_leaves(tensors)
    without_data.refuse(names, values, allow_meta=allow_meta)
    leaves = list(zip(names, values, strict=True))
    for name, tensor in leaves:
        subclasses.refuse(name, tensor)
    refuse_short(leaves)
    total = data_bytes(values)
    with fake_mode.suspended():
        boxed = [_copied(values)]
    # The thread that saves reports, and no other.
    reporter = ProgressReporter(progress, total, attached=False)
    call = _native.Call("save_async", options.get("timeout"), True)
    file = FileWriter(
        uri,
        progress=reporter,
        allow_meta=allow_meta,
        closes_stream=False,
        room_for_more=False,
        **options,
    )
    future = SaveFuture(file, reporter)
    write = file.write_safetensors if safetensors else file.write_leaves
    _start(future, call, functools.partial(write, names), boxed, str(uri))
    return future


def _copied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors in host memory."""
    staged = [t for t in tensors if _is_plain(t) and devices.is_native(t.device)]
    plain = [t.detach().resolve_conj().resolve_neg().contiguous() for t in staged]
    taken = take(_native.snapshot(lend(plain))) if staged else []
    copies = {id(tensor): copy for tensor, copy in zip(staged, taken, strict=True)}
    return [copies[id(t)] if id(t) in copies else _host_copy(t.detach()) for t in tensors]


def _is_plain(tensor: torch.Tensor) -> bool:
    strided = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return strided and not tensor.is_meta


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else copied(tensor) if tensor.is_cpu else tensor.cpu()
