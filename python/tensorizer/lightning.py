"""Checkpoints of Lightning by tensorizer: a plugin for its ``Trainer`` and ``Fabric``."""

from .torch_hooks.lightning import TensorizerCheckpointIO

__all__ = ["TensorizerCheckpointIO"]
