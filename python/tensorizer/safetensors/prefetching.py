"""Loads tensors of a safetensors file in the background: ``safe_open.prefetch``."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import torch

from .._errors import ClosedError
from .._native import TensorIterator
from ..file.exit_hooks import close_at_exit
from ..file.open_file import OpenFile
from ..file.read_ahead import use_on_current_stream
from ..tensors import devices, fake_mode
from ..tensors.handles import take
from .errors import SafetensorError, as_safetensor_errors
from .prefetch_plan import PlannedTensor
from .safetensors_file import SafetensorsFile

#: Bytes that are read ahead of the caller if no budget is given: all bytes.
_UNLIMITED = (1 << 63) - 1


class PrefetchLoader:
    """Tensors of a file that are loaded in the background; :meth:`safe_open.prefetch` returns it.

    Each tensor is returned once, by :meth:`take` or by iterating, when it is loaded; on CUDA it is
    then ready for all streams. It belongs to the caller, and shares its memory with no other
    tensor. Several threads can use the loader, also after the ``safe_open`` is closed.
    """

    def __init__(
        self,
        opened: SafetensorsFile,
        planned: list[PlannedTensor],
        device: torch.device,
        *,
        readers: int | None,
        buffer_bytes: int | None,
    ) -> None:
        self._device = device
        #: The file, which this reference keeps open.
        self._opened: SafetensorsFile | None = opened
        #: Names in the order of the plan, which is that of the native iterator's numbers.
        self._names = [tensor.name for tensor in planned]
        #: Indices to apply to the loaded parts of tensors, by name.
        self._rests = {tensor.name: tensor.rest for tensor in planned}
        #: The names of tensors that were not handed out yet.
        self._remaining = set(self._names)
        #: Tensors that were loaded before they were requested, each with the CUDA stream for which
        #: it was loaded.
        self._ready: dict[str, tuple[torch.Tensor, torch.cuda.Stream | None]] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: A token of the call that waits for the next tensors of the native iterator, or None.
        self._puller: object | None = None
        #: True for tensors of ``FakeTensorMode``, for which nothing is read ahead.
        self._fake = fake_mode.is_active()
        try:
            place = devices.number(device)
        except (AssertionError, RuntimeError) as error:
            raise SafetensorError(f"Error while prefetching to {device}: {error}") from error
        parts = opened.file
        if len(planned) < len(parts) or any(tensor.ranges for tensor in planned):
            parts = parts.sliced([(tensor.number, tensor.ranges) for tensor in planned])
        #: The file with these parts as its tensors; None once the loader is closed.
        self._file: OpenFile | None = parts
        numbers, most = range(0 if self._fake else len(planned)), buffer_bytes or _UNLIMITED
        self._native: TensorIterator = parts.reader.iterate(
            numbers, device=place, buffer_bytes=most, ready=True, complete=True, readers=readers
        )
        close_at_exit(self)

    def names(self) -> list[str]:
        """Return the names of the tensors, in the order of the file."""
        return list(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor, or the requested part of it; wait until it is loaded.

        With ``buffer_bytes``, tensors that are loaded before it stay in the loader, even if they
        exceed that limit.

        Raises:
            SafetensorError: It is not in the plan, or was returned already; the file cannot be
                read, or is damaged; or the loader is closed.

        """
        if name not in self._rests:
            raise SafetensorError(f"tensor {name} is not in the prefetch plan")
        found = self._take(name)
        if found is None:
            raise SafetensorError(
                f"{name}: tensor already delivered (each tensor is handed out once, by take or by "
                "iteration)"
            )
        return found[1]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors in the order in which they are loaded, without those handed out.

        Raises:
            SafetensorError: See :meth:`take`.

        """
        # A generator would keep the last tensor while it waits for the next one.
        return iter(self._take, None)

    def _take(self, wanted: str | None = None) -> tuple[str, torch.Tensor] | None:
        """Take a tensor, or the one that was loaded first. None if it, or all, were handed out.

        Raises:
            SafetensorError: It will not be loaded: the loader is closed, or the load has failed.

        """
        if self._process != os.getpid():
            raise SafetensorError(
                "this loader was made by the parent process, before fork(): make a new one"
            )
        call = object()
        while True:
            try:
                # The lock itself, not the condition: an interrupt while that is entered would leave
                # it held.
                with self._lock:
                    if not (self._remaining if wanted is None else wanted in self._remaining):
                        return None
                    name = next(iter(self._ready), None) if wanted is None else wanted
                    if name is not None and name in self._ready:
                        return name, self._hand_out(name)
                    self._refuse_to_wait()
                    if self._puller is not None:
                        self._changed.wait()
                        continue
                    self._puller = call
                ready = self._next()
                with self._lock:
                    if not self._closed:
                        self._ready.update(ready)
            except BaseException as error:
                if self._puller is not call:
                    raise
                # An interrupt ends the load too: tensors may be on their way to the caller.
                self._native.close()
                if not (self._closed and isinstance(error, ClosedError)):
                    self._error = error
                    raise
            finally:
                with self._lock:
                    if self._puller is call:
                        self._puller = None
                        self._changed.notify_all()

    def _refuse_to_wait(self) -> None:
        """Raise if no tensors will be loaded anymore."""
        if self._closed:
            raise SafetensorError("prefetch loader closed")
        if self._error is not None:
            said = str(self._error) or type(self._error).__name__
            raise SafetensorError(f"the load has failed: {said}") from self._error

    def _next(self) -> dict[str, tuple[torch.Tensor, torch.cuda.Stream | None]]:
        file, names = self._file, self._names
        if self._fake and file is not None:
            loaded = file.load(range(len(names)), self._device)
            return {names[at]: (one, None) for at, one, _ in loaded if names[at] in self._remaining}
        with as_safetensor_errors("prefetching", OSError):
            found = self._native.next()
        if found is None or file is None:
            raise SafetensorError("the load has ended, and tensors are missing")
        handle, places = found
        tensors = file.placed(take(handle), places, self._device)
        on_cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if on_cuda else None
        return {names[place]: (one, stream) for place, one in zip(places, tensors, strict=True)}

    def _hand_out(self, name: str) -> torch.Tensor:
        tensor, stream = self._ready.pop(name)
        self._remaining.discard(name)
        if stream is not None:
            use_on_current_stream(tensor, stream)
        rest = self._rests[name]
        return tensor[rest] if rest else tensor

    def close(self) -> None:
        """End the load, and release the file and the tensors that were not returned.

        This waits for reads and copies that are under way. Closing again has no effect.
        """
        if self._process != os.getpid():
            return
        self._closed = True
        self._native.close()
        with self._lock:
            self._ready.clear()
            # The traceback of an error refers to the file, too.
            self._opened = self._file = self._error = None
            self._changed.notify_all()

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_native"):
            self.close()
