"""The tensors of modules: finding, naming and replacing them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from .._types import Name, TensorType
from ..tensors import fake_mode, sharding, subclasses, without_data
from ..tensors.handles import are_plain, bytes_of, is_fillable
from . import held_elsewhere
from .strides import copy_into, elements_spanned, in_order_of
from .wrappers import Submodules, tensor_of

#: The most tensors that a warning names.
_MOST_NAMED = 20
_WITHOUT_DATA = "on the meta device, and not in the file: "
_STAY = "has tensors that the file lacks, and that stay as they are: "
_COMPUTE = "; compute them before you use the module"
_STRICT = "; strict=True makes this an error"
_SCRIPTED = (
    ": a scripted module gets no new tensors, and a frozen one has none; load before "
    "torch.jit.script, trace or freeze"
)
_FUSED = (
    ": transformers fuses the weights of experts while it loads them: load the model by "
    "tensorizer.transformers.from_pretrained(address)"
)


@dataclass(slots=True)
class TensorSlot:
    """The slot of a tensor in a module."""

    module: torch.nn.Module
    attribute: str
    kind: TensorType

    @staticmethod
    def find(submodules: Submodules, name: Name, kind: TensorType) -> TensorSlot:
        """Return the slot of a tensor, without changing the module.

        Raises:
            KeyError, ValueError, NotImplementedError: See ``load_into_module``.

        """
        if not isinstance(name, str):
            raise NotImplementedError(
                f"{name!r} is part of a nested structure, not of a module: use tree()"
            )
        stated = kind is not TensorType.STATE_DICT
        if not stated and not name.rpartition(".")[2]:
            raise KeyError(f"the module has no tensor {name!r}: the name ends with its module")
        path, dot, attribute = (name if stated else with_dot(name)).rpartition(".")
        if not dot:
            raise ValueError(f"{name!r} names no module: expected a dot in front of the attribute")
        module = submodules.find(path)
        if module is None:
            hint = _hint(submodules.inner, path)
            raise KeyError(f"the module has no submodule {path!r}, to which {name!r} belongs{hint}")
        if not stated or isinstance(module, torch.jit.ScriptModule):
            # A state dict does not state the role of its tensors, and tensors of a scripted module
            # keep theirs. A tensor that the module lacks becomes a buffer.
            own = module._parameters
            is_parameter = attribute in own and own[attribute] is not None
            kind = TensorType.PARAM if is_parameter else TensorType.BUFFER
        return TensorSlot(module, attribute, kind)

    def current(self) -> torch.Tensor | None:
        """Return the tensor that is there now."""
        return tensor_of(self.module, self.attribute)

    def _group(self) -> dict[str, torch.Tensor | None]:
        group: Any = self.module._parameters
        return group if self.kind is TensorType.PARAM else self.module._buffers

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is here, in the role that the file states: parameter or buffer."""
        group = self._group()
        return self.attribute in group and group[self.attribute] is tensor

    def is_free(self) -> bool:
        """Tell whether a tensor can be registered here."""
        module, name = self.module, self.attribute
        if isinstance(module, torch.jit.ScriptModule):
            return False
        known = name in module._parameters or name in module._buffers
        return known or not hasattr(module, name)

    def set(self, tensor: torch.Tensor) -> None:
        """Put a tensor in the slot of one of the same role."""
        self._group()[self.attribute] = tensor

    def can_fill(
        self, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype, shape: Sequence[int]
    ) -> bool:
        """Tell whether a tensor can be filled in place with data of this form."""
        return (
            (subclasses.is_plain(tensor) or not is_lazy(tensor))
            and self.is_of(tensor)
            and tensor.dtype == dtype
            and tensor.shape == shape
            and tensor.device == device
            and is_fillable(tensor)
        )


#: Slots with the tensors that are there.
Found: TypeAlias = Sequence[tuple[TensorSlot, torch.Tensor | None]]
#: The same of one slot, with the number in a file of the tensor for it.
Row: TypeAlias = tuple[TensorSlot, torch.Tensor | None, int]


