"""Yields tensors of an open file as they arrive, while the next ones are being read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from .._errors import ClosedError
from .._native import TensorIterator
from ..tensors import fake_mode
from ..tensors.handles import copied, take
from ..tensors.sharding import Part
from .selection import Selection, joined
from .tensor_file import TensorFile


class ReadAhead(Iterator[list[tuple[int, torch.Tensor]]]):
    """Yields the wanted tensors of a file as lists of numbers and tensors; small ones together.

    Args:
        wanted: Tensors, or parts of them.
        device: The device of the tensors.
        buffer_bytes: The most bytes that are loaded or being read, and not yet taken.
        ready: True for the order in which they become ready, False for that of the file.

    """

    def __init__(
        self, wanted: Selection, device: torch.device, buffer_bytes: int, *, ready: bool
    ) -> None:
        self._file, self._device = wanted.file, device
        self._parts = wanted.parts
        #: True if parts are cut here from whole tensors, because a stream that cannot seek is read
        #: once.
        self._cut_here = bool(wanted.parts) and not self._file.reader.seekable
        #: For each tensor to be read: the number of the tensor that it is, or is a part of.
        self._numbers = list(wanted.numbers)
        #: The file to read: the file itself, or a view of it that has the parts as its tensors.
        self._read = self._file
        read = self._numbers
        if wanted.parts and not self._cut_here:
            self._numbers, self._read = self._sliced(wanted)
            read = list(range(len(self._numbers)))
        self._of = dict(zip(read, self._numbers, strict=True)) if wanted.parts else {}
        #: Tensors whose bytes are not in order in the file. They are read last, one by one.
        #: Tensors of ``FakeTensorMode`` are not read at all.
        fake = fake_mode.is_active()
        self._strided = deque(read if fake else self._read.strided(read))
        late = set(self._strided)
        direct = [number for number in read if number not in late] if late else read
        self._read.refuse_without_data(direct)
        #: Boxes that have arrived, of parts with several boxes, each with its stream on CUDA.
        self._boxes: dict[int, dict[int, tuple[torch.Tensor, torch.cuda.Stream | None]]] = {}
        self._closed = False
        self._ready: list[tuple[int, torch.Tensor]] = []
        self._native: TensorIterator | None = self._read.iterate(
            direct, device, buffer_bytes=buffer_bytes, ready=ready
        )

    def _sliced(self, wanted: Selection) -> tuple[list[int], TensorFile]:
        """Return the number of each box's tensor, and a view of the file that has the boxes."""
        slices = []
        for number in wanted.numbers:
            part = wanted.parts.get(number)
            boxes = [None] if part is None else [box.ranges for box in part.boxes]
            slices += [(number, ranges) for ranges in boxes]
        return [number for number, _ in slices], self._file.sliced(slices)

    def __next__(self) -> list[tuple[int, torch.Tensor]]:
        while not self._ready:
            self._wait()
        ready, self._ready = self._ready, []
        return ready

    def _wait(self) -> None:
        """Wait for the next tensors."""
        if self._closed:
            raise ClosedError("the iterator was closed by another thread")
        found = None if self._native is None else self._native.next()
        if found is not None:
            handle, numbers = found
            tensors = self._read.placed(take(handle), numbers, self._device)
            if not self._parts:
                self._ready.extend(zip(numbers, tensors, strict=True))
                return
            for number, tensor in zip(numbers, tensors, strict=True):
                self._part_landed(number, tensor)
            return
        self._native = None
        if not self._strided:
            raise StopIteration
        number = self._strided.popleft()
        ((_, tensor, _),) = self._read.load([number], self._device)
        self._part_landed(number, _own(tensor))

    def _part_landed(self, read: int, tensor: torch.Tensor) -> None:
        """Take a tensor or a box that has arrived; queue each tensor that is complete."""
        number = self._of.get(read, read)
        part = self._parts.get(number)
        if part is None:
            self._ready.append((number, tensor))
        elif self._cut_here:
            boxes = [copied(box.of_whole(tensor)) for box in part.boxes]
            self._ready.append((number, self._joined(part, boxes)))
        else:
            found = self._boxes.setdefault(number, {})
            several = len(part.boxes) > 1 and tensor.is_cuda
            found[read] = tensor, torch.cuda.current_stream(tensor.device) if several else None
            if len(found) == len(part.boxes):
                del self._boxes[number]
                in_order = [found[at] for at in sorted(found)]
                for box, stream in in_order:
                    if stream is not None:
                        use_on_current_stream(box, stream)
                self._ready.append((number, self._joined(part, [box for box, _ in in_order])))

    def _joined(self, part: Part, boxes: list[torch.Tensor]) -> torch.Tensor:
        return boxes[0] if len(boxes) == 1 else joined(part, boxes, boxes[0].dtype, self._device)

    def close(self) -> None:
        """End the load, and wait for its reads and copies. Closing again does nothing."""
        self._closed = True
        # Another thread may be loading a strided tensor, which the native iterator does not know.
        self._file.stop()
        native = self._native
        if native is not None:
            native.close()
        if self._read is not self._file:
            self._read.reader.close()


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares its memory with no other."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return tensor if whole else copied(tensor)


def use_on_current_stream(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Make the current stream wait for a tensor's stream, if they differ."""
    # Cheaper than torch.cuda.current_stream, which makes an object for each call.
    if torch._C._cuda_getCurrentStream(tensor.device.index)[0] != stream.stream_id:
        current = torch.cuda.current_stream(tensor.device)
        current.wait_stream(stream)
        tensor.record_stream(current)
