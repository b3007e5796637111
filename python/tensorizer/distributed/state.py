"""The whole content of a checkpoint in one process, nested as its planner saved it."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

from .reader import Reader


def load_state(uri: str | os.PathLike[Any], **options: Any) -> dict[str, Any]:
    """Return the whole state of a checkpoint, nested as it was saved, on the CPU.

    The result is what torch's ``dcp_to_torch_save`` saves: ``torch.save(load_state(uri), path)``.
    It can be saved again as a checkpoint of one process: by ``dcp.save(state,
    storage_writer=Writer(other), no_dist=True)``, or by torch's own ``FileSystemWriter``. Objects
    such as the number of the step are included. A dict whose keys are integers becomes a list, as
    in torch, because the paths in a checkpoint do not distinguish the two.

    Args:
        uri: A folder that :class:`Reader` reads: of :class:`Writer`, of torch, or of safetensors
            files.
        options: The arguments of :class:`Reader`.

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
