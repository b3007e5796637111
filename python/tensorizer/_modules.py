"""The tensors of modules: finding them, naming them, putting them back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ._types import Name, TensorType


@dataclass
class Place:
    """Where in a module a tensor belongs."""

    module: torch.nn.Module
    attribute: str
    kind: TensorType

    @staticmethod
    def find(root: torch.nn.Module, name: Name, kind: TensorType) -> Place:
        """Find the place of a tensor; nothing is changed.

        Raises:
            KeyError, ValueError, NotImplementedError: See ``load_into_module``.

        """
        if not isinstance(name, str) or kind is TensorType.STATE_DICT:
            raise NotImplementedError(
                f"{name!r} is part of a state dict, not of a module: use tree() or the mapping"
            )
        path, dot, attribute = name.rpartition(".")
        if not dot:
            raise ValueError(f"{name!r} names no module: expected a dot in front of the attribute")
        try:
            module = root.get_submodule(path)
        except AttributeError:
            raise KeyError(
                f"the module has no submodule {path!r}, to which {name!r} belongs"
            ) from None
        return Place(module, attribute, kind)

    def current(self) -> torch.Tensor | None:
        """Return the tensor that is there now."""
        module = self.module
        return module._parameters.get(self.attribute, module._buffers.get(self.attribute))

    def can_fill(
        self, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype, shape: Sequence[int]
    ) -> bool:
        """Tell whether a tensor can take bytes of this form where it is."""
        group = self.module._parameters if self.kind is TensorType.PARAM else self.module._buffers
        return (
            group.get(self.attribute) is tensor
            and type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout == torch.strided
            and tensor.device == device
            and tensor.dtype == dtype
            and list(tensor.shape) == list(shape)
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        )


def without_overlaps(
    found: Sequence[tuple[int, torch.Tensor]],
) -> list[tuple[int, torch.Tensor]]:
    """Leave out tensors that share memory, such as tied ones."""
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, at)
        for at, (_, tensor) in enumerate(found)
        if tensor.nbytes
    )
    shared: set[int] = set()
    end, last = 0, -1
    for start, stop, at in ranges:
        if start < end:
            shared.update((last, at))
        if stop > end:
            end, last = stop, at
    return [item for at, item in enumerate(found) if at not in shared]


def assign(places: Sequence[Place], tensors: Sequence[torch.nn.Parameter]) -> None:
    """Replace parameters and buffers; those that were one object become one object again."""
    before = [place.current() for place in places]
    first: dict[int, torch.nn.Parameter] = {}
    for place, old, tensor in zip(places, before, tensors, strict=True):
        if old is not None:
            twin = first.setdefault(id(old), tensor)
            if twin is not tensor and _same(twin, tensor):
                tensor = twin  # noqa: PLW2901
        _register(place, tensor)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    same_form = left.shape == right.shape and left.dtype == right.dtype
    return same_form and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _register(place: Place, tensor: torch.nn.Parameter) -> None:
    module, name = place.module, place.attribute
    if place.kind is TensorType.PARAM:
        module._buffers.pop(name, None)
        module.register_parameter(name, tensor)
        return
    module._parameters.pop(name, None)
    persistent = name not in module._non_persistent_buffers_set
    module.register_buffer(name, tensor.detach(), persistent=persistent)


def walk(root: torch.nn.Module) -> Iterator[tuple[int, str, TensorType, Place, torch.Tensor]]:
    """Yield ``(module index, name, type, place, tensor)``, parameters of a module before buffers.

    Each module comes once, a tensor once for each name that it has. The tensors of the root have
    names that begin with a dot.
    """
    for index, (path, module) in enumerate(root.named_modules()):
        groups = ((TensorType.PARAM, module._parameters), (TensorType.BUFFER, module._buffers))
        for kind, group in groups:
            for attribute, tensor in list(group.items()):
                if tensor is not None:
                    place = Place(module, attribute, kind)
                    yield index, f"{path}.{attribute}", kind, place, tensor


def tensors_of(root: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every tensor of a module under the name that a file gives it."""
    return {name: tensor for _, name, _, _, tensor in walk(root)}
