"""Tensors one by one, while the next are on their way."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from .._types import FilterFuncType, Name
from ..tensors.exchange import cast_dtype, copied
from .arguments import resolve_device
from .encryption import DecryptionParams
from .progress import Progress, ProgressType
from .tensor_file import TensorFile, in_batches

#: Smaller tensors on the CPU get memory of their own: they come in blocks of up to 64 MiB, which
#: one that the caller keeps would keep.
_SMALL = 1 << 20

_Batch = list[tuple[Name, torch.Tensor]]
#: Iterators that may have a thread.
_ALIVE: weakref.WeakSet[_Iterator] = weakref.WeakSet()


def iterate(
    uri: str | os.PathLike[Any] | Any,
    device: torch.device | str | None = None,
    *,
    buffer_bytes: int = 1 << 30,
    dtype: torch.dtype | str | None = None,
    verify_hash: bool | str = False,
    num_readers: int | None = None,
    encryption: DecryptionParams | None = None,
    filter_func: FilterFuncType | None = None,
    progress: ProgressType = False,
    cache_dir: str | os.PathLike[Any] | None = None,
    memory_limit: int | None = None,
) -> Iterator[tuple[Name, torch.Tensor]]:
    """Yield the names and tensors of a file one by one, in its order.

    The next tensors are read while the caller uses this one: at most ``buffer_bytes`` bytes of
    them are loaded or on their way at a time, or one tensor that is larger. Tensors are the
    caller's, in memory that they share with no other, and nothing of this keeps them. (The views
    that a checkpoint of ``torch.save`` holds of one storage take all of it to be loaded, where they
    are not contiguous.) The file is opened at the call, and closed with the
    iterator. On CUDA they are for the stream that is current when the next one is asked for.

    Args:
        uri: What :class:`tensorizer.TensorDeserializer` opens; the shards of a checkpoint come one
            after another. A file object is closed.
        device: Where the tensors go; None for torch's default device.
        buffer_bytes: The most bytes that are held for the caller.
        dtype: Cast floating-point tensors.
        verify_hash: Compare every tensor with the hashes in the file.
        num_readers: Threads that read at once.
        encryption: What an encrypted file is decrypted with.
        filter_func: Called with each tensor's name; those for which it returns something false are
            passed over.
        progress: Called with the bytes of tensor data that are loaded, and with how many there are;
            on the thread that loads, so that it cannot use the iterator (``RuntimeError``). What it
            raises is raised by the iterator. True shows a bar where stderr is a terminal.
        cache_dir: A folder that keeps what an HTTP server or S3 sends, so that the next load of the
            same file finds it there, and the default is what ``TENSORIZER_CACHE`` names. See
            ``docs/how-to/cache.md``.
        memory_limit: The most bytes in flight: here the tensors count that are loaded or on their
            way, so that it bounds ``buffer_bytes``, and what reads them takes the rest. None for
            what ``TENSORIZER_MEMORY_MB`` says.

    Raises:
        ValueError: ``buffer_bytes`` is not positive, or ``memory_limit`` is less than the least,
            which the message names.
        OSError, ValueError, HashMismatchError, CryptographyError: See
            :class:`tensorizer.TensorDeserializer`; what is found out while reading is raised by the
            iterator.

    """
    if buffer_bytes < 1:
        raise ValueError(f"buffer_bytes must be positive, not {buffer_bytes}")
    place = resolve_device(torch.get_default_device() if device is None else device)
    told = Progress(progress)
    file = TensorFile(
        uri,
        dtype=dtype,
        num_readers=num_readers,
        verify_hash=verify_hash,
        encryption=encryption,
        clone=True,
        progress=told,
        cache_dir=cache_dir,
        memory_limit=memory_limit,
    )
    file.keeps_shared = False
    try:
        names = file.reader.names(range(len(file)))
        wanted = [n for n, name in enumerate(names) if filter_func is None or filter_func(name)]
        told.total = file.reader.data_len(wanted)
        made = _Iterator(file, names, wanted, place, buffer_bytes)
    except BaseException:
        file.close()
        raise
    return made


class _Iterator(Iterator[tuple[Name, torch.Tensor]]):
    """Loads batches on a thread, one ahead of the one that is handed out."""

    def __init__(
        self,
        file: TensorFile,
        names: Sequence[Name],
        wanted: Sequence[int],
        device: torch.device,
        buffer_bytes: int,
    ) -> None:
        self._file, self._names, self._device = file, names, device
        self._size = [_cost(file, number, device) for number in range(len(file))].__getitem__
        self._most = file.hold(buffer_bytes, wanted, self._size, device)
        self._batches = in_batches(wanted, self._size, max(1, self._most // 2))
        self._ready: deque[tuple[Name, torch.Tensor]] = deque()
        self._held = 0
        self._next: list[int] | None = next(self._batches, None)
        self._coming: Future[_Batch] | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        _ALIVE.add(self)

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> tuple[Name, torch.Tensor]:
        if self._process != os.getpid():
            raise RuntimeError("this iterator belongs to the process that made it")
        self._refuse_progress()
        with self._lock:
            return self._take()

    def _take(self) -> tuple[Name, torch.Tensor]:
        if not self._ready:
            self._held = 0
            if self._next is None and self._coming is None:
                self.close()
                raise StopIteration
            try:
                self._begin()
                self._arrive()
            except BaseException:
                self.close()
                raise
        if self._next is not None and self._held + self._bytes(self._next) <= self._most:
            self._begin()
        return self._ready.popleft()

    def _bytes(self, numbers: Iterable[int]) -> int:
        return sum(map(self._size, numbers))

    def _begin(self) -> None:
        """Have the next batch loaded, unless one is on its way."""
        if self._coming is not None or self._next is None:
            return
        stream = None
        if self._device.type == "cuda":
            # Memory that is taken on a stream is used again by the next work on it.
            stream = torch.cuda.current_stream(self._device)
        coming: Future[_Batch] = Future()
        names = [self._names[number] for number in self._next]
        work = (self._file, self._next, names, (self._device, stream), coming)
        # It knows nothing of this object, which goes when its caller lets it go.
        thread = threading.Thread(target=_load, args=work, name="tensorizer-iterate", daemon=True)
        # Known before it runs: it may call progress= at once.
        before, self._thread = self._thread, thread
        try:
            thread.start()
        except BaseException:
            self._thread = before
            raise
        self._coming = coming
        self._next = next(self._batches, None)

    def _arrive(self) -> None:
        """Wait for the batch that is on its way."""
        assert self._coming is not None
        batch = self._coming.result()
        self._coming = None
        self._held = sum(tensor.nbytes for _, tensor in batch)
        self._ready.extend(batch)

    def close(self) -> None:
        """End the load that is under way, and close the file. Closing again does nothing."""
        self._refuse_progress()
        self._batches = iter(())
        self._next = None
        self._ready.clear()
        self._file.stop()
        thread, self._thread, self._coming = self._thread, None, None
        if thread is not None and self._process == os.getpid():
            thread.join()
        self._file.close()

    def _refuse_progress(self) -> None:
        """Refuse calls from ``progress=``: the load that calls it would wait for itself."""
        if threading.current_thread() is self._thread and self._process == os.getpid():
            raise RuntimeError("progress= was called by a load that this iterator waits for")

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()


def _load(
    file: TensorFile,
    numbers: Sequence[int],
    names: Sequence[Name],
    place: tuple[torch.device, Any],
    future: Future[_Batch],
) -> None:
    """Load tensors on a thread of their own, for a device and its current stream."""
    device, stream = place
    try:
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            tensors = [_own(tensor) for _, tensor, _ in file.load(numbers, device)]
        future.set_result(list(zip(names, tensors, strict=True)))
    except BaseException as error:
        future.set_exception(error)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in memory that it shares with no other."""
    cpu = tensor.device.type == "cpu"
    small = cpu and tensor.nbytes < _SMALL
    # A view of a checkpoint's storage, which others may be views of too.
    view = tensor.untyped_storage().nbytes() > tensor.nbytes or not tensor.is_contiguous()
    return copied(tensor) if small or (cpu and view) else tensor


def _cost(file: TensorFile, number: int, device: torch.device) -> int:
    """Return the bytes that a tensor takes while it is loaded, cast and copied."""
    size = file.reader.memory_len(number)
    name, _, _ = file.reader.describe(number)
    dtype = getattr(torch, name, None)
    if dtype is not None and file.dtype is not None:
        size = size * cast_dtype(dtype, file.dtype).itemsize // dtype.itemsize
    return size * 2 if size < _SMALL and device.type == "cpu" else size


@atexit.register
def _close_all() -> None:
    """End loads before the interpreter, which would end their threads in the middle of one."""
    for iterator in list(_ALIVE):
        iterator.close()
