"""The arguments of a call that builds a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .fetching import FetchedFiles

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class ModelSpec:
    """Arguments of :func:`from_pretrained`, which documents them.

    Attributes:
        files: The small files of the model, which know its folder.
        config_json: The object in ``config.json``; None if ``config`` replaces it.

    """

    files: FetchedFiles
    config_json: dict[str, Any] | None
    cls: Any
    config: Any
    device: torch.device | str | None
    dtype: torch.dtype | str | None
    trust_remote_code: bool
    kwargs: dict[str, Any]

    @property
    def configuration(self) -> Any:
        """The object in ``config.json``, or the configuration that replaces it."""
        return self.config if self.config_json is None else self.config_json
