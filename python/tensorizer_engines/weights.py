"""The weights of a model, one by one, as an engine's ``load_weights`` takes them."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .options import LoaderOptions
    from .reloading import Reload

#: A parameter that vLLM's own tensorizer format adds to its files.
_MARKER = ".vllm_tensorized_marker"


def weights(
    files: Sequence[str],
    options: LoaderOptions,
    device: torch.device,
    prefix: str = "",
    is_wanted: Callable[[str], bool] | None = None,
    *,
    reload: Reload | None = None,
    group: ProcessGroup | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of files one after another, while the next ones are read.

    Args:
        files: Files, indices of shards, folders or addresses.
        options: The options of the load.
        device: The device of the tensors.
        prefix: A text before each name.
        is_wanted: Called with each name in the file; weights for which it is false are not read.
        reload: Leaves out weights that the model holds already.
        group: The ranks that load the same weights, or other ones of the same files, at the same
            time; None for a rank that loads by itself. Nothing else uses the group meanwhile.

    Raises:
        ValueError: A file does not hold the weights of a model as they were published.

    """
    from tensorizer import iterate

    for file in files:
        # A group that nothing else uses is marked as such.
        together: Any = options.group_for(group, device)
        # A part of the model may be in several files.
        has_changed = None
        if reload is not None and len(files) == 1:
            has_changed = reload.filter_for(file, prefix, together)
        found: Any = iterate(
            file,
            device,
            buffer_bytes=options.buffer_bytes,
            encryption=options.decryption(),
            filter_func=functools.partial(_is_wanted, file, (is_wanted, has_changed)),
            group=together,
            **options.reading(),
        )
        with contextlib.closing(found):
            if reload is not None:
                reload.opened(file, prefix, found)
            for name, tensor in found:
                yield prefix + name, tensor
                # Freed before the next one is waited for.
                del tensor


def tensor_parallel_group(parallel_state: str) -> Any:
    """Return the process group of the ranks that load the same weights.

    None if there is none, or the engine has an unknown interface for it.

    Args:
        parallel_state: The name of the engine's module of groups.

    """
    try:
        groups = importlib.import_module(parallel_state)
        is_initialized = groups.model_parallel_is_initialized()
        return groups.get_tp_group().device_group if is_initialized else None
    except (ImportError, AttributeError):
        return None


def _is_wanted(file: str, filters: Sequence[Callable[[str], bool] | None], name: Any) -> bool:
    if not isinstance(name, str):
        raise ValueError(f"{file}: expected names of weights, found {name!r} of a nested state")
    if name == _MARKER:
        raise ValueError(
            f"{file} was written by vLLM from a model of its own: load it with "
            "--load-format tensorizer"
        )
    return all(wants is None or wants(name) for wants in filters)