def _hint(root: torch.nn.Module, path: str) -> str:
    """Return a hint for the end of a message about a submodule that a module lacks."""
    if isinstance(root, torch.jit.ScriptModule):
        return _SCRIPTED
    transformers = sys.modules.get("transformers.modeling_utils")
    models: Any = getattr(transformers, "PreTrainedModel", ())
    if "experts" in path.split(".") and isinstance(root, models):
        return _FUSED
    return ""


def with_dot(name: str) -> str:
    """Return a state dict's name in the form of a module's: those of the root begin with a dot."""
    return name if "." in name else f".{name}"


def without_overlaps(found: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    """Leave out tensors that share memory, such as tied ones."""
    tensors = [tensor for _, tensor in found]
    if not are_plain(tensors):
        tensors = [sharding.local_of(tensor) for tensor in tensors]
    ranges = sorted(
        (start, start + _bytes_spanned(tensor), at)
        for at, tensor in enumerate(tensors)
        if not is_lazy(tensor) and not fake_mode.is_fake(tensor) and tensor.nbytes
        for start in (tensor.data_ptr(),)
    )
    shared: set[int] = set()
    end, last = 0, -1
    for start, stop, at in ranges:
        if start < end:
            shared.update((last, at))
        if stop > end:
            end, last = stop, at
    return [item for at, item in enumerate(found) if at not in shared]


def _bytes_spanned(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    return (elements_spanned(tensor) or tensor.numel()) * tensor.element_size()


def check(
    root: torch.nn.Module,
    found: Found,
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    all_tensors: Collection[torch.Tensor | None] | None,
    *,
    strict: bool,
) -> None:
    """Refuse a module that does not fit a file; warn of tensors that only one of them has.

    ``found`` has slots, and the tensors that are there. ``all_tensors`` are the module's tensors
    for all names of the file; None if the file need not have each of them. Of tied tensors one is
    enough. With ``strict`` the file must have all of them, and no others. Names are those of the
    file: in a state dict, tensors of the root have names without a dot.

    Raises:
        KeyError, RuntimeError, NotImplementedError: See ``load_into_module``.

    """
    unknown: list[str] = []
    # Names of root tensors may begin with a dot or not, but a file cannot have both for one tensor.
    all_names = set(names)
    wrong = [
        f"{name} and .{name} of the file are one tensor of the module"
        for name in names
        if "." not in name and f".{name}" in all_names
    ]
    for (slot, tensor), name, shape in zip(found, names, shapes, strict=True):
        if tensor is not None and subclasses.is_plain(tensor) and tensor.shape == shape:
            continue
        if tensor is None:
            if not slot.is_free():
                scripted = isinstance(slot.module, torch.jit.ScriptModule)
                hint = _SCRIPTED if scripted else ", but another attribute of it"
                raise KeyError(f"{name!r} of the file is no tensor of the module{hint}")
            unknown.append(name)
            continue
        sharded = sharding.is_sharded(tensor)
        whole = sharded or fake_mode.is_fake(tensor)
        if not whole and subclasses.reason_in(slot.module, tensor) is not None:
            raise NotImplementedError(
                f"{name!r} is a {type(tensor).__name__}, which is more than the bytes of one "
                "tensor of a file; load before the module is quantized or wrapped, or torch.load it"
            )
        if not is_lazy(tensor) and list(tensor.shape) != list(shape):
            wrong.append(
                f"size mismatch for {name}: the file holds {list(shape)}, "
                f"the module has {list(tensor.shape)}{without_data.hint(tensor)}"
            )
    unexpected = [name for name in unknown if name.rpartition(".")[2] not in MARKERS]
    if not strict and len(unexpected) < len(unknown):
        # vLLM had made others for its kernels, if its marker is one of them.
        unexpected = []
    missing, empty = _missing(root, all_tensors)
    told: list[str] = []
    for some, error, warning, advice in (
        (missing, "missing in the file: ", _STAY, _STRICT),
        (empty, _WITHOUT_DATA, f"has buffers that are {_WITHOUT_DATA}", _COMPUTE + _STRICT),
        (unexpected, "unknown to the module: ", "has new tensors, which only the file had: ", ""),
    ):
        if some and strict:
            wrong.append(error + ", ".join(some))
        elif some:
            told.append(f"{type(root).__name__} {warning}{_some(some)}{advice}")
    if wrong:
        raise RuntimeError(f"{type(root).__name__} does not fit the file:\n\t" + "\n\t".join(wrong))
    for text in told:
        warnings.warn(text, stacklevel=3)


def warn_of_dtypes(
    root: torch.nn.Module, found: Found, names: Sequence[str], dtypes: Sequence[torch.dtype]
) -> None:
    """Warn of tensors of a module that get another dtype: that of the file, or the one asked for.

    Arguments as for :func:`check`; ``dtypes`` are those that they get.
    """
    changed = [
        f"{name} (from {tensor.dtype} to {dtype})"
        for (slot, tensor), name, dtype in zip(found, names, dtypes, strict=True)
        if tensor is not None and tensor.dtype is not dtype and not is_lazy(tensor)
        if not _keeps_memory(slot, tensor)
    ]
    if changed:
        warnings.warn(
            f"the dtypes of {type(root).__name__} change to those of the file, or to dtype=: "
            + _some(changed),
            stacklevel=3,
        )


def _keeps_memory(slot: TensorSlot, tensor: torch.Tensor) -> bool:
    """Tell whether a tensor of FSDP or of another mesh keeps its memory, and so its dtype."""
    if sharding.is_sharded(tensor):
        return not sharding.local_of(tensor).is_meta
    here = isinstance(tensor, torch.nn.Parameter) and not tensor.is_meta
    return here and held_elsewhere.is_flattened(slot.module)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


#: Tensors by which vLLM recognises its own files, and which it registers in this way.
MARKERS = ("vllm_tensorized_marker",)


def _missing(
    root: torch.nn.Module, all_tensors: Collection[torch.Tensor | None] | None
) -> tuple[list[str], list[str]]:
    """Return the names of a module's tensors that a file lacks, and of its buffers without data.

    The latter are not persistent, so that a file need not have them.
    """
    missing, empty = [], []
    there = set(map(id, all_tensors or ()))
    for _, name, _, slot, tensor in walk(root) if all_tensors is not None else ():
        if id(tensor) not in there:
            if slot.attribute not in slot.module._non_persistent_buffers_set:
                missing.append(name)
            elif tensor.is_meta:
                empty.append(name)
    return sorted(missing), sorted(empty)


def assign(
    root: torch.nn.Module, loaded: Sequence[tuple[TensorSlot, torch.Tensor]], fill: bool
) -> None:
    """Put loaded tensors into the parameters and buffers of a module.

    Args:
        root: The module that holds them.
        loaded: The tensors, each with its slot.
        fill: True to fill memory that fits, instead of replacing it.

    """
    first: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    there = [old for old in (slot.current() for slot, _ in loaded) if old is not None]
    alone = without_overlaps([(id(old), old) for old in {id(t): t for t in there}.values()])
    own = {number for number, _ in alone} if fill else set()
    for slot, tensor in loaded:
        old = slot.current()
        known = None if old is None else first.get(id(old))
        if old is None or is_lazy(old) or not slot.is_of(old):
            register(slot, tensor)
        elif known is None:
            first[id(old)] = tensor, _put(slot, old, tensor, id(old) in own)
        elif _same(known[0], tensor):
            slot.set(known[1])
        else:
            # Tied until now, but different in the file.
            slot.set(_like(old, tensor))
    # Tied tensors that the file has only under another of their names.
    replaced = {number: new for number, (_, new) in first.items() if id(new) != number}
    if replaced:
        for _, _, _, slot, other in list(walk(root)):
            if id(other) in replaced:
                slot.set(replaced[id(other)])


def _put(slot: TensorSlot, old: torch.Tensor, tensor: torch.Tensor, fill: bool) -> torch.Tensor:
    """Make a tensor of a module hold loaded data; return it, or its replacement."""
    new = tensor.detach()
    frozen = old.is_inference() and not torch.is_inference_mode_enabled()
    sharded = sharding.is_sharded(old)
    fits = fill and not sharded and old.shape == new.shape and elements_spanned(old) is not None
    fits = fits and (old.dtype, old.device) == (new.dtype, new.device)
    if not frozen and (fits or _keeps_memory(slot, old)):
        copy_into(sharding.local_of(old), sharding.local_of(new))
        return old
    if frozen or sharded or not torch._has_compatible_shallow_copy_type(old, new):
        replacement = _like(old, tensor)
        slot.set(replacement)
        return replacement
    if old.is_leaf and not (new.is_floating_point() or new.is_complex()):
        old.requires_grad_(False)
    old.data = in_order_of(old, new)
    return old


def _like(old: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a loaded tensor as an object with the class and the attributes of ``old``."""
    sharded = sharding.is_sharded(old)
    new = tensor.detach() if sharded else in_order_of(old, tensor.detach())
    gradient = old.requires_grad and (new.is_floating_point() or new.is_complex())
    if sharded and isinstance(old, torch.nn.Parameter):
        like: torch.Tensor = torch.nn.Parameter(new, gradient)
    elif sharded or type(old) is torch.Tensor:
        like = new.requires_grad_(gradient)
    else:
        like = torch.Tensor._make_subclass(type(old), new, gradient)
    like.__dict__.update(old.__dict__)
    return like


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    same_form = left.shape == right.shape and left.dtype == right.dtype
    if fake_mode.is_fake(left) or fake_mode.is_fake(right):
        return same_form
    return same_form and torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return bytes_of(sharding.local_of(tensor).detach())


def register(slot: TensorSlot, tensor: torch.Tensor) -> None:
    """Register a tensor in a slot, where the module has none in this role."""
    module, name = slot.module, slot.attribute
    if slot.kind is TensorType.PARAM:
        module._buffers.pop(name, None)
        parameter: Any = tensor  # not sharded, as the slot was empty
        module.register_parameter(name, parameter)
        return
    module._parameters.pop(name, None)
    persistent = name not in module._non_persistent_buffers_set
    module.register_buffer(name, tensor.detach(), persistent=persistent)


def walk(root: torch.nn.Module) -> Iterator[tuple[int, str, TensorType, TensorSlot, torch.Tensor]]:
    """Yield ``(module index, name, type, slot, tensor)``, parameters of a module before buffers.

    Each module comes once, and each tensor once for each name that it has. The names of the root's
    tensors begin with a dot.
    """
    for index, (path, module) in enumerate(root.named_modules()):
        groups = ((TensorType.PARAM, module._parameters), (TensorType.BUFFER, module._buffers))
        for kind, group in groups:
            for attribute, tensor in list(group.items()):
                if tensor is not None:
                    slot = TensorSlot(module, attribute, kind)
                    yield index, f"{path}.{attribute}", kind, slot, tensor


def tensors_for(
    root: torch.nn.Module, names: Mapping[int, str]
) -> tuple[dict[int, torch.Tensor], list[str]]:
    """Return the tensors of a module by the numbers of their names in a file, and other names.

    The latter are the names of all its other tensors, in the form of :func:`walk`.
    """
    submodules = Submodules(root, [name for name in names.values() if "." in name])
    found: dict[int, torch.Tensor] = {}
    seen: set[tuple[int, str]] = set()
    for number, name in names.items():
        path, dot, attribute = name.rpartition(".")
        module = submodules.find(path) if dot else None
        tensor = tensor_of(module, attribute)
        if tensor is not None:
            found[number] = tensor
            seen.add((id(module), attribute))
    others = [
        name for _, name, _, slot, _ in walk(root) if (id(slot.module), slot.attribute) not in seen
    ]
    return found, others
