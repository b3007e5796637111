"""Yields the tensors of a file one by one, while the next ones are being read."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from .._errors import ClosedError
from .._native import Call
from .._numbers import check_number
from .._types import FilterFuncType, NameT
from ..tensors import fake_mode
from ..tensors.sharding import Shard
from .arguments import device_or_function, names_of
from .exit_hooks import close_at_exit
from .load_plan import LoadPlan
from .open_file import OpenFile
from .options import IterateOptions, takes
from .progress import ProgressReporter, ProgressType
from .read_ahead import ReadAhead, use_on_current_stream
from .request import Request
from .slices import Index

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from .exchange import Exchange


@takes(IterateOptions)
def iterate(
    uri: str | os.PathLike[Any] | Any,
    device: torch.device | str | None = None,
    *,
    names: Iterable[NameT] | None = None,
    filter_func: FilterFuncType | None = None,
    slices: Mapping[NameT, tuple[int, int, int] | Index] | None = None,
    shard: Shard | None = None,
    group: ProcessGroup | None = None,
    dtype: torch.dtype | str | None = None,
    progress: ProgressType = False,
    order: Literal["file", "ready"] = "file",
    buffer_bytes: int = 1 << 30,
    **options: Unpack[IterateOptions],
) -> Iterator[tuple[NameT, torch.Tensor]]:
    """Yield the names and tensors of a file one by one, each as soon as it is loaded.

    The next tensors are read while the caller uses this one, across all shards of a checkpoint. At
    most ``buffer_bytes`` bytes of tensors are loaded or being read that the caller has not taken,
    or one tensor that is larger. Each tensor has memory that it shares with no other (with
    ``group=``, with those of its block), and the iterator keeps no reference to it. (In a
    checkpoint of ``torch.save``, a tensor that is not contiguous needs its whole storage to be
    loaded; such tensors come last.)

    The file is opened at the call, and closed with the iterator: at its end, by its ``close()``, or
    when it is garbage-collected. Closing ends the load, and waits for reads and copies under way.
    On CUDA, a tensor is ready for the stream that is current when ``next`` is called. Device memory
    is allocated at the call and in ``next``, on the calling thread only.

    Args:
        uri: The file, as for :class:`tensorizer.TensorDeserializer`. A file object is closed.
        device: The device of the tensors; None for torch's default device.
        names: Only these tensors; a string is one name. None for all.
        filter_func: Called with each tensor's name; a tensor is left out if it returns something
            false.
        slices: Load only a part of some tensors, by name; only its bytes are read. See
            :func:`tensorizer.load`.
        shard: This rank's part of each tensor: see :class:`tensorizer.Shard`.
        group: A process group. All members make this call, and take the same number of tensors.
            Every byte is fetched by one member and given to the others, a batch at a time, in the
            call of ``next`` that needs it. Members may choose different tensors or parts.
        dtype: Cast floating-point tensors, as :func:`tensorizer.load` does.
        progress: Called as ``progress(done, total)`` with the bytes of tensor data that are loaded
            and with their total number, on the thread that waits for the next tensor. It cannot use
            the iterator (``RuntimeError``). The iterator raises an exception from it. True shows a
            bar on a terminal or in a notebook.
        order: ``"file"``: in the order of their data in the file, the shards of a checkpoint one
            after another. ``"ready"``: in the order in which they are loaded.
        buffer_bytes: The most bytes that are read ahead of the caller.
        options: How the file is read: see :class:`IterateOptions`. Tensors are compared with their
            hashes before they are handed out. ``memory_limit`` bounds ``buffer_bytes``; the buffers
            of reads take the rest. With ``mmap``, each tensor is a view of a mapping of its file;
            with ``verify_hash=``, and where the members of a ``group=`` exchange them, they are
            read.

    Raises:
        KeyError: The file has no tensor of one of the names.
        IndexError, TypeError: A slice does not fit its tensor.
        ValueError: ``buffer_bytes`` is not positive, ``order`` is neither ``"file"`` nor
            ``"ready"``, or is ``"ready"`` with ``group``; or ``memory_limit`` is less than the
            minimum, which the message states.
        OSError, ValueError, HashMismatchError, CryptographyError: See
            :class:`tensorizer.TensorDeserializer`. Errors while reading are raised by the iterator,
            after it has yielded the tensors that were loaded before (with ``order="file"``, those
            before the tensor that failed).
        GroupError: Another member of the group was lost, interrupted, or has closed its iterator.

    """
    check_number("buffer_bytes", buffer_bytes, wanted="positive", needed=True)
    if order not in ("file", "ready"):
        raise ValueError(f'order must be "file" or "ready", not {order!r}')
    if device_or_function(device)[1] is not None:
        raise TypeError("device= is one device for all tensors, not a function of their names")
    if group is not None and order == "ready":
        raise ValueError('order="ready" with group=: members take tensors in the order of the file')
    if options.get("sha256") is not None:
        raise ValueError(
            "sha256: the hash of a file is known at its end only, and iterate() yields tensors "
            "before: use load(), or run `tensorizer verify --sums` first"
        )
    call, reporter = Call("iterate", options.get("timeout")), ProgressReporter(progress)
    request = Request(names_of(names), None, filter_func, slices or {}, shard=shard, device=device)

    opened = functools.partial(
        OpenFile,
        uri,
        dtype=dtype,
        clone=True,
        progress=reporter,
        closes_stream=True,
        **options,
    )

    def planned(file: OpenFile) -> LoadPlan:
        return LoadPlan(request, file, reporter)

    # Under FakeTensorMode each member makes its tensors alone.
    if group is not None and not fake_mode.is_active():
        from ..group.members import Members  # torch.distributed is slow to import

        members = Members.of(group)
        if members.size > 1:
            from .collective_load import open_iterator  # as above

            opened_all = open_iterator(members, opened, planned, reporter, buffer_bytes)
            return _LoadIterator(call, reporter, *opened_all)
    file = opened(wanted=request.wanted_names())
    try:
        plan = planned(file)
        batches = ReadAhead(plan, buffer_bytes, ready=order == "ready")
        return _LoadIterator(call, reporter, plan, batches)
    except BaseException:
        file.close()
        raise


class _LoadIterator(Iterator[tuple[Any, torch.Tensor]]):
    """Yields tensors under their names, and closes their file at the end."""

    def __init__(
        self, call: Call, reporter: ProgressReporter, plan: LoadPlan, batches: Exchange | ReadAhead
    ) -> None:
        self._call, self._reporter, self._file = call, reporter, plan.file
        self._plan, self._batches = plan, batches
        self._names = plan.keys_by_number()
        self._ready: deque[tuple[Any, torch.Tensor]] = deque()
        self._ended = False
        #: The thread that has closed the iterator before its end, or None.
        self._closer: int | None = None
        self._process = os.getpid()
        #: The thread that waits for tensors, and that calls ``progress=`` meanwhile.
        self._waiting_thread: int | None = None
        #: Held while waiting for tensors; the thread that holds it ends the load if that fails.
        self._lock = threading.RLock()
        #: The stream for which the ready tensors were loaded; None on devices other than CUDA.
        self._stream: torch.cuda.Stream | None = None
        close_at_exit(self)

    def __next__(self) -> tuple[Any, torch.Tensor]:
        if self._process != os.getpid():
            raise RuntimeError(
                "this iterator was made by the parent process, before fork(): make a new one"
            )
        if self._waiting_thread is not None:
            self._refuse_call_from_progress()
        with self._lock:
            while not self._ready:
                self._wait()
            name, tensor = self._ready.popleft()
            if self._stream is not None and tensor.is_cuda:
                use_on_current_stream(tensor, self._stream)
            return name, tensor

    def _wait(self) -> None:
        """Wait for the next tensors."""
        if self._ended:
            raise self._error_of_end()
        try:
            # Any error or interrupt closes the iterator, so that no tensor is skipped without an
            # error.
            self._waiting_thread = threading.get_ident()
            try:
                with self._call:
                    self._reporter.attach()
                    loaded = next(self._batches)
            except StopIteration:
                self._reporter.finish()
                raise
            if not self._plan.returns_as_loaded:
                loaded = [(n, self._plan.in_requested_form(n, one)) for n, one in loaded]
            several = len(loaded) > 1 and loaded[0][1].is_cuda
            self._stream = torch.cuda.current_stream(loaded[0][1].device) if several else None
            self._ready.extend(
                [(name, one) for number, one in loaded for name in self._names[number]]
            )
        except BaseException as error:
            self._waiting_thread = None
            was_closed = self._ended
            self._close()
            if was_closed and isinstance(error, Exception):
                raise self._error_of_end() from error
            raise
        finally:
            self._waiting_thread = None

    def _error_of_end(self) -> Exception:
        if self._closer in (None, threading.get_ident()):
            return StopIteration()
        return ClosedError("the iterator was closed by another thread")

    def close(self) -> None:
        """End the load that is under way, and close the file. Closing again does nothing."""
        self._refuse_call_from_progress()
        if not self._ended:
            self._closer = threading.get_ident()
        self._close()

    def _close(self) -> None:
        self._ended = True
        if self._process == os.getpid():
            self._batches.end()
            with self._lock:
                self._batches.close()
                self._ready.clear()
            self._reporter.close()
        self._file.close()

    def _refuse_call_from_progress(self) -> None:
        """Refuse calls from ``progress=``: they would wait for the load that makes them."""
        if self._waiting_thread == threading.get_ident() and self._process == os.getpid():
            raise RuntimeError(
                "the progress= function uses an iterator that waits for the same load"
            )

    def __del__(self) -> None:
        if hasattr(self, "_waiting_thread"):
            self.close()
