"""The weights of a folder: the file that holds them, and their tensors on request."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch

from .._native import model_files
from .._types import Head
from ..file.arguments import resolve_device
from ..file.load_plan import LoadPlan
from ..file.open_file import OpenFile
from ..file.options import refuse_hash_of_group
from ..file.progress import ProgressReporter, ProgressType
from ..file.request import Request
from ..tensors.handles import dtype_of
from .folders import ModelFolder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..group.members import Members

#: The beginnings of the names of weights, by the kind of folder.
_STEMS = {
    "transformers": ("model", "pytorch_model"),
    "diffusers": ("diffusion_pytorch_model",),
    "peft": ("adapter_model",),
}
#: The variant in the names that the native module lists.
_LISTED_VARIANT = ".fp16."
#: Names of files of weights in the message of an error.
_WEIGHTS = re.compile(r"\.(?:safetensors|bin)\b")


def names_of_weights(kind: str, variant: str | None = None) -> list[str]:
    """Return the names that the weights of a folder may have, the preferred ones first.

    Args:
        kind: ``"transformers"``, ``"diffusers"`` or ``"peft"``.
        variant: The infix of a variant, such as ``"fp16"`` in ``model.fp16.safetensors``.

    Raises:
        ValueError: The variant is more than an infix.

    """
    if variant is not None and (not variant or set(variant) & set("/\\?#%")):
        raise ValueError(f"expected a variant such as 'fp16', found {variant!r}")
    infix = "." if variant is None else f".{variant}."
    names = [
        name.replace(_LISTED_VARIANT, infix)
        for name in model_files()[0]
        if name.partition(".")[0] in _STEMS[kind]
        and not name.endswith(".tensors")
        and (_LISTED_VARIANT in name) == (variant is not None)
    ]
    # A file that was saved with this package, beside the configuration of a library.
    return [*names, f"{_STEMS[kind][0]}{infix}tensors"]


def open_weights(
    folder: ModelFolder,
    kind: str,
    variant: str | None,
    opened: Callable[[str], OpenFile],
    explicit: Any = None,
) -> OpenFile:
    """Open the file of a folder that holds its weights, or the index that lists the files.

    Args:
        folder: The folder, or one of its files.
        kind: ``"transformers"``, ``"diffusers"`` or ``"peft"``.
        variant: The infix of a variant, or None.
        opened: A function that opens a path or an address.
        explicit: The one file that the configuration names (``transformers_weights``), or None.

    Raises:
        FileNotFoundError: The folder has none of the names, or an index names a missing shard.
        PermissionError: The server refuses all of them.
        OSError, ValueError, CryptographyError: See :class:`tensorizer.TensorDeserializer`.

    """
    if folder.file is not None:
        return opened(folder.file)
    names = names_of_weights(kind, variant) if explicit is None else [_checked(explicit)]
    refused: PermissionError | None = None
    for name in names:
        try:
            return opened(folder.join(name))
        except FileNotFoundError as error:
            # The index itself may be missing, but not a shard that it names.
            text = str(error)
            if name.endswith(".json") and name not in text and _WEIGHTS.search(text):
                raise
        except PermissionError as error:
            refused = refused or error
    if refused is not None:
        raise refused
    where = f"{'at' if folder.path is None else 'in'} {folder.shown}"
    raise FileNotFoundError(f"no weights {where}: expected one of {', '.join(names)}")


def _checked(explicit: Any) -> str:
    """Return the name of the file that a configuration names.

    Raises:
        ValueError: It is not a safetensors file or index inside the folder.

    """
    if (
        not isinstance(explicit, str)
        or not explicit.endswith((".safetensors", ".safetensors.index.json"))
        or not set(explicit.split("/")).isdisjoint({"", ".", ".."})
        or set(explicit) & set("\\?#%:")
    ):
        raise ValueError(
            "expected transformers_weights to name a .safetensors file or index in the folder, "
            f"found {explicit!r}"
        )
    return explicit


class TensorFileOptions:
    """The options of a load, for :class:`OpenFile`.

    Attributes:
        progress: Reports the bytes that are loaded.
        members: The processes that load together, or a context that does nothing.
        headers: Header fields of the requests, or None.

    """

    def __init__(
        self, progress: ProgressType, group: ProcessGroup | None, options: dict[str, Any]
    ) -> None:
        refuse_hash_of_group(group, options)
        self.progress = ProgressReporter(progress)
        self._options = options
        self.headers: Mapping[str, str] | None = options.get("headers")
        self._each_reads = True
        self.members: Members | contextlib.nullcontext[None] = contextlib.nullcontext()
        if group is not None:
            from ..group.members import Members  # torch.distributed is slow to import

            members = Members.of(group)
            if members.size > 1:
                self.members = members

    def open(
        self, folder: ModelFolder, kind: str, variant: str | None = None, explicit: Any = None
    ) -> OpenFile:
        """Open the file of a folder that holds its weights; see :func:`open_weights`."""

        def opened(heads: Sequence[Head] | None = None) -> OpenFile:
            one = functools.partial(OpenFile, progress=self.progress, heads=heads, **self._options)
            return open_weights(folder, kind, variant, one, explicit)

        if isinstance(self.members, contextlib.nullcontext):
            return opened()
        from ..file.collective_load import open_collectively  # as above

        file, self._each_reads = open_collectively(self.members, opened)
        return file

    def load(self, file: OpenFile, device: torch.device) -> dict[Any, torch.Tensor]:
        """Return all tensors of a file that these options have opened, and close it."""

        def planned(file: OpenFile) -> LoadPlan:
            return LoadPlan(Request(device=device), file, self.progress)

        with self.progress, file:
            if isinstance(self.members, contextlib.nullcontext):
                return planned(file).load()
            from ..file.collective_load import load_opened  # torch.distributed is slow to import

            return load_opened(self.members, file, planned, self.progress, self._each_reads)


class Weights(Mapping[str, Any]):
    """The tensors of an open file by name; the first access loads all of them.

    A library accesses them when it has built the module, and has made room for it on the device.

    Args:
        file: The open file, which is closed when the tensors are loaded, or with this object.
        options: The options with which it was opened.
        device: The device of the tensors; None for torch's default device.
        single_use: Hand each tensor out once, as a :class:`SingleUseTensor`.

    Raises:
        ValueError: The file has names of a nested structure.

    """

    def __init__(
        self,
        file: OpenFile,
        options: TensorFileOptions,
        device: torch.device | str | None,
        single_use: bool = False,
    ) -> None:
        self._file, self._options, self._single_use = file, options, single_use
        self.device = resolve_device(torch.get_default_device() if device is None else device)
        names = file.reader.names(range(len(file)))
        nested = [name for name in names if not isinstance(name, str)]
        if nested:
            raise ValueError(
                f"{file.reader.uri} holds a nested structure, with {nested[0]!r}: expected the "
                "tensors of a model by name"
            )
        self._names = [str(name).removeprefix(".") for name in names]
        self._tensors: dict[str, Any] | None = None

    @property
    def floating_dtype(self) -> torch.dtype | None:
        """The dtype of the first floating-point tensor, taken as the model's; None without one."""
        for number in range(len(self._file)):
            dtype = dtype_of(self._file.reader.describe(number)[0])
            if dtype.is_floating_point and dtype.itemsize > 1:
                return dtype
        return None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Any:
        if self._tensors is None:
            loaded = self._options.load(self._file, self.device)
            self._tensors = {
                str(name).removeprefix("."): SingleUseTensor(tensor) if self._single_use else tensor
                for name, tensor in loaded.items()
            }
        return self._tensors[name]


class SingleUseTensor:
    """A tensor that is handed out once, so that it is freed once a library has converted it.

    Libraries index all values with ``[...]``, as they do slices of safetensors files.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        tensor = self._require()
        if index is Ellipsis:
            self._tensor = None
        return tensor[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._require(), name)

    def _require(self) -> torch.Tensor:
        tensor: torch.Tensor | None = self.__dict__.get("_tensor")
        if tensor is None:
            raise RuntimeError("the tensor was handed out before")
        return tensor
