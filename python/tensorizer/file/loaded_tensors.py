"""The tensors of a file that have been loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .._locks import ForkSafeLock
from ..modules import state
from ..tensors import fake_mode
from ..tensors.handles import cast_dtype, dtype_of
from .tensor_file import TensorFile

#: torch's function that makes parameters of plain tensors.
_made = torch.Tensor._make_subclass


class LoadedTensors:
    """Loads each tensor of a file once, and keeps it. Safe for use by several threads.

    Args:
        file: The file of the tensors.
        selection: The tensors that may be requested; None for all.

    """

    def __init__(self, file: TensorFile, selection: Sequence[int] | None) -> None:
        self._file = file
        self._selection = selection
        self._tensors: dict[int, torch.nn.Parameter] = {}
        #: By name, tensors that were loaded before all shards were opened, and their modules'
        #: indices.
        self._without_number: dict[str, tuple[torch.nn.Parameter, int]] = {}
        #: By number, the index of the module that each tensor belonged to.
        self.modules: dict[int, int] = {}
        #: Held while loading, so that all threads get the same objects.
        self._load_lock = ForkSafeLock()

    def __contains__(self, number: int) -> bool:
        return number in self._tensors

    def __getitem__(self, number: int) -> torch.nn.Parameter:
        """Return a tensor that has been loaded."""
        return self._tensors[number]

    def load_from_shard(self, name: str, device: torch.device) -> torch.nn.Parameter | None:
        """Return a tensor by name, from its own shard; None if other shards must be opened, too."""
        with self._load_lock.current():
            if name not in self._without_number:
                part = self._file.part(name)
                if part is None:
                    return None
                ((_, tensor, module),) = part.load([part.find(name)], device)
                self._without_number[name] = _parameter(tensor), module
            return self._without_number[name][0]

    def _assign_numbers(self) -> None:
        """Move tensors that were loaded early to their numbers."""
        while self._without_number:
            name, (tensor, module) = self._without_number.popitem()
            number = self._file.find(name)
            self._tensors[number], self.modules[number] = tensor, module

    def load_one(self, number: int, device: torch.device) -> torch.nn.Parameter:
        """Return a tensor, and load it first if it is not loaded yet."""
        found = self._tensors.get(number)
        if found is not None:
            return found
        if not self._file.reader.seekable:
            self.load([number], device)
            return self._tensors[number]
        with self._load_lock.current():
            if self._without_number:
                self._assign_numbers()
            found = self._tensors.get(number)
            if found is None:
                tensor, self.modules[number] = self._file.load_one(number, device)
                found = self._tensors[number] = _parameter(tensor)
            return found

    def load(self, numbers: Sequence[int], device: torch.device, verify: str | None = None) -> None:
        """Load those of the tensors that are not loaded yet."""
        with self._load_lock.current():
            self._assign_numbers()
            missing = [number for number in numbers if number not in self._tensors]
            if missing and not self._file.reader.seekable:
                # A stream is read only once: load all tensors that may be requested later.
                every = range(len(self._file)) if self._selection is None else self._selection
                missing = [n for n in every if n not in self._tensors]
            for number, tensor, module in self._file.load(missing, device, verify):
                self._tensors[number] = _parameter(tensor)
                self.modules[number] = module

    def fill(
        self,
        rows: Sequence[tuple[state.TensorSlot, torch.Tensor | None, int]],
        device: torch.device,
        verify: str,
    ) -> set[int]:
        """Fill those tensors of a module in place that fit; return their numbers.

        ``rows`` has slots in the module, the tensors that are there, and the numbers of the
        file's.
        """
        if not self._file.can_fill_on(device):
            return set()
        with self._load_lock.current():
            self._assign_numbers()
            fits: list[tuple[int, torch.Tensor]] = []
            described = self._file.reader.describe_all([number for _, _, number in rows])
            dtypes = self._uncast_dtypes({name for name, _ in described})
            for (slot, tensor, number), (name, shape) in zip(rows, described, strict=True):
                dtype = dtypes.get(name)
                if (
                    tensor is not None
                    and dtype is not None
                    and number not in self._tensors
                    and slot.can_fill(tensor, device, dtype, shape)
                ):
                    fits.append((number, tensor))
            fits = state.without_overlaps(fits)
            if fits:
                chosen = [number for number, _ in fits]
                modules = self._file.fill([tensor for _, tensor in fits], chosen, verify)
                self.modules.update(zip(chosen, modules, strict=True))
                for number, tensor in fits:
                    known = tensor if isinstance(tensor, torch.nn.Parameter) else _parameter(tensor)
                    self._tensors[number] = known
            return {number for number, _ in fits}

    def _uncast_dtypes(self, names: Iterable[str]) -> dict[str, torch.dtype]:
        """Return the dtypes, by name, of those that are not cast."""
        dtypes = {name: dtype_of(name) for name in names}
        wanted = self._file.dtype
        return {name: d for name, d in dtypes.items() if cast_dtype(d, wanted) is d}


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """Return a tensor as a parameter; those that can have a gradient require one."""
    dtype = tensor.dtype
    differentiable = dtype.is_floating_point or dtype.is_complex
    if fake_mode.is_fake(tensor):
        return torch.nn.Parameter(tensor, differentiable)
    made: torch.nn.Parameter = _made(torch.nn.Parameter, tensor, differentiable)
    return made
