"""``safe_open``, and the slices that it returns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from .._numbers import check_number
from .errors import SafetensorError
from .prefetch_plan import plan_tensors
from .prefetching import PrefetchLoader
from .safetensors_file import SafetensorsFile, TensorMeta, check_filename, resolve_device

try:
    from safetensors import safe_open as _library_safe_open
except ImportError:
    _library_safe_open = None  # type: ignore[assignment,misc]

_TORCH = ("pt", "torch", "pytorch")
_BACKENDS = ("mmap", "pread")
#: The default number of a prefetch's reader threads, with which the engine chooses the number.
_DEFAULT_THREADS = 8


class PySafeSlice:
    """A tensor of a file, whose parts are loaded by indexing; see :meth:`safe_open.get_slice`.

    It has the name of the class in safetensors. Like that class, it can be used after the file is
    closed.
    """

    def __init__(self, opened: SafetensorsFile, number: int) -> None:
        self._opened, self._number = opened, number

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor, in elements of the safetensors dtype."""
        return self._opened.describe(self._number)[1]

    def get_dtype(self) -> str:
        """Return the name of the dtype in safetensors, such as ``"F32"``."""
        return self._opened.describe(self._number)[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the part of the tensor that torch's indexing gives.

        For mapped files it is a view. Otherwise integers, slices and ``...`` read only what they
        select, and other indices read the whole tensor.

        Raises:
            IndexError, TypeError, ValueError: The index does not fit; raised as by torch.
            SafetensorError, OSError: The file cannot be read, or torch has no such dtype.

        """
        return self._opened.load_part(self._number, index)


class safe_open:
    """Open a safetensors file, whose tensors are loaded on request.

    Local files are mapped, as by safetensors. Opening takes no time, and bytes come into memory
    when they are first touched. The kernel begins to read a tensor or slice at once if it is
    requested by itself and is not in memory. Changes to a tensor do not reach the file, but are
    seen by all tensors of the same ``safe_open``. Truncating or overwriting the file in place
    destroys its tensors, and touching them then may end the process (SIGBUS): see ``mmap`` of
    :class:`tensorizer.TensorDeserializer`. Files of less than 1 MiB, and tensors that are not
    aligned, are read instead; so is everything with ``backend="pread"``, from addresses, and for
    other devices than the CPU.

    Its tensors and slices can still be used after it is closed.

    Args:
        filename: A path, or any address that :class:`tensorizer.TensorDeserializer` opens. It names
            a file, a folder with a checkpoint, or an index of shards.
        framework: ``"pt"``, ``"torch"`` or ``"pytorch"``. For another framework, the safetensors
            library is called, if it is installed, and its result is returned.
        device: The device of the tensors: a string, a number or a ``torch.device``. Without a
            number, the first device of its type.
        backend: ``"mmap"`` or ``"pread"``: read local files instead of mapping them.
        timeout: The seconds that opening, and each later load, may take; then it is a
            ``TimeoutError``. None for no limit. Not for other frameworks.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be opened.
        SafetensorError: It is not a safetensors file, or another argument is not one of these.
        TypeError: The file name is neither a str nor an ``os.PathLike``.

    """

    _opened: SafetensorsFile | None
    #: False for the stand-in for the library's class, which refuses devices other than CUDA.
    _prefetches_to_any_device = True

    def __new__(
        cls,
        filename: str | os.PathLike[str],
        framework: str,
        device: torch.device | str | int | None = "cpu",
        *,
        backend: str = "mmap",
        timeout: float | None = None,
    ) -> Any:
        """Open a file; the library opens those for other frameworks."""
        if framework not in _TORCH:
            if _library_safe_open is None:
                raise SafetensorError(
                    f"framework {framework} is invalid without safetensors itself"
                )
            return _library_safe_open(filename, framework, device, backend=backend)
        check_filename(filename)
        if backend not in _BACKENDS:
            raise SafetensorError(
                f'backend "{backend}" is invalid (expected one of: "mmap", "pread")'
            )
        self = super().__new__(cls)
        maps = backend == "mmap"
        self._opened = SafetensorsFile(filename, resolve_device(device), maps, timeout)
        return self

    def _open(self) -> SafetensorsFile:
        if self._opened is None:
            raise SafetensorError("File is closed")
        return self._opened

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened = None

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._open().numbers)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors, in the order of the file."""
        return list(self._open().numbers)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the file; None if it has none."""
        found = self._open().file.reader.metadata
        return None if found is None else dict(found)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Load a tensor.

        Raises:
            SafetensorError: There is no tensor of this name, torch has no such dtype, the file
                ends before it, or is closed.
            OSError, RuntimeError: The file cannot be read, or there is no such device.

        """
        return self._open().load_named(name)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Load all tensors at once, in the order of the file; raises as :meth:`get_tensor`."""
        return self._open().load_all()

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Return a tensor's entry in the header, without reading any data.

        Raises:
            SafetensorError: There is no tensor of this name, or the file is closed.

        """
        opened = self._open()
        return opened.meta(opened.find(name))

    def prefetch(
        self,
        plan: Mapping[str, Any] | None = None,
        *,
        device: torch.device | str | int | None = None,
        threads: int = _DEFAULT_THREADS,
        buffer_bytes: int | None = None,
    ) -> PrefetchLoader:
        """Begin to load tensors to a device in the background.

        Each tensor is returned once, when it is loaded: ``dict(file.prefetch())`` is the whole
        file. Meanwhile the file can be used, closed, and prefetched from again.

        Args:
            plan: For each tensor its name and the requested part: None for the whole tensor; a
                slice of its first dimension with step 1; or a tuple of integers, slices and
                ``...``, as for :meth:`get_slice`. None instead of a plan for all tensors.
            device: Their device; None for the device of the file. Inside a block of
                :func:`tensorizer_safetensors`, other devices than CUDA are refused, as by the
                safetensors library.
            threads: The number of reader threads; with 8, the default, the engine chooses it.
            buffer_bytes: The most bytes that are loaded or being read and not yet returned; a
                single larger tensor is allowed. None allocates memory for all tensors at once. The
                safetensors library has no such argument.

        Raises:
            SafetensorError: The plan or the device is wrong, torch has no dtype for a tensor, or
                the file is closed.
            TypeError, ValueError: An argument is of another type; ``buffer_bytes`` is not positive.

        """
        opened = self._open()
        to = opened.device if device is None else resolve_device(device)
        if not self._prefetches_to_any_device and to.type != "cuda":
            raise SafetensorError(f"prefetch loads to cuda devices, not {to}")
        if not isinstance(threads, int) or threads < 0:
            raise TypeError(f"argument 'threads': expected a number of threads, found {threads!r}")
        check_number("buffer_bytes", buffer_bytes, wanted="positive")
        readers = None if threads == _DEFAULT_THREADS else max(1, threads)
        tensors = plan_tensors(opened, plan)
        return PrefetchLoader(opened, tensors, to, readers=readers, buffer_bytes=buffer_bytes)

    def get_slice(self, name: str) -> PySafeSlice:
        """Return a tensor whose parts can be loaded: ``file.get_slice(name)[10:20, :, 3]``.

        Raises:
            SafetensorError: There is no tensor of this name, or the file is closed.

        """
        opened = self._open()
        return PySafeSlice(opened, opened.find(name))
