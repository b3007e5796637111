"""A plugin for Lightning's ``Trainer`` and ``Fabric`` that saves checkpoints with tensorizer."""

from .torch_hooks.lightning import TensorizerCheckpointIO

__all__ = ["TensorizerCheckpointIO"]
