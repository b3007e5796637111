"""Modules whose weights FSDP or accelerate hold elsewhere, and put in place for a forward pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: The calls that give such a module its weights, for the end of a message.
_SUMMON = "call this inside FullyShardedDataParallel.summon_full_params(module)"
_LOAD_OFFLOADED = (
    "call accelerate.hooks.remove_hook_from_submodules(module) before this, and offload it again "
    "afterwards (to disk: into a new folder)"
)
_SAVE_OFFLOADED = (
    "call accelerate.hooks.remove_hook_from_submodules(module) before this, or save "
    "accelerate.utils.modeling.get_state_dict_offloaded_model(module)"
)


def put_in_place(root: torch.nn.Module, *, to_load: bool) -> None:
    """Give a module of FSDP2 its sharded parameters back; refuse other weights held elsewhere.

    After a forward pass FSDP2 may leave gathered parameters in the module: copies, in the dtype for
    computing, which it drops later. torch's ``state_dict`` and ``load_state_dict`` put the sharded
    ones back by hooks, which are called here.

    Raises:
        RuntimeError: FSDP's first version or accelerate holds the weights. The message has the call
            that puts them in place.

    """
    if "torch.distributed.fsdp" in sys.modules:
        _refuse_flattened(root)
        for hook in _hooks_of_fsdp2(root, "_state_dict_pre_hooks"):
            hook()
    refuse_offloaded(root, to_load=to_load)


def take_over(root: torch.nn.Module) -> None:
    """Let FSDP2 use parameters that were replaced, as ``load_state_dict(assign=True)`` does."""
    for hook in _hooks_of_fsdp2(root, "_load_state_dict_post_hooks"):
        hook()


def is_flattened(module: torch.nn.Module) -> bool:
    """Tell whether FSDP's first version may write back the memory of a module's parameters."""
    return getattr(module, "_is_fsdp_managed_module", False)


def refuse_offloaded(root: torch.nn.Module, *, to_load: bool) -> None:
    """Refuse a module whose weights accelerate has offloaded: its hooks hold them.

    Raises:
        RuntimeError: There is such a module in it.

    """
    if "accelerate.hooks" not in sys.modules:
        return
    for name, module in root.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if any(getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,))):
            raise RuntimeError(
                f"accelerate has offloaded the weights of {_described(name, module)}: "
                + (_LOAD_OFFLOADED if to_load else _SAVE_OFFLOADED)
            )


def _refuse_flattened(root: torch.nn.Module) -> None:
    """Refuse a module of FSDP's first version that has flat parts of its parameters.

    Raises:
        RuntimeError: It does not have whole parameters which are written back.

    """
    wrapper: Any = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
    wrapped = [(name, m) for name, m in root.named_modules() if isinstance(m, wrapper)]
    flat = [_described(name, module) for name, module in wrapped if not _is_summoned(module)]
    if not wrapped:
        # A part of such a module. Unless its parameters are whole, they have one dimension, or are
        # plain attributes.
        own = [tensor for tensor in root.parameters() if hasattr(tensor, "_fsdp_flattened")]
        hidden = any(map(_has_plain_tensors, root.modules()))
        if hidden or (own and all(tensor.dim() < 2 for tensor in own)):
            flat = [_described("", root)]
    if flat:
        raise RuntimeError(f"FSDP has flattened the parameters of {flat[0]}: {_SUMMON}")


def _has_plain_tensors(module: torch.nn.Module) -> bool:
    """Tell whether FSDP's first version has replaced the parameters of a module by attributes."""
    if not is_flattened(module) or getattr(module, "_fsdp_use_orig_params", True):
        return False
    return any(isinstance(value, torch.Tensor) for value in vars(module).values())


def _is_summoned(module: Any) -> bool:
    handle = module._handle
    if handle is None:  # no parameters of its own
        return True
    summoned = handle._training_state.name == "SUMMON_FULL_PARAMS"
    return summoned and not handle.is_sharded(handle.flat_param)


def _hooks_of_fsdp2(root: torch.nn.Module, group: str) -> Iterator[Callable[[], None]]:
    """Yield FSDP2's own hooks among those of a module and its submodules; they ignore arguments."""
    if "torch.distributed.fsdp" in sys.modules:
        for module in root.modules():
            for hook in getattr(module, group, {}).values():
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp._fully"):
                    yield hook


def _described(name: str, module: torch.nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})" if name else f"this {type(module).__name__}"
