"""Tensors of a safetensors file that are loaded in the background: ``safe_open.prefetch``."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import TracebackType

import torch

from .._errors import ClosedError
from .._native import TensorIterator
from ..file.ahead import use_on_current_stream
from ..file.ending import close_at_exit
from ..file.tensor_file import TensorFile
from ..tensors import devices
from ..tensors.exchange import take
from .errors import SafetensorError, as_safetensor_errors
from .opened import Opened
from .plans import Planned

#: Bytes that are read ahead of the caller if no budget is given: all.
_UNLIMITED = (1 << 63) - 1

#: A tensor, and the stream of CUDA for which it came.
_Landed = tuple[torch.Tensor, "torch.cuda.Stream | None"]


class PrefetchLoader:
    """Tensors of a file on their way to a device, which :meth:`safe_open.prefetch` returns.

    Each tensor is handed out once, by :meth:`take` or by iterating, when its bytes are there: on
    CUDA for all streams. It belongs to the caller, and shares its memory with no other one. The
    loader can be used by several threads, and outlives the ``safe_open``.
    """

    def __init__(
        self,
        opened: Opened,
        planned: list[Planned],
        device: torch.device,
        *,
        readers: int | None,
        buffer_bytes: int | None,
    ) -> None:
        self._device = device
        #: The file, which it keeps open.
        self._opened: Opened | None = opened
        #: Names in the order of the plan, by which the native iterator counts.
        self._names = [tensor.name for tensor in planned]
        #: Indices into what is read of a tensor, by name.
        self._rests = {tensor.name: tensor.rest for tensor in planned if tensor.rest}
        #: The plan's tensors by name: True for those that were not handed out.
        self._waiting = dict.fromkeys(self._names, True)
        self._left = len(planned)
        #: Tensors that have landed before they were asked for, and the stream of CUDA for which
        #: they came.
        self._landed: dict[str, _Landed] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._process = os.getpid()
        self._changed = threading.Condition()
        #: True while a thread waits for the next tensors of the native iterator.
        self._waits = False
        try:
            devices.number(device)
        except (AssertionError, RuntimeError) as error:
            raise SafetensorError(f"Error while prefetching to {device}: {error}") from error
        parts = opened.file
        if len(planned) < len(parts) or any(tensor.ranges for tensor in planned):
            parts = parts.sliced([(tensor.number, tensor.ranges) for tensor in planned])
        #: The file with these parts as its tensors; None once the loader is closed.
        self._file: TensorFile | None = parts
        self._native: TensorIterator = parts.iterate(
            range(len(planned)),
            device,
            buffer_bytes=buffer_bytes or _UNLIMITED,
            ready=True,
            complete=True,
            readers=readers,
        )
        close_at_exit(self)

    def names(self) -> list[str]:
        """Return the names of the tensors, in the order of the file."""
        return list(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor, or the part of it that was asked for. Waits until it has landed.

        With ``buffer_bytes`` tensors that land before it stay in the loader, beyond that number.

        Raises:
            SafetensorError: It is not in the plan, or was handed out before; the file cannot be
                read, or is damaged; or the loader is closed.

        """
        self._check_process()
        if name not in self._waiting:
            raise SafetensorError(f"tensor {name} is not in the prefetch plan")
        with self._changed:
            while self._waiting[name]:
                if name in self._landed:
                    return self._hand_out(name)
                self._wait()
        raise SafetensorError(
            f"{name}: tensor already delivered (each tensor is handed out once, by take or by "
            "iteration)"
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors in the order in which they land, without those that were taken.

        Raises:
            SafetensorError: See :meth:`take`.

        """
        # A generator would keep the last tensor while it waits for the next one.
        return iter(self._take_any, None)

    def _take_any(self) -> tuple[str, torch.Tensor] | None:
        """Take the tensor that has landed first. None if all were handed out."""
        self._check_process()
        with self._changed:
            while self._left:
                for name in self._landed:
                    return name, self._hand_out(name)
                self._wait()
        return None

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise SafetensorError("this loader belongs to the process that made it")

    def _wait(self) -> None:
        """Wait until more tensors have landed.

        Raises:
            SafetensorError: None will: the loader is closed, or the load has failed.

        """
        if self._closed:
            raise SafetensorError("prefetch loader closed")
        if self._error is not None:
            raise SafetensorError(f"the load has failed: {self._error}") from self._error
        if self._waits:
            self._changed.wait()
        else:
            self._let_land()

    def _let_land(self) -> None:
        """Wait for the next tensors, while other threads may take those that have landed."""
        self._waits = True
        self._changed.release()
        try:
            landed = self._next()
        except BaseException as error:
            self._native.close()
            self._changed.acquire()
            if not (self._closed and isinstance(error, ClosedError)):
                self._error = error
                raise
        else:
            self._changed.acquire()
            if not self._closed:
                self._landed.update(landed)
        finally:
            self._waits = False
            self._changed.notify_all()

    def _next(self) -> dict[str, _Landed]:
        file = self._file
        with as_safetensor_errors("prefetching", OSError):
            found = self._native.next()
        if found is None or file is None:
            raise SafetensorError("the load has ended, and tensors are missing")
        handle, places = found
        tensors = file.placed(take(handle), places, self._device)
        on_cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if on_cuda else None
        names = self._names
        return {names[place]: (one, stream) for place, one in zip(places, tensors, strict=True)}

    def _hand_out(self, name: str) -> torch.Tensor:
        tensor, stream = self._landed.pop(name)
        self._waiting[name] = False
        self._left -= 1
        if stream is not None:
            use_on_current_stream(tensor, stream)
        rest = self._rests.get(name)
        return tensor if rest is None else tensor[rest]

    def close(self) -> None:
        """End the load, and let go the file and the tensors that were not handed out.

        Waits for reads and copies that are under way. Closing again does nothing.
        """
        if self._process != os.getpid():
            return
        with self._changed:
            self._closed = True
        self._native.close()
        with self._changed:
            self._landed.clear()
            # The traceback of an error keeps the file too.
            self._opened = self._file = self._error = None
            self._changed.notify_all()

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_native"):
            self.close()
