"""Folders of vLLM's ``save_sharded_state``: each rank loads the files that it has written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensorizer_engines.weights import weights
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

if TYPE_CHECKING:
    from tensorizer_engines.options import LoaderOptions


class ShardedStreamLoader(ShardedStateLoader):  # type: ignore[misc]  # vLLM is not there to be checked
    """vLLM's loader of these folders, with tensors that this package reads."""

    def __init__(self, load_config: Any, options: LoaderOptions) -> None:
        super().__init__(load_config)
        self._options = options
        self._device = torch.device("cpu")

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill the parameters and buffers of a model with those of its rank."""
        self._device = self._options.device_for(model)
        super().load_weights(model, model_config)

    def iterate_over_files(self, paths: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of this rank's files."""
        return weights(sorted(paths), self._options, self._device)


def has_sharded_state(path: str) -> bool:
    """Tell whether a path is a local folder of these files."""
    pattern = ShardedStateLoader.DEFAULT_PATTERN.format(rank=0, part="*")
    return Path(path).is_dir() and any(Path(path).glob(pattern))
