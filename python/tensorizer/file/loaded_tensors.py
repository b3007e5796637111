"""The tensors of a file that have been loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from .._errors import HashMismatchError
from .._locks import ForkSafeLock
from .._native import with_earlier
from ..modules import state, vllm_files
from ..tensors import fake_mode
from ..tensors.handles import cast_dtype, dtype_of, lend
from .open_file import OpenFile

#: torch's function that makes parameters of plain tensors.
_made: Callable[..., torch.nn.Parameter] = torch.Tensor._make_subclass


class LoadedTensors:
    """Loads each tensor of a file once, and keeps it. Safe for use by several threads.

    Args:
        file: The file of the tensors.
        selection: The tensors that may be requested; None for all.

    Attributes:
        file: The file that tensors are loaded from. If vLLM wrote it, they are loaded in its dtypes
            and cast when they are requested: a module may have a slot for the file's dtype.

    """

    def __init__(self, file: OpenFile, selection: Sequence[int] | None) -> None:
        casts_later = file.dtype is not None and file.is_whole and _has_marker(file)
        self.file = file.uncast() if casts_later else file
        self._dtype_on_request = file.dtype if casts_later else None
        self._selection = selection
        self._tensors: dict[int, torch.nn.Parameter] = {}
        #: The last tensor that was read of a file that can only be read front to back.
        self._passed: int | None = None
        #: By number, casts of loaded tensors.
        self._casts: dict[int, torch.nn.Parameter] = {}
        #: By number, the hashes that were compared.
        self._verified: dict[int, str] = {}
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
        tensor = self._tensors[number]
        wanted = cast_dtype(tensor.dtype, self._dtype_on_request)
        if wanted is tensor.dtype:
            return tensor
        if number not in self._casts:
            self._casts.setdefault(number, _parameter(tensor.detach().to(wanted)))
        return self._casts[number]

    @property
    def is_vllms(self) -> bool:
        """True if vLLM wrote the file from a model of its own."""
        return _has_marker(self.file)

    @functools.cached_property
    def _strides(self) -> dict[int, Any]:
        """The strides that a file of vLLM states, by number."""
        metadata = self.file.reader.metadata if self.is_vllms else None
        stored = vllm_files.stored_strides(metadata or ())
        found = zip(stored.values(), self.file.reader.find_all(list(stored)), strict=True)
        return {number: strides for strides, number in found if number is not None}

    def has_other_strides(self, number: int, there: torch.Tensor | None) -> bool:
        """Tell whether a tensor with memory has other strides than a file of vLLM states."""
        if there is None or there.is_meta or number not in self._strides:
            return False
        return bool(list(there.stride()) != self._strides[number])

    def for_slot(self, number: int, there: torch.Tensor | None) -> torch.nn.Parameter:
        """Return a loaded tensor for a slot of a module, which holds ``there``."""
        if number in self._strides:
            strided = vllm_files.with_strides(self._tensors[number], self._strides[number])
            # In the place of the other one, whose memory is freed.
            self._tensors[number] = _parameter(strided)
        loaded = self._tensors[number]
        return loaded if _is_as_saved(loaded.dtype, loaded.shape, there) else self[number]

    def cast_for(self, part: torch.Tensor, there: torch.Tensor | None) -> torch.Tensor:
        """Return a loaded part of a tensor in the dtype for a slot, which holds ``there``."""
        same = there is not None and there.dtype is part.dtype
        return part if same else part.to(cast_dtype(part.dtype, self._dtype_on_request))

    def dtypes_for_slots(
        self, numbers: Sequence[int], there: Sequence[torch.Tensor | None]
    ) -> list[torch.dtype]:
        """Return the dtypes that tensors have in the slots of a module, which hold ``there``."""
        described = self.file.reader.describe_all(numbers)
        known = {name: dtype_of(name) for name in {name for name, _ in described}}
        wanted, vllms = self.file.dtype, self._dtype_on_request
        return [
            cast_dtype(known[name], wanted)
            if vllms is None or _is_as_saved(known[name], shape, tensor)
            else cast_dtype(known[name], vllms)
            for (name, shape), tensor in zip(described, there, strict=True)
        ]

    def check_hashes(self, numbers: Sequence[int], verify: str) -> None:
        """Compare tensors that were loaded without comparing these hashes.

        Raises:
            HashMismatchError: Their bytes are not those that were hashed.
            ValueError: A tensor was cast when it was loaded, so that its bytes are gone; or only
                the hashes of whole files are known.

        """
        if verify == "nothing":
            return
        with self._load_lock.current():
            self._assign_numbers()
            each_has_hashes = self.file.reader.format == "tensors"
            enough = {verify, "all"} if each_has_hashes else {"crc32", "all"}
            there = [
                n for n in numbers if n in self._tensors and self._verified.get(n) not in enough
            ]
            for n in there:
                stored = dtype_of(self.file.reader.describe(n)[0])
                if not each_has_hashes or self._tensors[n].dtype is not stored:
                    why = f"cast from {stored}" if each_has_hashes else "has no hash of its own"
                    raise ValueError(
                        f"{self.file.reader.name(n)!r} was loaded without verification, and {why}: "
                        f"pass verify_hash={verify == 'all' or verify!r} to TensorDeserializer "
                        "itself, or lazy_load=True"
                    )
            if not there:
                return
            same = self.file.reader.matches(lend([self._tensors[n] for n in there]), there)
            wrong = [self.file.reader.name(n) for n, ok in zip(there, same, strict=True) if not ok]
            if wrong:
                raise HashMismatchError(
                    f"the loaded bytes of tensor {wrong[0]!r} do not have the hashes that "
                    f"{self.file.uri} records"
                )
            self._verified.update(dict.fromkeys(there, "all"))

    def load_from_shard(self, name: str, device: torch.device) -> torch.nn.Parameter | None:
        """Return a tensor by name, from its own shard; None if other shards must be opened, too."""
        with self._load_lock.current():
            if name not in self._without_number:
                part = self.file.part(name)
                if part is None:
                    return None
                ((_, tensor, module),) = part.load([part.find(name)], device)
                self._without_number[name] = _parameter(tensor), module
            return self._without_number[name][0]

    def _assign_numbers(self) -> None:
        """Move tensors that were loaded early to their numbers."""
        while self._without_number:
            name, (tensor, module) = self._without_number.popitem()
            number = self.file.find(name)
            self._tensors[number], self.modules[number] = tensor, module

    def load_one(self, number: int, device: torch.device) -> torch.nn.Parameter:
        """Return a tensor, and load it first if it is not loaded yet."""
        if number in self._tensors:
            return self[number]
        with self._load_lock.current():
            if self._without_number:
                self._assign_numbers()
            if number not in self._tensors:
                needed = self._needed([number])
                if len(needed) == 1:
                    tensor, self.modules[number] = self.file.load_one(number, device)
                    self._tensors[number] = _parameter(tensor)
                    self._verified[number] = self.file.verify
                else:
                    self._load(needed, device, None)
            return self[number]

    def load(self, numbers: Sequence[int], device: torch.device, verify: str | None = None) -> None:
        """Load those of the tensors that are not loaded yet."""
        with self._load_lock.current():
            self._assign_numbers()
            self._load(self._needed(numbers), device, verify)

    def _load(self, numbers: Sequence[int], device: torch.device, verify: str | None) -> None:
        """Load tensors; the lock is held."""
        for number, tensor, module in self.file.load(numbers, device, verify):
            self._tensors[number] = _parameter(tensor)
            self.modules[number] = module
            self._verified[number] = verify or self.file.verify

    def would_pass_others(self, numbers: Sequence[int]) -> bool:
        """Tell whether a read of tensors passes others, which can then be read no more."""
        return len(with_earlier(self.file.reader, numbers, self._passed)) > len(numbers)

    @functools.cached_property
    def _wanted(self) -> Container[int]:
        """The tensors that may be requested, as a set."""
        return range(len(self.file)) if self._selection is None else set(self._selection)

    def _needed(self, numbers: Sequence[int]) -> list[int]:
        """Return the tensors that are not loaded yet, and others that must be loaded with them.

        Of a file that can only be read front to back, these are the tensors before them: they may
        be requested later.
        """
        missing = [number for number in numbers if number not in self._tensors]
        found = with_earlier(self.file.reader, missing, self._passed)
        if found:
            self._passed = found[-1]
        if len(found) == len(missing):
            return missing
        found = [n for n in found if n not in self._tensors and n in self._wanted]
        if len(found) > len(missing):
            self.file.reader.report_fallback(
                "tensors before the wanted ones were loaded too, because "
                f"{self.file.uri} can only be read front to back"
            )
        return found

    def fill(self, rows: Sequence[state.Row], device: torch.device, verify: str) -> set[int]:
        """Fill those tensors of a module in place that fit; return their numbers.

        ``rows`` has slots in the module, the tensors that are there, and the numbers of the
        file's.
        """
        if not self.file.can_fill_on(device):
            return set()
        with self._load_lock.current():
            self._assign_numbers()
            fits: list[tuple[int, torch.Tensor]] = []
            described = self.file.reader.describe_all([number for _, _, number in rows])
            dtypes = {name: dtype_of(name) for name in {name for name, _ in described}}
            wanted = self.file.dtype
            for (slot, tensor, number), (name, shape) in zip(rows, described, strict=True):
                dtype = dtypes[name]
                if (
                    tensor is not None
                    and cast_dtype(dtype, wanted) is dtype
                    and number not in self._tensors
                    and slot.can_fill(tensor, device, dtype, shape)
                    and not self.has_other_strides(number, tensor)
                ):
                    fits.append((number, tensor))
            fits = state.without_overlaps(fits)
            chosen = [number for number, _ in fits]
            if self.would_pass_others(chosen):
                return set()
            if fits:
                modules = self.file.fill([tensor for _, tensor in fits], chosen, verify)
                self.modules.update(zip(chosen, modules, strict=True))
                for number, tensor in fits:
                    known = tensor if isinstance(tensor, torch.nn.Parameter) else _parameter(tensor)
                    self._tensors[number] = known
                    self._verified[number] = verify
            return set(chosen)


def _is_as_saved(dtype: torch.dtype, shape: Sequence[int], there: torch.Tensor | None) -> bool:
    """Tell whether a tensor of vLLM's file is not cast for a slot, which holds ``there``.

    vLLM had made or changed it for its kernels, or the slot has its dtype.
    """
    return there is None or there.dtype is dtype or tuple(there.shape) != tuple(shape)


def _has_marker(file: OpenFile) -> bool:
    """Tell whether vLLM wrote a file from a model of its own."""
    return any(file.reader.find(f".{name}") is not None for name in state.MARKERS)


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """Return a tensor as a parameter; those that can have a gradient require one."""
    dtype = tensor.dtype
    differentiable = dtype.is_floating_point or dtype.is_complex
    if fake_mode.is_fake(tensor):
        return torch.nn.Parameter(tensor, differentiable)
    return _made(torch.nn.Parameter, tensor, differentiable)
