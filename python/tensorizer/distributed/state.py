"""All that a checkpoint holds, in one process: tensors and objects, as its planner saved them."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

from .reader import Reader


def load_state(uri: str | os.PathLike[Any], **options: Any) -> dict[str, Any]:
    """Return the whole state of a checkpoint, nested as it was saved, on the CPU.

    It is what ``dcp_to_torch_save`` of torch saves: ``torch.save(load_state(uri), path)``. Saved
    again by ``dcp.save(state, storage_writer=Writer(other), no_dist=True)``, or by torch's own
    ``FileSystemWriter``, it is a checkpoint of one process. Objects such as the number of the step
    are in it. A dict whose keys are whole numbers comes as a list, as from torch: paths of a
    checkpoint do not tell them apart.

    Args:
        uri: A folder that :class:`Reader` reads: of :class:`Writer`, of torch, or of safetensors
            files.
        options: What :class:`Reader` is given.

    Raises:
        CheckpointException: See :class:`Reader`; it has the error of this process.

    """
    state: dict[str, Any] = {}
    state_dict_loader._load_state_dict(
        state,
        storage_reader=Reader(uri, **options),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return state
